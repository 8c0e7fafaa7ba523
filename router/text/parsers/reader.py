"""A reader of text that is still arriving, as if all of it were there.

A parser is a generator that reads through a `TextReader` and yields wherever it needs more text than has
come. Each reading step's result depends on the text alone, never on where it was cut. So the same holds for
whole parsers.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Parse = Generator[None, None, T]
Emit = Callable[[str], None]

SPACE = " \t\r\n"


class TextReader:
    def __init__(self) -> None:
        self._text = ""
        self._is_ended = False
        self._record: list[str] | None = None

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self._is_ended = True

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        if self._record is not None:
            self._record.append(taken)
        return taken

    def mark(self) -> None:
        """Remember the text that is read from here on, until `since_mark`."""
        self._record = []

    def since_mark(self) -> str:
        """Return the text read since the mark, and forget the mark."""
        record, self._record = self._record, None
        return "".join(record or ())

    @property
    def is_over(self) -> bool:
        """True if all text has come and was read."""
        return self._is_ended and not self._text

    def rest(self) -> str:
        """Return all text that came and was not read."""
        return self._take(len(self._text))

    # --- steps ------------------------------------------------------------------------------------

    def until(self, markers: Sequence[str], emit: Emit) -> Parse[str | None]:
        """Read up to and with the first of `markers`. The text before it goes to `emit`, piece by piece.
        Returns None if the text ended first. No marker may be part of another."""
        while True:
            hits = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
            if hits:
                at, marker = min(hits)
                if at:
                    emit(self._take(at))
                self._take(len(marker))
                return marker
            safe = len(self._text)
            if not self._is_ended:
                safe = min((_beginning(self._text, marker) for marker in markers), default=safe)
            if safe:
                emit(self._take(safe))
            if self._is_ended:
                return None
            yield

    def take_if(self, options: Sequence[str]) -> Parse[str | None]:
        """Read whichever of `options` comes next. Returns None, and reads nothing, if none does. No option
        may begin another."""
        while True:
            for option in options:
                if self._text.startswith(option):
                    self._take(len(option))
                    return option
            if self._is_ended or not any(option.startswith(self._text) for option in options):
                return None
            yield

    def space(self) -> Parse[str]:
        """Read white space."""
        found = ""
        while True:
            rest = self._text.lstrip(SPACE)
            found += self._take(len(self._text) - len(rest))
            if rest or self._is_ended:
                return found
            yield

    def peek(self) -> Parse[str]:
        """Return the next character without reading it; empty: the text ended."""
        while not self._text and not self._is_ended:
            yield
        return self._text[:1]

    def string(self) -> Parse[tuple[str, bool]]:
        """Read a JSON string, which comes next, as it is written. Returns False if the text ended within
        it."""
        at, is_escaped = 1, False
        while True:
            while at < len(self._text):
                char = self._text[at]
                at += 1
                if is_escaped:
                    is_escaped = False
                elif char == "\\":
                    is_escaped = True
                elif char == '"':
                    return self._take(at), True
            if self._is_ended:
                return self._take(len(self._text)), False
            yield

    def value(self, emit: Emit) -> Parse[bool]:
        """Read a JSON value of any kind, to its end by brackets and quotes. Its pieces go to `emit`. Returns
        False if the text ended within it, or brackets do not match."""
        first = yield from self.peek()
        if first == '"':
            text, is_whole = yield from self.string()
            emit(text)
            return is_whole
        if first not in ("{", "["):
            return (yield from self._scalar(emit))
        return (yield from self._nested(emit))

    def word(self, emit: Emit) -> Parse[None]:
        """Read up to white space, a bracket, a brace, a backtick or a '<'."""
        while (char := (yield from self.peek())) and char not in "[{`<" and char not in SPACE:
            emit(self._take(1))

    def python_list(self, emit: Emit, characters_max: int) -> Parse[bool]:
        """Read to the end of a Python list, which comes next, by brackets and quotes. Returns False if it has
        no end, or is longer than `characters_max`."""
        depth, quote, is_escaped = 0, "", False
        for _ in range(characters_max):
            char = yield from self.peek()
            if not char:
                return False
            emit(self._take(1))
            if is_escaped:
                is_escaped = False
            elif quote:
                is_escaped = char == "\\"
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in "[({":
                depth += 1
            elif char in "])}":
                depth -= 1
                if depth == 0:
                    return True
        return False

    def _scalar(self, emit: Emit) -> Parse[bool]:
        count = 0
        while True:
            char = yield from self.peek()
            if not char or char in ",]}[{:" or char in SPACE or char in '"':
                return count > 0
            emit(self._take(1))
            count += 1

    def _nested(self, emit: Emit) -> Parse[bool]:
        closers: list[str] = []
        is_string = is_escaped = False
        while True:
            at, text = 0, self._text
            while at < len(text):
                char = text[at]
                at += 1
                if is_escaped:
                    is_escaped = False
                elif is_string:
                    is_escaped, is_string = char == "\\", char != '"'
                elif char == '"':
                    is_string = True
                elif char in "{[":
                    closers.append("}" if char == "{" else "]")
                elif char in "}]":
                    if closers.pop() != char:
                        emit(self._take(at))
                        return False
                    if not closers:
                        emit(self._take(at))
                        return True
            if at:
                emit(self._take(at))
            if self._is_ended:
                return False
            yield


def _beginning(text: str, marker: str) -> int:
    """Return the position of the longest end of `text` that is a beginning of `marker`. len(text): there is
    none."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return at
        at = text.find(marker[0], at + 1)
    return len(text)
