"""Grammars in EBNF (GBNF) as xgrammar (0.2.8) reads them: whether they are well formed, and how large. Pure.

The language is that of llama.cpp's GBNF: rules, alternatives, groups, texts, classes of characters and
repetitions, with xgrammar's lookahead. Its macros (Regex, Token, TagDispatch and others) and attributes of
rules are refused, since they would go round the judges of regular expressions and structural tags.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from engine.structured.refusal import is_half_of_pair, refuse

GROUP_DEPTH_MAX = 64
MACROS = frozenset({"TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch", "Regex", "Substring"})

_TOKEN = re.compile(
    r"""
    (?P<space>(?:[ \t\r\n]|\#[^\r\n]*)+)
    |(?P<name>[A-Za-z_.\-][A-Za-z0-9_.\-]*)
    |(?P<text>"(?:[^"\\\r\n]|\\.)*")
    |(?P<chars>\[(?:[^\]\\\r\n]|\\.)*\])
    |(?P<sign>::=|\(=|[()|*+?{},])
    |(?P<number>[0-9]+)
    """,
    re.VERBOSE,
)
_DIGITS = r"x(?P<x>[0-9a-fA-F]+)|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
_ESCAPE = re.compile(rf"""\\(?:{_DIGITS}|(?P<one>['"?\\/abfnrtv0e]))""")
_CLASS_ESCAPE = re.compile(rf"""\\(?:{_DIGITS}|(?P<one>['"?\\/abfnrtv0e^$.*+()\[\]{{}}|-]))""")
_DIGITS_MAX = 8
_DASH = -ord("-")
"""A dash in a class that is not escaped, and may stand between the ends of a range."""
_CONTROLS = {"0": 0, "a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "e": 27}
_COUNT_MAX = 10**6
_HALF = "half of a surrogate pair, which no text has; write the character itself"


@dataclass(slots=True)
class Element:
    """One element of a sequence: a text, a class of characters, a reference or a group, and how often it
    comes."""

    rule: str | None = None
    """The rule that a reference leads to."""
    group: "list[list[Element]] | None" = None
    """The alternatives of a group."""
    text_length: int | None = None
    """How many characters a text has."""
    low: int = 1
    high: int = 1
    """How often it comes at most. One without a bound counts as one, since a loop costs no more states."""
    is_repeated: bool = False


Alternatives = list[list[Element]]


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    at: int


class _Reader:
    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        self._tokens = list(self._lexed())
        self._at = 0
        self._depth = 0
        self.rules: dict[str, Alternatives] = {}
        self._references: list[_Token] = []

    def read(self) -> dict[str, Alternatives]:
        while (token := self._peek()).kind != "end":
            if token.kind != "rule":
                self._refuse(token, f"a rule ('name ::= …') must begin here, not {token.text!r:.40}")
            self._at += 1
            if token.text in self.rules:
                self._refuse(token, f"the rule {token.text!r:.80} is defined twice")
            self._sign("::=")
            self.rules[token.text] = self._alternatives()
            if self._is_sign("(="):
                self._at += 1
                # A name of its own, which no rule can have, so that its size counts.
                self.rules[f"{token.text} (="] = self._alternatives()
                self._sign(")")
        if "root" not in self.rules:
            raise refuse(self._where, "", "has no rule named root ('root ::= …')")
        for token in self._references:
            if token.text not in self.rules:
                self._refuse(token, f"there is no rule {token.text!r:.80}")
        return self.rules

    # --- words --------------------------------------------------------------------------------------

    def _lexed(self) -> list[_Token]:
        text, at, begins_line = self._text, 0, True
        found: list[_Token] = []
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                self._refuse(_Token("", "", at), self._what_is_wrong(at))
            token = _Token(match.lastgroup or "", match[0], at)
            at = match.end()
            match token.kind:
                case "space":
                    begins_line |= "\n" in token.text or "\r" in token.text
                    continue
                case "text":
                    self._check_text(token)
                case "chars":
                    self._check_class(token)
                case "name" if begins_line:
                    token.kind = "first"
                case "sign" if token.text == "::=":
                    self._mark_rule(found, token)
                case _:
                    pass
            begins_line = False
            found.append(token)
        found.append(_Token("end", "the end", len(text)))
        return found

    def _mark_rule(self, found: list[_Token], assign: _Token) -> None:
        if found and found[-1].kind == "chars" and len(found) > 1 and found[-2].kind in ("first", "name"):
            self._refuse(found[-1], "attributes of rules are not supported; leave them out")
        if not found or found[-1].kind != "first" or found[-1].text in ("true", "false"):
            self._refuse(assign, "'::=' must follow the name of a rule at the beginning of a line")
        found[-1].kind = "rule"

    def _what_is_wrong(self, at: int) -> str:
        match self._text[at]:
            case '"':
                return "a text without its closing quote on the same line"
            case "[":
                return "a class of characters without its ']' on the same line"
            case char:
                return f"unexpected character {char!r}"

    def _check_text(self, token: _Token) -> None:
        """Check the escapes of a text, and note how long it is."""
        inside, at = token.text[1:-1], 0
        while (at := inside.find("\\", at)) >= 0:
            code, at = self._escaped(token, _ESCAPE, inside, at)
            if is_half_of_pair(code):
                self._refuse(token, _HALF)

    def _check_class(self, token: _Token) -> None:
        inside = token.text[1:-1].removeprefix("^")
        codes: list[int] = []
        at = 0
        while at < len(inside):
            if inside[at] == "\\":
                code, at = self._escaped(token, _CLASS_ESCAPE, inside, at)
            else:
                code, at = _DASH if inside[at] == "-" else ord(inside[at]), at + 1
            if is_half_of_pair(code) and not token.text.startswith("[^"):
                self._refuse(token, _HALF)
            codes.append(code)
        at = 0
        while at < len(codes):
            if at + 2 < len(codes) and codes[at + 1] == _DASH:
                if abs(codes[at]) > abs(codes[at + 2]):
                    self._refuse(token, "a range of characters whose end lies before its beginning")
                at += 2
            at += 1

    def _escaped(self, token: _Token, form: re.Pattern[str], inside: str, at: int) -> tuple[int, int]:
        """Return the character of the escape at a position, and where the escape ends."""
        match = form.match(inside, at)
        if match is None:
            self._refuse(token, f"the escape {inside[at : at + 2]!r} is not supported here")
        digits = match["x"] or match["u"] or match["U"]
        code = (
            int(digits[-_DIGITS_MAX:], 16)
            if digits
            else _CONTROLS.get(match["one"], ord(match["one"] or "x"))
        )
        if code > 0x10FFFF or (digits and len(digits) > _DIGITS_MAX):
            self._refuse(token, f"{match[0]!r:.40} is no character")
        return code, match.end()

    # --- grammar ------------------------------------------------------------------------------------

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _is_sign(self, text: str) -> bool:
        token = self._tokens[self._at]
        return token.kind == "sign" and token.text == text

    def _sign(self, text: str) -> None:
        if not self._is_sign(text):
            self._refuse(self._peek(), f"{text!r} is missing before {self._peek().text!r:.40}")
        self._at += 1

    def _alternatives(self) -> Alternatives:
        found = [self._sequence()]
        while self._is_sign("|"):
            self._at += 1
            found.append(self._sequence())
        return found

    def _sequence(self) -> list[Element]:
        found: list[Element] = []
        while True:
            found.append(self._repeated())
            token = self._peek()
            if token.kind in ("rule", "end") or (token.kind == "sign" and token.text in ("|", ")", "(=")):
                return found

    def _repeated(self) -> Element:
        element = self._element()
        token = self._peek()
        if token.kind != "sign" or token.text not in ("*", "+", "?", "{"):
            return element
        self._at += 1
        low, high = {"*": (0, 1), "+": (1, 1), "?": (0, 1)}.get(token.text) or self._counts()
        return Element(group=[[element]], low=low, high=high, is_repeated=True)

    def _counts(self) -> tuple[int, int]:
        low = high = self._count()
        if self._is_sign(","):
            self._at += 1
            high = low if self._is_sign("}") else self._upper(low)
        self._sign("}")
        return low, max(1, high)

    def _upper(self, low: int) -> int:
        token = self._peek()
        if token.kind in ("name", "first") and token.text == "-1":  # xgrammar prints "without a bound" so
            self._at += 1
            return low
        high = self._count()
        if high < low:
            self._refuse(token, "{…} with its upper bound below the lower one")
        return high

    def _count(self) -> int:
        token = self._peek()
        if token.kind != "number" or len(token.text) > len(str(_COUNT_MAX)):
            self._refuse(token, f"a number up to {_COUNT_MAX} must stand in {{…}}, not {token.text!r:.40}")
        self._at += 1
        return int(token.text)

    def _element(self) -> Element:
        token = self._peek()
        self._at += 1
        if token.kind in ("name", "first"):
            return self._reference(token)
        if token.kind == "sign" and token.text == "(":
            return self._group(token)
        if token.kind not in ("text", "chars"):
            self._refuse(token, f"a text, class, rule or group must stand here, not {token.text!r:.40}")
        return Element(text_length=len(token.text) - 2 if token.kind == "text" else None)

    def _reference(self, token: _Token) -> Element:
        if token.text in ("true", "false"):
            self._refuse(token, f"{token.text} is a word of xgrammar's, write a text in quotes")
        if token.text in MACROS:
            self._refuse(token, f"xgrammar's macro {token.text} is not supported; write it with rules")
        self._references.append(token)
        return Element(rule=token.text)

    def _group(self, token: _Token) -> Element:
        if self._is_sign(")"):
            self._at += 1
            return Element(text_length=0)
        self._depth += 1
        if self._depth > GROUP_DEPTH_MAX:
            self._refuse(token, f"more than {GROUP_DEPTH_MAX} nested groups; give some of them a rule")
        alternatives = self._alternatives()
        self._sign(")")
        self._depth -= 1
        return Element(group=alternatives)

    def _refuse(self, token: _Token, what: str) -> NoReturn:
        line = self._text.count("\n", 0, token.at) + 1
        column = token.at - self._text.rfind("\n", 0, token.at)
        raise refuse(self._where, "", f"line {line}, column {column}: {what}")


def read_ebnf(text: str, where: str) -> dict[str, Alternatives]:
    """Return the rules of a grammar by name. Raises ClientError with line and column."""
    return _Reader(text, where).read()
