"""What compiles a grammar and follows it, with xgrammar. No torch here: the process that compiles
(`engine.compile_process`) would spend seconds and 200 MB on it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.core.errors import ClientError
from baton.core.sampling import Grammar, GrammarKind
from engine.json_patterns import EBNF_TOKEN, JsonPatterns, exact_escapes
from engine.sampling.masks import Mask, mask_of
from engine.structured.grammars import check_grammar
from engine.structured.schemas import COMPACT, WHITE_SPACE

JSON_WHITESPACE_MAX = 32
"""Characters of white space in a row in JSON text. Without a bound a greedy model may write spaces for
ever."""
TEXT_CHARACTERS_MAX = 256 * 1024
TOKEN_S_MAX = 0.1
"""Following an ambiguous grammar takes time with the third power of the text's length. Where one token takes
longer than this the text ends, since everybody in the batch waits for it."""
START_S_MAX = 0.5
"""Seconds to find the first tokens. Everybody in the batch would wait for it once more."""
_ESCAPES = r'basic_escape ::= (([\"\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))'
_ONE_ESCAPE_EACH = r'basic_escape ::= (([\"\\bfnrt]) | ("u00" (("0" [0-7be-f]) | ("1" [0-9a-f]))))'
"""The escapes without which JSON could not write a character. With the others a declared name could come
again as another name (`\\u0061` for `a`), and half a surrogate pair would be no text."""
_CHARACTERS = r"[^\"\\\r\n]"
_NO_CONTROLS = r"[^\0-\x1f\"\\]"
"""The characters of a string that has a length, without the control characters that JSON forbids."""


class GrammarError(Exception):
    """The grammar cannot be used. One line for the client."""


def check_start(compiled: Any, vocab: int, *, has_end: bool) -> None:
    """Raise GrammarError for a grammar under which not even a first token may come."""
    from xgrammar import GrammarMatcher

    # Some token must be able to end the text: the client may name stop tokens that the model has not.
    matcher = TextMatcher(GrammarMatcher(compiled, override_stop_tokens=None if has_end else [0]))
    mask: Mask = mask_of((), vocab)
    began_s = time.thread_time()
    matcher.fill(mask)
    if time.thread_time() - began_s > START_S_MAX:
        raise GrammarError("the grammar is too ambiguous: a repetition of what may be empty, repeated")
    if not mask.any():
        raise GrammarError("the grammar allows no text: it comes to no first character")


def compile_grammar(compiler: Any, grammar: Grammar) -> Any:
    """Compile what arrived, after asking the judge once more. Raises GrammarError."""
    if len(grammar.text) > TEXT_CHARACTERS_MAX:
        raise GrammarError(
            f"a grammar has at most {TEXT_CHARACTERS_MAX} characters, this one {len(grammar.text)}"
        )
    compilers: dict[GrammarKind, Callable[[Any, Any], Any]] = {
        GrammarKind.JSON_SCHEMA: _compile_schema,
        GrammarKind.REGEX: lambda c, regex: c.compile_regex(regex),
        GrammarKind.EBNF: lambda c, ebnf: c.compile_grammar(ebnf),
        GrammarKind.CHOICE: lambda c, choices: c.compile_grammar(choice_ebnf(choices)),
        GrammarKind.STRUCTURAL_TAG: _compile_tag,
    }
    try:
        # The router has asked the same judge, but what arrives is not trusted.
        return compilers[grammar.kind](compiler, check_grammar(grammar, grammar.kind))
    except ClientError as error:
        raise GrammarError(one_line(error)) from None
    except Exception as error:  # xgrammar raises RuntimeError and its own kinds, for the text alone
        raise GrammarError(one_line(error)) from error


def _compile_schema(compiler: Any, schema: Any) -> Any:
    from xgrammar import Grammar as Compilable

    space = schema.pop(WHITE_SPACE, None) if isinstance(schema, dict) else None
    spacing: dict[str, Any] = {"any_whitespace": True, "max_whitespace_cnt": JSON_WHITESPACE_MAX}
    if space is not None:
        separators = (",", ":") if space == COMPACT else (", ", ": ")
        spacing = {"any_whitespace": False, "separators": separators}
    patterns = JsonPatterns()
    text = msgspec.json.encode(patterns.taken_out(schema)).decode()
    grammar = Compilable.from_json_schema(text, strict_mode=False, **spacing)
    return compiler.compile_grammar(patterns.put_back(strict_strings(str(grammar))))


def _compile_tag(compiler: Any, tag: dict[str, Any]) -> Any:
    from xgrammar import Grammar as Compilable

    patterns = JsonPatterns()
    text = msgspec.json.encode(_prepared(tag, patterns)).decode()
    grammar = Compilable.from_structural_tag(text)
    return compiler.compile_grammar(patterns.put_back(strict_strings(str(grammar))))


def _prepared(node: Any, patterns: JsonPatterns) -> Any:
    """The structural tag with bounded white space, and with placeholders for the patterns of its schemas."""
    if isinstance(node, list):
        return [_prepared(one, patterns) for one in node]
    if not isinstance(node, dict):
        return node
    if "json_schema" in node:
        node = node | {"json_schema": patterns.taken_out(node["json_schema"])}
        return node | (
            {"max_whitespace_cnt": JSON_WHITESPACE_MAX} if node.get("type") == "json_schema" else {}
        )
    return {key: _prepared(value, patterns) for key, value in node.items()}


def strict_strings(ebnf: str) -> str:
    """The grammar that xgrammar made of a schema, with strings that are JSON and written in one way only."""
    lines = [_ONE_ESCAPE_EACH if line == _ESCAPES else line for line in ebnf.split("\n")]
    return EBNF_TOKEN.sub(
        lambda token: _NO_CONTROLS if token[0] == _CHARACTERS else exact_escapes(token[0]), "\n".join(lines)
    )


def choice_ebnf(choices: Sequence[str]) -> str:
    """A grammar of exactly these strings."""
    return "root ::= " + " | ".join(f'"{_escaped(choice)}"' for choice in choices)


def _escaped(text: str) -> str:
    return "".join(f"\\U{ord(c):08x}" if c in '"\\' or not c.isprintable() else c for c in text)


def one_line(error: BaseException) -> str:
    """The error without what xgrammar says of itself: time stamp, place in its source, failed check."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if line.startswith("[") and ": " in line:
        line = line.split(": ", 1)[1]
    if line.startswith("Check failed: "):
        line = line.removeprefix("Check failed: ").rpartition(" is false: ")[2]
    return line[:300]


class TextMatcher:
    """Follows a text through a grammar, and gives up where that takes too long. Implements
    `engine.sampling.constraints.Matcher`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._is_slow = False

    def accept(self, token: int) -> bool:
        if self._is_slow or self._matcher.is_terminated():
            return False
        # The thread's own time: being held up by others is not the grammar's fault.
        began_s = time.thread_time()
        is_accepted = bool(self._matcher.accept_token(token))
        self._is_slow = time.thread_time() - began_s > TOKEN_S_MAX
        return is_accepted

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, mask: Mask) -> None:
        if self._matcher.is_terminated():
            mask[:] = 0
        else:
            began_s = time.thread_time()
            self._matcher.fill_next_token_bitmask(mask[None])
            self._is_slow |= time.thread_time() - began_s > TOKEN_S_MAX
