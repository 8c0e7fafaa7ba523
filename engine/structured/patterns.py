"""Regular expressions that xgrammar (0.2.8) matches as they are meant. Pure.

Experiments showed that it refuses look-around, back references, word boundaries, inline flags and Unicode
classes. It warns of anchors in the middle and of unknown escapes, and then matches something else. All of
these raise ClientError here, with the position.
"""

import re
from typing import Any, NamedTuple

from baton.core.errors import ClientError
from engine.structured.refusal import is_half_of_pair, refuse

REGEX_CHARACTERS_MAX = 8192
COUNT_DIGITS_MAX = 6
"""Digits of a repetition's bound: its size is told by `SIZE_MAX`, and nobody computes with longer numbers."""
SIZE_MAX = 20_000
"""Elements with repetitions written out; each is a state of the compiled automaton."""
DEPTH_MAX = 64
SKIPPED_MAX = 64
"""Parts in a row of which each may be left out. The time to compile grows with the third power of their
number: 0.9 s for 64 parts like `[a-z]*` with xgrammar 0.2.8 and 32,000 tokens, 30 s for 300."""
NESTED_REPEATS_MAX = 16
"""Repetitions within repetitions: 0.9 s for 16, and 2.9 s for 24."""

_CLASS_ESCAPES = frozenset("dwsDWS")
_CONTROL_ESCAPES = frozenset("tnrfv")
_JSON_UNSAFE = frozenset('"\\')
_LITERALS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
"""Escapes and classes, in which no character is a sign of its own."""
_ANCHOR = re.compile("[$^]")
_PLAIN = re.compile(r"[A-Za-z0-9_ @:/,;=#%&~!'<>-]*")


class _RegexPart(NamedTuple):
    size: int
    """Its elements, with repetitions written out."""
    is_ended: bool
    """Whether it is anchored to the end."""
    skipped: int | None
    """How many parts in a row it may leave out. None: something must come."""
    repeats: int = 0
    """How deep its repetitions are nested."""


_ONE = _RegexPart(1, is_ended=False, skipped=None)


class _Regex:
    def __init__(self, text: str, where: str, *, in_json: bool) -> None:
        self.text, self.where, self.in_json = text, where, in_json
        self.at = 0

    def check(self) -> int:
        """Return the number of elements."""
        part = self._alternatives(depth=0, is_at_start=True)
        if self.at < len(self.text):
            self._refuse("unmatched ')'")
        return part.size

    def _refuse(self, what: str) -> None:
        raise ClientError(
            f"{self.where}: {what} at position {self.at} of the regular expression {self.text!r:.200}",
            param=self.where,
            code="unsupported_grammar",
        )

    def _peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.text[at] if at < len(self.text) else ""

    def _alternatives(self, *, depth: int, is_at_start: bool) -> _RegexPart:
        """Read until the group ends; `is_at_start` tells that nothing can come before it."""
        if depth > DEPTH_MAX:
            self._refuse(f"more than {DEPTH_MAX} nested groups")
        start, size, is_ended, is_any_ended = self.at, 0, False, False
        run, is_empty, repeats = 0, True, 0
        skipped: list[int] = []
        while (char := self._peek()) and char != ")":
            if char == "|":
                skipped += [run] if is_empty else []
                run, is_empty = 0, True
                self.at += 1
                start, is_ended = self.at, False
            elif char == "^":
                if self.at != start or not is_at_start:
                    self._refuse("'^' that is not at the beginning")
                self.at += 1
                start = self.at
            elif is_ended:
                self._refuse("'$' that is not at the end")
            elif char == "$":
                self.at += 1
                is_ended = is_any_ended = True
            else:
                part = self._repeated(depth, is_at_start=is_at_start and self.at == start)
                is_ended = part.is_ended
                is_any_ended |= is_ended
                size, repeats = size + part.size, max(repeats, part.repeats)
                run, is_empty = (0, False) if part.skipped is None else (run + part.skipped, is_empty)
                self._check_bounds(size, run, repeats)
        skipped += [run] if is_empty else []
        return _RegexPart(size, is_any_ended, max(skipped, default=None), repeats)

    def _check_bounds(self, size: int, run: int, repeats: int) -> None:
        if size > SIZE_MAX:
            self._refuse(f"more than {SIZE_MAX} elements, repetitions written out,")
        if run > SKIPPED_MAX:
            self._refuse(f"more than {SKIPPED_MAX} parts in a row that may be left out")
        if repeats > NESTED_REPEATS_MAX:
            self._refuse(f"more than {NESTED_REPEATS_MAX} nested repetitions")

    def _repeated(self, depth: int, *, is_at_start: bool) -> _RegexPart:
        """Read an atom and how often it comes."""
        start = self.at
        part = self._atom(depth, is_at_start=is_at_start)
        has_anchor = (
            part.is_ended or _ANCHOR.search(_LITERALS.sub("", self.text[start : self.at])) is not None
        )
        end = self.at
        low, times = self._quantifier()
        if has_anchor and self.at != end:
            self._refuse("a repeated group with '^' or '$' in it")
        skipped = part.skipped
        if skipped is not None:
            skipped = skipped * times + (low == 0)
        elif low == 0:
            skipped = 1
        return _RegexPart(part.size * times, part.is_ended, skipped, part.repeats + (self.at != end))

    def _atom(self, depth: int, *, is_at_start: bool) -> _RegexPart:
        char = self._peek()
        if char == "(":
            return self._group(depth, is_at_start=is_at_start)
        if char == "[":
            self._class()
        elif char == "\\":
            found = self._escape()
            if found is not None:
                self._literal(found)
        elif char in "*+?{":
            self._refuse(f"nothing to repeat before {char!r}")
        elif char in "]}":
            self._refuse(f"{char!r} without its beginning; write it with a backslash")
        else:
            self._literal(char)
            self.at += 1
        return _ONE

    def _literal(self, char: str) -> None:
        self._check_half(char)
        if self.in_json and (char in _JSON_UNSAFE or char < " "):
            self._refuse(f"{char!r}, which JSON writes with an escape, is not supported in a pattern")

    def _check_half(self, char: str | None) -> None:
        if char is not None and is_half_of_pair(ord(char)):
            self._refuse(f"half of a surrogate pair (\\u{ord(char):04x}; write the whole character)")

    def _group(self, depth: int, *, is_at_start: bool) -> _RegexPart:
        self.at += 1
        if self._peek() == "?":
            if self._peek(1) == ":":
                self.at += 2
            elif self._peek(1) == "<" and self._peek(2) not in ("=", "!"):
                end = self.text.find(">", self.at)
                if end < 0 or not self.text[self.at + 2 : end].isidentifier():
                    self._refuse("a group's name is malformed")
                self.at = end + 1
            else:
                self._refuse("look-around, flags and other special groups are not supported")
        part = self._alternatives(depth=depth + 1, is_at_start=is_at_start)
        if self._peek() != ")":
            self._refuse("missing ')'")
        self.at += 1
        return part._replace(size=max(1, part.size))

    def _class(self) -> None:
        self.at += 1
        is_negated = has_any = self._peek() == "^"  # What is not named has characters enough.
        if is_negated:
            self.at += 1
        if self._peek() == "]":
            self._refuse("an empty character class")
        while (char := self._peek()) != "]":
            if not char:
                self._refuse("missing ']'")
            low = high = self._class_item()
            if self._peek() == "-" and self._peek(1) not in ("]", ""):
                self.at += 1
                high = self._class_item()
                if low is None or high is None or high < low:
                    self._refuse("a malformed range in a character class")
            if not is_negated:
                self._check_half(low)
                self._check_half(high)
            has_any |= low is None or high is None or not self._is_escaped(low, high)
        if not has_any:
            self._refuse("a class of characters that JSON writes with an escape, which is not supported")
        self.at += 1

    def _is_escaped(self, low: str, high: str) -> bool:
        """Whether JSON writes all characters of a range with an escape."""
        return self.in_json and (high < " " or (low == high and low in _JSON_UNSAFE))

    def _class_item(self) -> str | None:
        """Return the character, or None for a class such as \\d."""
        char = self._peek()
        if char == "\\":
            return self._escape()
        if char == "[" and self._peek(1) in (":", ".", "="):
            self._refuse("POSIX classes are not supported")
        self.at += 1
        return char

    def _escape(self) -> str | None:
        """Return the character that the escape stands for, or None for a class of characters."""
        char = self._peek(1)
        if char in _CLASS_ESCAPES and char:
            self.at += 2
            return None
        if char in ("x", "u"):
            digits = self.text[self.at + 2 : self.at + (4 if char == "x" else 6)]
            if len(digits) != (2 if char == "x" else 4) or not all(
                d in "0123456789abcdefABCDEF" for d in digits
            ):
                self._refuse(f"a malformed \\{char} escape")
            found = chr(int(digits, 16))
            self.at += 2 + len(digits)
            return found
        if char in _CONTROL_ESCAPES and char:
            self.at += 2
            return "\t\n\r\f\v"["tnrfv".index(char)]
        if not char or char.isalnum():
            self._refuse(f"the escape \\{char} is not supported")
        self.at += 2
        return char

    def _quantifier(self) -> tuple[int, int]:
        """Return how often the atom comes at least and at most. Without a bound it is once at most, since a
        loop costs no more states."""
        char = self._peek()
        if char == "{":
            low, times = self._counted()
        elif char in ("*", "+", "?") and char:
            self.at += 1
            low, times = int(char == "+"), 1
        else:
            return 1, 1
        if self._peek() == "?":
            self.at += 1
        if self._peek() in ("*", "+", "?", "{") and self._peek():
            self._refuse("two quantifiers in a row")
        return low, times

    def _counted(self) -> tuple[int, int]:
        end = self.text.find("}", self.at)
        low, _comma, high = self.text[self.at + 1 : max(end, 0)].partition(",")
        counts = [low, high] if high else [low]
        if end < 0 or not all(one.isascii() and one.isdigit() for one in counts):
            self._refuse("a malformed {…}")
        if max(map(len, counts)) > COUNT_DIGITS_MAX:
            self._refuse("{…} with more repetitions than can be followed")
        times = int(high) if high else int(low)
        if times < int(low):
            self._refuse("{…} with its upper bound below the lower one")
        self.at = end + 1
        return int(low), max(1, times)


def check_pattern(text: str, where: str, *, in_json: bool) -> int:
    """Raise ClientError unless xgrammar matches `text` as it is meant. Return how many elements it has.

    `in_json` tells that it is matched against the inside of a JSON string before that is unescaped.
    """
    if len(text) > REGEX_CHARACTERS_MAX:
        raise ClientError(
            f"{where} may have at most {REGEX_CHARACTERS_MAX} characters, not {len(text)}", param=where
        )
    return _Regex(text, where, in_json=in_json).check()


def regex_size(text: Any, where: str) -> int:
    """Check a regular expression that stands alone. Return how many elements it has."""
    if not isinstance(text, str) or not text:
        raise refuse(where, "", "must be a regular expression")
    if "\0" in text:
        raise refuse(where, "", "may have no null characters")
    return check_pattern(text, where, in_json=False)


def literal_start(pattern: str) -> str | None:
    """The text with which every match of a checked pattern begins, or None if that is not known."""
    bare = _LITERALS.sub("", pattern)
    depth = 0
    for char in bare:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return None
    found = _PLAIN.match(pattern, 1)
    if not pattern.startswith("^") or found is None:
        return None
    text = found[0]
    is_optional = pattern[found.end() : found.end() + 1] in tuple("?*{")
    return (text[:-1] if is_optional else text) or None
