"""Bounds of JSON that clients send, counted before it is decoded. Pure.

A decoder holds the interpreter's lock until it is done, so that a thread would not keep it from stalling the
event loop. Its time grows with the number of objects, lists and strings, of which a few megabytes hold
millions. The count goes through the text in slices, between which other threads run.
"""

import re
from typing import NamedTuple

from baton.core.errors import ClientError

NODES_MAX = 131_072
"""Most objects, lists and strings of one text. They take the decoder 30 ms."""
VALUES_MAX = 2**20 + NODES_MAX
"""Most values of one text, token ids included. They take the decoder 40 ms."""
SLICE_BYTES = 65_536

_STRUCTURE = b'"[{,'
_OTHERS = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
_OUTSIDE = re.compile(rb'["[\]{}]|[^"[\]{}]{1,65536}')
_INSIDE = re.compile(rb'"|(?:[^"\\]|\\.){1,16384}', re.DOTALL)
"""Patterns of the next token outside and within a string. The bounds keep one match from taking long."""


class JsonSize(NamedTuple):
    """Size of a JSON text, or of its beginning. It is too large by a few for a text with errors."""

    nodes: int = 0
    """Objects, lists and strings; names of fields are strings."""
    values: int = 0
    """Values of any kind."""


class JsonBudget:
    """Nodes and values that several texts of one request may have together."""

    def __init__(self) -> None:
        self._nodes, self._values = 0, 0

    def take(self, text: bytes, field: str) -> None:
        """Count a text. Raises ClientError that names the field if that is too much."""
        if not self._count(text)[0]:
            raise _too_many(field)

    def take_body(self, body: bytes) -> None:
        """Count a whole body. Raises ClientError that names the field which is too large."""
        if len(body) <= NODES_MAX:  # Every node has a byte of its own.
            return
        is_within, read = self._count(body)
        if not is_within:
            raise _too_many(field_at(body, read))

    def _count(self, text: bytes) -> tuple[bool, int]:
        """Count up to the bounds. Returns whether the text is within them, and how many bytes were read."""
        at, in_string = 0, False
        while at < len(text):
            size, in_string, at = count_slice(text, at, in_string=in_string)
            self._nodes += size.nodes
            self._values += size.values
            if self._nodes > NODES_MAX or self._values > VALUES_MAX:
                return False, at
        return True, at


def count_slice(text: bytes, at: int, *, in_string: bool) -> tuple[JsonSize, bool, int]:
    """Count the slice of a text that begins at `at`, within a string or not. Returns the size, whether the
    slice ends within a string, and where the next one begins."""
    end = min(len(text), at + SLICE_BYTES)
    part = text[at:end]
    if end < len(text) and (len(part) - len(part.rstrip(b"\\"))) % 2:  # No escape is cut in two.
        end += 1
        part = text[at:end]
    plain = part.replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces = plain.translate(None, _OTHERS).split(b'"')
    outside = b"".join(pieces[in_string::2])
    quotes = len(pieces) - 1
    containers = outside.count(b"[") + outside.count(b"{")
    ended = (quotes + in_string) // 2
    return JsonSize(containers + ended, containers + outside.count(b",")), bool((quotes + in_string) % 2), end


def field_at(body: bytes, end: int) -> str:
    """Return the name of the body's field that byte `end` belongs to; empty: it belongs to none."""
    depth, field, began = 0, "", -1
    at = 0
    while at < end and (token := (_OUTSIDE if began < 0 else _INSIDE).match(body, at, end)) is not None:
        at = token.end()
        match token.group()[:1]:
            case b'"' if began >= 0:
                if depth == 1 and body[at : at + 64].lstrip().startswith(b":"):
                    field = body[began : min(at - 1, began + 100)].decode("utf-8", "replace")
                began = -1
            case b'"':
                began = at
            case b"[" | b"{" if began < 0:
                depth += 1
            case b"]" | b"}" if began < 0:
                depth -= 1
            case _:
                pass
    return field


def _too_many(field: str) -> ClientError:
    return ClientError(
        f"{field or 'the body'} is too large: a request may have at most {NODES_MAX} JSON objects, lists and "
        f"strings, and {VALUES_MAX} values",
        param=field or None,
    )
