"""Structured output: grammars compiled for a model's vocabulary, and followed token by token.

Compiling takes from a millisecond to seconds and happens in a process of its own, where it can be killed;
following takes microseconds and happens on the engine thread.
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

from baton.core.errors import ClientError
from baton.core.sampling import Grammar, GrammarKind
from engine.compiling import (
    CompilerLost,
    CompilerProcess,
    CompilerSetup,
    GrammarCompiled,
    GrammarExceeded,
    GrammarRefused,
)
from engine.json_patterns import EBNF_TOKEN, JsonPatterns, exact_escapes
from engine.sampling.constraints import Mask, Matcher, mask_of
from engine.structured.grammars import check_grammar

JSON_WHITESPACE_MAX = 32
"""Characters of white space in a row in JSON text. Without a bound a greedy model may write spaces for
ever."""
CACHE_BYTES = 256 * 2**20
"""Bytes of compiled grammars; the least recently used one makes room."""
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


REFUSALS_KEPT = 1024
REFUSAL_S = 300.0
"""Seconds for which a grammar that took too long is refused without trying again."""
CONTINUED_TIMES = 3.0
"""How much more time a grammar has whose text has begun elsewhere: another worker compiled it in time."""


class GrammarError(Exception):
    """The grammar cannot be used. One line for the client."""


class CompilerBusy(Exception):
    """The grammar was not compiled, and it is not the grammar's fault. Another worker may do it."""


class GrammarStore:
    """The compiled grammars of one model, by what they were compiled from. Any thread may call."""

    def __init__(
        self,
        folder: Path,
        vocab: int,
        eos_token_ids: Sequence[int],
        *,
        process: CompilerProcess | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder` holds the model's tokenizer, which is read when the first grammar comes. Without a process
        nothing bounds the time that a grammar takes."""
        self._folder, self._vocab, self._eos = folder, vocab, tuple(eos_token_ids)
        self._process, self._now = process, now
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[GrammarKind, str], Any] = OrderedDict()
        self._under_way: dict[tuple[GrammarKind, str], Future[Any]] = {}
        self._refused: OrderedDict[tuple[GrammarKind, str], tuple[str, float]] = OrderedDict()
        """What took too long, with the message and until when it is refused."""
        self._bytes = 0
        self._info: Any = None
        self._compiler: Any = None
        self._compiler_lock = threading.Lock()

    def has(self, grammar: Grammar) -> bool:
        with self._lock:
            return (grammar.kind, grammar.text) in self._compiled

    def prepare(self, grammar: Grammar, *, is_continued: bool = False) -> None:
        """Compile the grammar if it is not at hand. Raises GrammarError, CompilerBusy.

        `is_continued` tells that another worker has compiled it and generated under it.
        """
        key = (grammar.kind, grammar.text)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return
            future = self._under_way.get(key)
            is_ours = future is None
            if future is None:
                future = self._under_way[key] = Future[Any]()
        if is_ours:
            self._compile(grammar, future, CONTINUED_TIMES if is_continued else 1.0)
        future.result()

    def matcher(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> Matcher:
        """Return a matcher at the start of the constrained text.

        What left the cache since `prepare` is compiled again, which is known not to take too long.
        """
        from xgrammar import GrammarMatcher

        stops = [token for token in stop_token_ids if 0 <= token < self._vocab] or None
        key = (grammar.kind, grammar.text)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            compiled = compile_grammar(self._loaded_compiler(), grammar)
            self._keep(key, compiled)
        return _Matcher(GrammarMatcher(compiled, override_stop_tokens=stops))

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _compile(self, grammar: Grammar, future: "Future[Any]", times: float) -> None:
        key = (grammar.kind, grammar.text)
        try:
            compiled = self._from_process(grammar, times)
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            future.set_exception(error)
            return
        self._keep(key, compiled)
        with self._lock:
            del self._under_way[key]
        future.set_result(compiled)

    def _keep(self, key: tuple[GrammarKind, str], compiled: Any) -> None:
        with self._lock:
            if key in self._compiled:
                return
            self._compiled[key] = compiled
            self._bytes += compiled.memory_size_bytes
            while self._bytes > CACHE_BYTES and len(self._compiled) > 1:
                self._bytes -= self._compiled.popitem(last=False)[1].memory_size_bytes

    def _from_process(self, grammar: Grammar, times: float) -> Any:
        """Have the process compile the grammar, with `times` the usual time."""
        if self._process is None:
            compiled = compile_grammar(self._loaded_compiler(), grammar)
            check_start(compiled, self._vocab, has_end=bool(self._eos))
            return compiled
        self._raise_known(grammar)
        try:
            answer = self._process.compile(grammar, self._setup, times=times)
        except CompilerLost as error:
            raise CompilerBusy(str(error)) from error
        match answer:
            case GrammarCompiled(""):
                return compile_grammar(self._loaded_compiler(), grammar)
            case GrammarCompiled(text):
                from xgrammar import CompiledGrammar

                return CompiledGrammar.deserialize_json(text, self._loaded_info())
            case GrammarRefused(message):
                raise GrammarError(message)
            case GrammarExceeded(message):
                self._remember(grammar, message)
                raise GrammarError(message)
            case _:
                raise CompilerBusy(f"the compiler of grammars is in trouble: {answer}")

    def _raise_known(self, grammar: Grammar) -> None:
        with self._lock:
            message, until_s = self._refused.get((grammar.kind, grammar.text), ("", 0.0))
        if self._now() < until_s:
            raise GrammarError(message)

    def _remember(self, grammar: Grammar, message: str) -> None:
        with self._lock:
            self._refused[grammar.kind, grammar.text] = (message, self._now() + REFUSAL_S)
            while len(self._refused) > REFUSALS_KEPT:
                self._refused.popitem(last=False)

    def _setup(self) -> CompilerSetup:
        return CompilerSetup(self._loaded_info().serialize_json(), self._vocab, has_end=bool(self._eos))

    def _loaded_compiler(self) -> Any:
        from xgrammar import GrammarCompiler

        info = self._loaded_info()
        with self._compiler_lock:
            if self._compiler is None:
                # Our cache knows what is in use; one thread, since the others compute.
                self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
            return self._compiler

    def _loaded_info(self) -> Any:
        with self._compiler_lock:
            if self._info is None:
                self._info = self._load()
            return self._info

    def _load(self) -> Any:
        # Here, not above: it takes seconds and 100 MB, and many workers never see a grammar.
        from transformers import AutoTokenizer
        from xgrammar import TokenizerInfo

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder)
            stops = list(self._eos) or None
            return TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab, stop_token_ids=stops)
        except Exception as error:  # many kinds, of three libraries
            text = f"this model's tokenizer has no structured output: {_one_line(error)}"
            raise GrammarError(text) from error


def check_start(compiled: Any, vocab: int, *, has_end: bool) -> None:
    """Raise GrammarError for a grammar under which not even a first token may come."""
    from xgrammar import GrammarMatcher

    # Some token must be able to end the text: the client may name stop tokens that the model has not.
    matcher = _Matcher(GrammarMatcher(compiled, override_stop_tokens=None if has_end else [0]))
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
        raise GrammarError(_one_line(error)) from None
    except Exception as error:  # xgrammar raises RuntimeError and its own kinds, for the text alone
        raise GrammarError(_one_line(error)) from error


def _compile_schema(compiler: Any, schema: Any) -> Any:
    from xgrammar import Grammar as Compilable

    patterns = JsonPatterns()
    text = msgspec.json.encode(patterns.taken_out(schema)).decode()
    grammar = Compilable.from_json_schema(
        text, any_whitespace=True, strict_mode=False, max_whitespace_cnt=JSON_WHITESPACE_MAX
    )
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


def _one_line(error: BaseException) -> str:
    """The error without what xgrammar says of itself: time stamp, place in its source, failed check."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if line.startswith("[") and ": " in line:
        line = line.split(": ", 1)[1]
    if line.startswith("Check failed: "):
        line = line.removeprefix("Check failed: ").rpartition(" is false: ")[2]
    return line[:300]


class _Matcher:
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
            self._matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None])
            self._is_slow |= time.thread_time() - began_s > TOKEN_S_MAX
