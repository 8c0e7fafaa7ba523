"""Structured output: grammars compiled for a model's vocabulary, and followed token by token.

Compiling takes from a millisecond to seconds and happens in threads (xgrammar lets go of the
interpreter's lock meanwhile), following takes microseconds and happens on the engine thread.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch

from baton.core.sampling import Grammar, GrammarKind
from engine.json_schema import Unsupported, enforceable
from engine.sampling.constraints import Mask, Matcher, mask_of

JSON_WHITESPACE_MAX = 32
"""Characters of white space in a row in JSON text. Without a bound a greedy model may write spaces for
ever."""
_EMPTY = {
    GrammarKind.EBNF: "the grammar allows no text: the rule root comes to no first character",
    GrammarKind.JSON_SCHEMA: "the grammar allows no text: a $ref of the schema leads back to itself",
}
CACHE_BYTES = 256 * 2**20
"""Of compiled grammars; the least recently used one makes room."""
TEXT_CHARACTERS_MAX = 256 * 1024
CHOICES_MAX = 10_000
TOKEN_S_MAX = 0.1
"""Following an ambiguous grammar takes time with the third power of the text's length; where one token
takes longer than this the text ends, since everybody in the batch waits for it."""
START_S_MAX = 0.5
"""To find the first tokens. Everybody in the batch would wait for it once more."""


class GrammarError(Exception):
    """The grammar cannot be used. One line for the client."""


class GrammarStore:
    """Compiled grammars of one model, by what they were compiled from. Any thread may call."""

    def __init__(self, folder: Path, vocab: int, eos_token_ids: Sequence[int]) -> None:
        """`folder`: with the model's tokenizer, which is read when the first grammar comes."""
        self._folder, self._vocab, self._eos = folder, vocab, tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[GrammarKind, str], Any] = OrderedDict()
        self._under_way: dict[tuple[GrammarKind, str], Future[Any]] = {}
        self._bytes = 0
        self._compiler: Any = None
        self._compiler_lock = threading.Lock()
        self._never: dict[GrammarKind, Mask] = {}
        """Tokens that a text of this kind cannot have, whatever the matcher says."""

    def has(self, grammar: Grammar) -> bool:
        with self._lock:
            return (grammar.kind, grammar.text) in self._compiled

    def prepare(self, grammar: Grammar) -> None:
        """Compile it, if it is not at hand. Raises GrammarError."""
        self._get(grammar)

    def matcher(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> Matcher:
        """At the start of the constrained text. Compiles again what left the cache since `prepare`;
        raises GrammarError if it was never prepared and does not compile."""
        from xgrammar import GrammarMatcher

        stops = [token for token in stop_token_ids if 0 <= token < self._vocab] or None
        matcher = GrammarMatcher(self._get(grammar), override_stop_tokens=stops)
        return _Matcher(matcher, self._never.get(grammar.kind))

    def _get(self, grammar: Grammar) -> Any:
        key = (grammar.kind, grammar.text)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            future = self._under_way.get(key)
            is_ours = future is None
            if future is None:
                future = self._under_way[key] = Future[Any]()
        if is_ours:
            self._compile(key, future)
        return future.result()

    def _compile(self, key: tuple[GrammarKind, str], future: "Future[Any]") -> None:
        try:
            compiled = _compile(self._loaded_compiler(), *key)
            self._check_start(key[0], compiled)
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            future.set_exception(error)
            return
        with self._lock:
            del self._under_way[key]
            self._compiled[key] = compiled
            self._bytes += compiled.memory_size_bytes
            while self._bytes > CACHE_BYTES and len(self._compiled) > 1:
                self._bytes -= self._compiled.popitem(last=False)[1].memory_size_bytes
        future.set_result(compiled)

    def _check_start(self, kind: GrammarKind, compiled: Any) -> None:
        """Raises GrammarError for a grammar under which not even a first token may come."""
        from xgrammar import GrammarMatcher

        # Some token must be able to end the text: the client may name stop tokens that the model has not.
        stops = None if self._eos else [0]
        matcher = _Matcher(GrammarMatcher(compiled, override_stop_tokens=stops), self._never.get(kind))
        mask: Mask = mask_of((), self._vocab)
        began_s = time.thread_time()
        matcher.fill(mask)
        if time.thread_time() - began_s > START_S_MAX:
            raise GrammarError("the grammar is too ambiguous: a repetition of what may be empty, repeated")
        if not mask.any():
            raise GrammarError(_EMPTY.get(kind, "the grammar allows no text"))

    def _loaded_compiler(self) -> Any:
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler

    def _load(self) -> Any:
        # Here, not above: it takes seconds and 100 MB, and many workers never see a grammar.
        from transformers import AutoTokenizer
        from xgrammar import GrammarCompiler, TokenizerInfo

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder)
            stops = list(self._eos) or None
            info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab, stop_token_ids=stops)
        except Exception as error:  # many kinds, of three libraries
            text = f"this model's tokenizer has no structured output: {_one_line(error)}"
            raise GrammarError(text) from error
        # xgrammar lets control characters into a JSON string that has a minLength or maxLength.
        words: list[bytes] = info.decoded_vocab
        for kind, fine in ((GrammarKind.JSON_SCHEMA, b"\n\r"), (GrammarKind.STRUCTURAL_TAG, b"\n\r\t")):
            controls = frozenset(range(32)) - frozenset(fine)
            found = (token for token, word in enumerate(words) if not controls.isdisjoint(word))
            self._never[kind] = mask_of(found, self._vocab)
        # Our cache knows what is in use; one thread, since the others compute.
        return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _compile(compiler: Any, kind: GrammarKind, text: str) -> Any:
    if len(text) > TEXT_CHARACTERS_MAX:
        raise GrammarError(f"a grammar has at most {TEXT_CHARACTERS_MAX} characters, this one {len(text)}")
    if "\0" in text:
        raise GrammarError("a grammar has no null characters")
    compilers: dict[GrammarKind, Callable[[Any, str], Any]] = {
        GrammarKind.JSON_SCHEMA: _compile_schema,
        GrammarKind.REGEX: lambda c, t: c.compile_regex(t),
        GrammarKind.EBNF: lambda c, t: c.compile_grammar(t),
        GrammarKind.CHOICE: lambda c, t: c.compile_grammar(choice_ebnf(t)),
        GrammarKind.STRUCTURAL_TAG: lambda c, t: c.compile_structural_tag(_checked_tag(t)),
    }
    try:
        return compilers[kind](compiler, text)
    except (Unsupported, GrammarError) as error:
        raise GrammarError(str(error)) from None
    except (AttributeError, KeyError, TypeError) as error:  # ours, about a keyword's value
        raise GrammarError("a keyword of the schema has a value of the wrong type") from error
    except Exception as error:  # xgrammar raises RuntimeError and its own kinds, for the text alone
        raise GrammarError(_one_line(error)) from error


def _compile_schema(compiler: Any, text: str) -> Any:
    schema = enforceable(_json(text))
    if schema in ({}, True):
        schema = {"type": "object"}
    return compiler.compile_json_schema(
        msgspec.json.encode(schema).decode(),
        any_whitespace=True,
        strict_mode=False,
        max_whitespace_cnt=JSON_WHITESPACE_MAX,
    )


def _checked_tag(text: str) -> str:
    """With the JSON schemas within it as `enforceable` has them."""

    def checked(value: Any, depth: int) -> Any:
        if depth > 64:
            raise GrammarError("nested more than 64 levels deep")
        if isinstance(value, list):
            return [checked(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        found = {
            key: enforceable(item) if key in ("json_schema", "schema") else checked(item, depth + 1)
            for key, item in value.items()
        }
        if found.get("type") == "json_schema":
            found["max_whitespace_cnt"] = JSON_WHITESPACE_MAX
        return found

    return msgspec.json.encode(checked(_json(text), 0)).decode()


def choice_ebnf(text: str) -> str:
    """A JSON array of strings as a grammar of exactly those."""
    choices = _json(text)
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices) or not choices:
        raise GrammarError("wanted is a JSON array of strings that are not empty")
    if len(choices) > CHOICES_MAX:
        raise GrammarError(f"at most {CHOICES_MAX} strings, these are {len(choices)}")
    return "root ::= " + " | ".join(f'"{_escaped(choice)}"' for choice in choices)


def _escaped(text: str) -> str:
    return "".join(f"\\U{ord(c):08x}" if c in '"\\' or not c.isprintable() else c for c in text)


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"not JSON: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    """Without what xgrammar says of itself: time stamp, place in its source, the check that failed."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if line.startswith("[") and ": " in line:
        line = line.split(": ", 1)[1]
    if line.startswith("Check failed: "):
        line = line.removeprefix("Check failed: ").rpartition(" is false: ")[2]
    return line[:300]


class _Matcher:
    def __init__(self, matcher: Any, never: Mask | None) -> None:
        self._matcher, self._never = matcher, never
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
            self._matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None])
            self._is_slow |= time.thread_time() - began_s > TOKEN_S_MAX
            if self._never is not None:
                mask &= ~self._never
