"""Regular expressions as expressions of EBNF (GBNF), for grammars that have them as terminals. Pure."""

import re
from re import _constants as signs  # pyright: ignore[reportAttributeAccessIssue] - Python's own parser,
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue] - which has no stubs
from typing import Any

from engine.structured.patterns import check_pattern
from engine.structured.refusal import refuse

_CATEGORIES = {"DIGIT": "0-9", "SPACE": r" \t\n\r\f\v", "WORD": "A-Za-z0-9_"}
_UNBOUNDED = 2**31
_DOT = r"[^\n]"
_ANYTHING = r"[^\x00]"
"""A dot that matches newlines as well."""


def ebnf_of_regex(text: str, where: str, *, ignores_case: bool = False, dot_is_all: bool = False) -> str:
    """Return an expression of exactly the texts that the regular expression matches as a whole.

    Raises ClientError for what cannot be written so, such as look-around.
    """
    # Lark's and guidance's writing of a dot that matches newlines.
    if text.startswith("(?s:") and text.endswith(")"):
        text, dot_is_all = f"(?:{text[4:-1]})", True
    check_pattern(text, where, in_json=False)
    try:
        parsed = parser.parse(text, re.ASCII)
    except (re.error, RecursionError, OverflowError) as error:
        raise refuse(where, "", f"{text!r:.100} is no regular expression: {error}") from error
    return _Writer(where, text, ignores_case=ignores_case, dot_is_all=dot_is_all).sequence(parsed)


def quoted(text: str, *, ignores_case: bool = False) -> str:
    """Return a text of EBNF, or a sequence of classes if upper and lower case are the same."""
    if ignores_case and text.lower() != text.upper():
        return " ".join(_cased(char) for char in text)
    return f'"{"".join(map(_escaped, text))}"'


def _cased(char: str) -> str:
    cases = dict.fromkeys((char, char.lower(), char.upper()))
    one_each = [case for case in cases if len(case) == 1]
    return f"[{''.join(map(_escaped, one_each))}]"


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\U{ord(char):08x}"


class _Writer:
    def __init__(self, where: str, text: str, *, ignores_case: bool, dot_is_all: bool) -> None:
        self._where, self._text = where, text
        self._ignores_case = ignores_case
        self._dot = _ANYTHING if dot_is_all else _DOT

    def sequence(self, items: Any) -> str:
        parts: list[str] = []
        run = ""
        for op, value in items:
            if op is signs.LITERAL:
                run += chr(value)
                continue
            if run:
                parts.append(quoted(run, ignores_case=self._ignores_case))
                run = ""
            if op is not signs.AT:  # anchors stand at the ends alone, where they say nothing
                parts.append(self._one(op, value))
        if run:
            parts.append(quoted(run, ignores_case=self._ignores_case))
        return " ".join(parts) or '""'

    def _one(self, op: Any, value: Any) -> str:
        if op is signs.ANY:
            return self._dot
        if op is signs.NOT_LITERAL:
            return f"[^{_escaped(chr(value))}]"
        if op is signs.IN:
            return self._class(value)
        if op is signs.BRANCH:
            return f"({' | '.join(self.sequence(one) for one in value[1])})"
        if op is signs.SUBPATTERN:
            return f"({self.sequence(value[-1])})"
        if op in (signs.MAX_REPEAT, signs.MIN_REPEAT):
            low, high, inner = value
            return f"({self.sequence(inner)}){_times(int(low), int(high))}"
        raise refuse(self._where, "", f"{self._text!r:.100} has what a grammar cannot express")

    def _class(self, items: Any) -> str:
        found: list[str] = []
        is_negated = False
        for op, value in items:
            if op is signs.NEGATE:
                is_negated = True
            elif op is signs.LITERAL:
                found.append(self._range(value, value))
            elif op is signs.RANGE:
                found.append(self._range(*value))
            else:
                name = str(value).removeprefix("CATEGORY_")
                if name.startswith("NOT_") and len(items) == 1:
                    return f"[^{_CATEGORIES[name[4:]]}]"
                if name not in _CATEGORIES:
                    raise refuse(
                        self._where, "", rf"{self._text!r:.100} has \D, \S or \W beside others in a class"
                    )
                found.append(_CATEGORIES[name])
        return f"[{'^' if is_negated else ''}{''.join(found)}]"

    def _range(self, low: int, high: int) -> str:
        written = _escaped(chr(low)) if low == high else f"{_escaped(chr(low))}-{_escaped(chr(high))}"
        if not self._ignores_case or high > 127:
            return written
        chars = [chr(code) for code in range(low, high + 1)]
        others = {case for char in chars for case in (char.lower(), char.upper())} - set(chars)
        return written + "".join(map(_escaped, sorted(others)))


def _times(low: int, high: int) -> str:
    if high >= _UNBOUNDED:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"
