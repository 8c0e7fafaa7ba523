"""What a worker has people know of it."""

from baton.core.messages import INFO_NOTE
from worker.notes import NOTE_CHARS_MAX, member_notes


def test_the_engines_notes_come_first_then_the_backends_that_do_not_work():
    notes = member_notes((INFO_NOTE + "kernels: native",), {"nixl": "no plugin"})
    assert notes == (INFO_NOTE + "kernels: native", "KV transfer without nixl: no plugin")


def test_a_note_is_one_line_of_bounded_length():
    (note,) = member_notes(("kernels: torch, slower, because\n" + "the compiler\tsaid\n" * 1000,), {})
    assert note.startswith("kernels: torch, slower, because the compiler said")
    assert "\n" not in note
    assert len(note) <= NOTE_CHARS_MAX
