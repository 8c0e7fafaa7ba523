"""Grammars in Lark's language, as outlines and guidance send them, written in EBNF (GBNF). Pure.

The language is described in https://lark-parser.readthedocs.io/en/stable/grammar.html. What only matters
to a parser's tree (`?`, `!`, aliases, priorities, guidance's captures) is left out. What would change the
language and cannot be expressed raises ClientError.
"""

import re
from typing import NamedTuple, NoReturn

from engine.structured.refusal import refuse
from engine.structured.regex_ebnf import ebnf_of_regex, quoted

STATEMENTS_MAX = 2048
DEPTH_MAX = 64
_COMMON = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+)",
    "SIGNED_NUMBER": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+)",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[a-zA-Z]",
    "WORD": r"[a-zA-Z]+",
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}
"""Terminals of Lark's library `common`."""
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r]+|(?://|\#)[^\n]*)
    |(?P<newline>\n)
    |(?P<command>%[a-z_]+)
    |(?P<name>[?!]*_*[A-Za-z][A-Za-z0-9_]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?!/)(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[imslux]*)
    |(?P<range>\.\.)
    |(?P<arrow>->)
    |(?P<number>[0-9]+)
    |(?P<sign>[:|()\[\]?*+~.,{}=<>$-])
    """,
    re.VERBOSE,
)


_ONLY_SCHEMA = re.compile(
    r"\s*(?:%llguidance \{[^{}]*\}\s*)?(?:start: (?P<start>\w+)\s+)?"
    r"(?P<name>\w+)(?:\[capture(?:=\"\w*\")?\])?:"
    r"\s*%json (?P<schema>\{.*\})\s*",
    re.DOTALL,
)


class _LarkToken(NamedTuple):
    kind: str
    text: str
    at: int


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark's language rather than in EBNF, whose rules have `::=`."""
    return "::=" not in text


def only_schema(text: str) -> str | None:
    """Return the JSON schema of a grammar of guidance's that is nothing but one; None for any other."""
    found = _ONLY_SCHEMA.fullmatch(text)
    return None if found is None or found["start"] not in (None, found["name"]) else found["schema"]


def ebnf_of_lark(text: str, where: str) -> str:
    """Return the grammar in EBNF. Raises ClientError with line and column."""
    return _LarkReader(text, where).read()


class _LarkReader:
    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        self._tokens = self._lexed()
        self._at = 0
        self._depth = 0
        self._is_rule = False
        """Whether a rule is read, between whose terminals ignored text may come."""
        self._rules: dict[str, str] = {}
        self._references: list[_LarkToken] = []
        self._ignored: list[str] = []

    def read(self) -> str:
        while (token := self._skip_newlines()).kind != "end":
            if len(self._rules) > STATEMENTS_MAX:
                self._refuse(token, f"more than {STATEMENTS_MAX} rules")
            self._at += 1
            if token.kind == "command":
                self._command(token)
            elif token.kind == "name":
                self._definition(token)
            else:
                self._refuse(token, f"a rule must begin here, not {token.text!r:.40}")
        if "start" not in self._rules:
            raise refuse(self._where, "", "has no rule named start ('start: …')")
        for token in self._references:
            if _bare(token.text) not in self._rules:
                self._refuse(token, f"there is no rule {token.text!r:.80}")
        lines = [f"root ::= {'ignored ' if self._ignored else ''}{_named('start')}"]
        lines += [f"{_named(name)} ::= {body}" for name, body in self._rules.items()]
        if self._ignored:
            # Ignored text comes once at most: a bound, without which a model may write it for ever.
            lines.append(f"ignored ::= ({' | '.join(self._ignored)})?")
        return "\n".join(lines) + "\n"

    # --- words ------------------------------------------------------------------------------------

    def _lexed(self) -> list[_LarkToken]:
        found: list[_LarkToken] = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                self._refuse(_LarkToken("", "", at), f"unexpected {self._text[at]!r}")
            if match.lastgroup != "space":
                found.append(_LarkToken(match.lastgroup or "", match[0], at))
            at = match.end()
            if match[0] == "%llguidance":
                at = self._end_of_line(at)
        found.append(_LarkToken("end", "the end", len(self._text)))
        return found

    def _end_of_line(self, at: int) -> int:
        end = self._text.find("\n", at)
        return len(self._text) if end < 0 else end

    def _peek(self) -> _LarkToken:
        return self._tokens[self._at]

    def _skip_newlines(self) -> _LarkToken:
        while self._peek().kind == "newline":
            self._at += 1
        return self._peek()

    def _take(self, text: str) -> bool:
        if self._peek().text != text or self._peek().kind in ("string", "regex"):
            return False
        self._at += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._take(text):
            self._refuse(self._peek(), f"{text!r} is missing before {self._peek().text!r:.40}")

    def _next(self, kind: str) -> _LarkToken:
        token = self._peek()
        if token.kind != kind:
            self._refuse(token, f"a {kind} must stand here, not {token.text!r:.40}")
        self._at += 1
        return token

    # --- statements -------------------------------------------------------------------------------

    def _command(self, token: _LarkToken) -> None:
        match token.text:
            case "%llguidance":
                return
            case "%import":
                self._import()
            case "%ignore":
                self._is_rule = False
                self._ignored.append(self._alternatives())
            case _:
                self._refuse(token, f"{token.text} is not supported")

    def _import(self) -> None:
        token = self._next("name")
        if token.text != "common":
            self._refuse(token, "only terminals of the library 'common' can be imported")
        if self._take("("):
            names = [self._next("name")]
            while self._take(","):
                names.append(self._next("name"))
            self._expect(")")
        else:
            self._expect(".")
            names = [self._next("name")]
        alias = self._next("name").text if self._take("->") else None
        for name in names:
            if name.text not in _COMMON:
                self._refuse(name, f"common.{name.text} is not known")
            self._rules[alias or name.text] = ebnf_of_regex(_COMMON[name.text], self._where)

    def _definition(self, token: _LarkToken) -> None:
        name = _bare(token.text)
        self._is_rule = not name.strip("_")[:1].isupper()
        if self._take("["):
            self._attributes()
        if self._take("."):
            self._next("number")
        if self._peek().text == "{":
            self._refuse(token, "templates are not supported")
        self._expect(":")
        if name in self._rules:
            self._refuse(token, f"{name!r:.80} is defined twice")
        self._rules[name] = self._alternatives()

    def _attributes(self) -> None:
        """Read guidance's attributes of a rule. A capture is what the client makes of the text."""
        while not self._take("]"):
            name = self._next("name")
            if name.text != "capture":
                what = f"the attribute {name.text!r:.40} cannot be enforced; use a regular expression, and "
                self._refuse(name, what + "max_tokens and stop of the request")
            if self._take("="):
                self._next("string")
            self._take(",")

    # --- expressions ------------------------------------------------------------------------------

    def _alternatives(self) -> str:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._refuse(self._peek(), f"more than {DEPTH_MAX} nested groups")
        found = [self._sequence()]
        while self._continues():
            found.append(self._sequence())
        self._depth -= 1
        return " | ".join(found)

    def _continues(self) -> bool:
        """Read a '|', which may begin one of the next lines."""
        at = self._at
        self._skip_newlines()
        if self._take("|"):
            return True
        if self._peek().text not in (")", "]"):
            self._at = at
        return False

    def _sequence(self) -> str:
        parts: list[str] = []
        while True:
            token = self._peek()
            if token.kind in ("newline", "end", "arrow", "command") or token.text in ("|", ")", "]"):
                break
            parts.append(self._repeated())
        if self._take("->"):
            self._next("name")
        return " ".join(parts) or '""'

    def _repeated(self) -> str:
        found = self._atom()
        token = self._peek()
        if token.kind == "sign" and token.text in ("?", "*", "+"):
            self._at += 1
            return f"({found}){token.text}"
        if not self._take("~"):
            return found
        low = high = self._next("number").text
        if self._take(".."):
            high = self._next("number").text
        return f"({found}){{{low},{high}}}"

    def _atom(self) -> str:
        token = self._peek()
        self._at += 1
        if token.text in ("(", "[") and token.kind == "sign":
            inner = self._alternatives()
            self._skip_newlines()
            self._expect(")" if token.text == "(" else "]")
            return f"({inner}){'?' if token.text == '[' else ''}"
        if token.kind == "name":
            self._references.append(token)
            is_terminal = _bare(token.text).strip("_")[:1].isupper()
            return self._spaced(_named(_bare(token.text))) if is_terminal else _named(_bare(token.text))
        if token.kind == "string":
            return self._spaced(self._string(token))
        if token.kind == "regex":
            return self._spaced(self._regex(token))
        return self._refuse(token, f"{token.text!r:.40} is not supported here")

    def _spaced(self, terminal: str) -> str:
        """The terminal of a rule, with what may be ignored after it."""
        return f"{terminal} ignored" if self._is_rule and self._has_ignored() else terminal

    def _has_ignored(self) -> bool:
        return "%ignore" in self._text

    def _string(self, token: _LarkToken) -> str:
        text = self._unescaped(token)
        if self._take(".."):
            last = self._unescaped(self._next("string"))
            if len(text) != 1 or len(last) != 1 or last < text:
                self._refuse(token, "a range needs two single characters in order")
            return f"[\\U{ord(text):08x}-\\U{ord(last):08x}]"
        return quoted(text, ignores_case=token.text.endswith("i"))

    def _unescaped(self, token: _LarkToken) -> str:
        inside = token.text.removesuffix("i")[1:-1]
        try:
            return re.sub(r"\\(x..|u....|U........|.)", _character, inside)
        except ValueError:
            self._refuse(token, "a malformed escape")

    def _regex(self, token: _LarkToken) -> str:
        pattern, _, flags = token.text[1:].rpartition("/")
        if others := set(flags) - set("isu"):
            self._refuse(token, f"the flag {min(others)!r} of a regular expression is not supported")
        where = f"{self._where} (line {self._line(token)})"
        pattern = pattern.replace("\\/", "/")
        found = ebnf_of_regex(pattern, where, ignores_case="i" in flags, dot_is_all="s" in flags)
        return f"({found})"

    def _line(self, token: _LarkToken) -> int:
        return self._text.count("\n", 0, token.at) + 1

    def _refuse(self, token: _LarkToken, what: str) -> NoReturn:
        column = token.at - self._text.rfind("\n", 0, token.at)
        raise refuse(self._where, "", f"line {self._line(token)}, column {column}: {what}")


def _character(found: "re.Match[str]") -> str:
    text = found[1]
    if text[0] in "xuU" and len(text) > 1:
        return chr(int(text[1:], 16))
    return {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}.get(text, text)


def _bare(name: str) -> str:
    return name.lstrip("?!")


def _named(name: str) -> str:
    """The rule's name in EBNF, where it may not be root and not begin a word of xgrammar's."""
    return f"lark_{name}"
