r"""Patterns of strings within a JSON grammar, translated here and put in place of what xgrammar makes of
them.

xgrammar (0.2.8) compiles a pattern within a schema to an automaton of its own, under which `^a(\.[0-9]+)?$`
accepts `a1`, and a pattern beyond ASCII to rules that let quotes into the string. Its translation of a bare
regular expression is right: 1200 random expressions met no difference from Python's. So the schema is
compiled with a placeholder for each pattern, whose rule is then replaced by that translation, kept to what
JSON writes unescaped.
"""

import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
Ranges = list[tuple[int, int]]

EBNF_TOKEN = re.compile(r'\[(?:[^\]\\]|\\.)*\]|"(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|\\.', re.DOTALL)
"""A class of characters, a literal or a name, as xgrammar prints them."""
_PLACE = re.compile(r'Regex\("b\{(\d+),\}"(?:, json_string=\w+)?\)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_TWO_DIGITS = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)
_CONTROLS = {"0": 0, "a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "e": 27}
_FIRST = 2
"""The lowest number of a placeholder, since xgrammar would write `b{1,}` as a rule of its own."""
UNESCAPED: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)]
"""The characters that stand in a JSON string as they are."""


class JsonPatterns:
    """The patterns of the schemas that one grammar is made of."""

    def __init__(self) -> None:
        self._patterns: list[str] = []

    def taken_out(self, schema: Any) -> Any:
        """The checked schema with a placeholder for each pattern, and without what the matcher enforces."""
        if not isinstance(schema, dict):
            return schema
        found: Schema = {}
        for key, value in schema.items():
            match key:
                case "pattern":
                    found[key] = self._placeholder(value)
                case "patternProperties":
                    found[key] = {self._placeholder(one): self.taken_out(v) for one, v in value.items()}
                case "properties" | "$defs" | "definitions":
                    found[key] = {name: self.taken_out(one) for name, one in value.items()}
                case "anyOf" | "allOf" | "prefixItems":
                    found[key] = [self.taken_out(one) for one in value]
                case "items" | "additionalProperties" | "propertyNames":
                    found[key] = self.taken_out(value)
                case "uniqueItems":
                    pass  # The matcher sees to it (`engine.unique_items`); the compiler does not know it.
                case _:
                    found[key] = value
        return found

    def _placeholder(self, pattern: str) -> str:
        if pattern not in self._patterns:
            self._patterns.append(pattern)
        return f"b{{{self._patterns.index(pattern) + _FIRST},}}"

    def put_back(self, ebnf: str) -> str:
        """The grammar that xgrammar printed, with rules of the patterns in place of the placeholders."""
        if not self._patterns:
            return ebnf
        found = _PLACE.sub(lambda place: f"((json_pattern_{int(place[1]) - _FIRST}_root))", ebnf)
        return "\n".join(
            (found, *(_rules(one, f"json_pattern_{i}_") for i, one in enumerate(self._patterns)))
        )


def exact_escapes(token: str) -> str:
    """A class or a literal that xgrammar printed, in a form that xgrammar reads as it was meant.

    It prints `\\xdf`, and reads as many hexadecimal digits as follow, so that `ße` would become one
    other character.
    """
    return _TWO_DIGITS.sub(lambda found: rf"\u00{found[1]}" if found[1] else found[0], token)


def _rules(pattern: str, prefix: str) -> str:
    from xgrammar import Grammar

    def renamed(token: re.Match[str]) -> str:
        text = token[0]
        if text[0] == "[":
            return _printed(_unescaped_only(text))
        return exact_escapes(text) if text[0] in '"\\' else prefix + text

    return EBNF_TOKEN.sub(renamed, str(Grammar.from_regex(pattern)))


def _unescaped_only(text: str) -> Ranges:
    """The characters of a class that JSON writes as they are."""
    inside = text[1:-1]
    is_negated = inside.startswith("^")
    ranges = list(_ranges(inside[1:] if is_negated else inside))
    allowed = UNESCAPED
    if is_negated:
        for low, high in ranges:
            allowed = [piece for one in allowed for piece in _without(one, low, high)]
        return allowed
    return [
        (max(low, first), min(high, last))
        for low, high in ranges
        for first, last in allowed
        if max(low, first) <= min(high, last)
    ]


def _without(one: tuple[int, int], low: int, high: int) -> Ranges:
    return [
        piece
        for piece in ((one[0], min(one[1], low - 1)), (max(one[0], high + 1), one[1]))
        if piece[0] <= piece[1]
    ]


def _ranges(inside: str) -> Iterator[tuple[int, int]]:
    items = list(_ESCAPE.finditer(inside))
    at = 0
    while at < len(items):
        low = high = _code(items[at])
        if at + 2 < len(items) and items[at + 1][0] == "-":
            high = _code(items[at + 2])
            at += 2
        at += 1
        yield low, high


def _code(item: re.Match[str]) -> int:
    digits = item[1] or item[2] or item[3]
    if digits:
        return int(digits, 16)
    escaped = item[4]
    return _CONTROLS.get(escaped, ord(escaped)) if escaped else ord(item[5])


def _printed(ranges: Ranges) -> str:
    if not ranges:
        raise ValueError("a class of the pattern allows no character that JSON writes as it is")
    return "[" + "".join(rf"\U{low:08x}-\U{high:08x}" for low, high in ranges) + "]"
