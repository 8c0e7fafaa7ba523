"""What people should know of a worker and no number says."""

import textwrap
from collections.abc import Mapping, Sequence

NOTE_CHARS_MAX = 400
"""The length of one note. A compiler or a library may fill a page, and the whole of it is in the worker's
log."""


def member_notes(engine: Sequence[str], left_out: Mapping[str, str]) -> tuple[str, ...]:
    """Notes for `Member.notes`: the engine's, and the transfer backends (name -> reason) that do not work
    here."""
    lines = [*engine, *(f"KV transfer without {name}: {reason}" for name, reason in left_out.items())]
    return tuple(textwrap.shorten(line, NOTE_CHARS_MAX, placeholder=" …") for line in lines)
