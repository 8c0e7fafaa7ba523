"""Structured output: grammars compiled for a model's vocabulary, and followed token by token.

Compiling takes from a millisecond to seconds and happens in a process of its own, where it can be killed;
following takes microseconds and happens on the engine thread.
"""

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from baton.core.sampling import Grammar, GrammarKind
from engine.compiling import (
    CompilerLost,
    CompilerProcess,
    CompilerSetup,
    GrammarCompiled,
    GrammarExceeded,
    GrammarRefused,
)
from engine.grammar_compile import GrammarError, TextMatcher, check_start, compile_grammar, one_line
from engine.sampling.constraints import Matcher
from engine.stand_ins import left_out
from engine.unique_items import TokenBytes, UniqueItemsMatcher, scanner_of
from engine.unique_scan import ItemScanner
from engine.vocabulary import forget_vocabulary, vocabulary_of
from engine.vocabulary_process import TokenizerUnusable, VocabularyUnread

log = logging.getLogger(__name__)

CACHE_BYTES = 256 * 2**20
"""Bytes of compiled grammars; the least recently used one makes room."""
SHORTEST = Grammar(GrammarKind.REGEX, "a")
REFUSALS_KEPT = 1024
REFUSAL_S = 300.0
"""Seconds for which a grammar that took too long is refused without trying again."""
CONTINUED_TIMES = 3.0
"""How much more time a grammar has whose text has begun elsewhere: another worker compiled it in time."""


class CompilerBusy(Exception):
    """The grammar was not compiled, and it is not the grammar's fault. Another worker may do it."""


class _Compiled(NamedTuple):
    grammar: Any
    scanner: ItemScanner | None
    """What follows the items of arrays that must differ; None: there are none."""


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
        """`folder` holds the model's tokenizer, which is read by `warm` or for the first grammar. Without a
        process nothing bounds the time that a grammar takes."""
        self._folder, self._vocab, self._eos = folder, vocab, tuple(eos_token_ids)
        self._process, self._now = process, now
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[GrammarKind, str], _Compiled] = OrderedDict()
        self._under_way: dict[tuple[GrammarKind, str], Future[Any]] = {}
        self._refused: OrderedDict[tuple[GrammarKind, str], tuple[str, float]] = OrderedDict()
        """What took too long, with the message and until when it is refused."""
        self._bytes = 0
        self._info: Any = None
        self._compiler: Any = None
        self._tokens: TokenBytes | None = None
        self._compiler_lock = threading.Lock()

    def warm(self) -> None:
        """Load what the first grammar needs, which takes seconds on a busy machine. A model without
        structured output is told to whoever asks for it."""
        if self._process is not None:
            self._process.start()  # it loads while the vocabulary is read
        with contextlib.suppress(GrammarError, CompilerBusy):
            self.prepare(SHORTEST)

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
            compiled = self._keep(grammar, compile_grammar(self._loaded_compiler(), grammar))
        matcher = TextMatcher(GrammarMatcher(compiled.grammar, override_stop_tokens=stops))
        if compiled.scanner is None:
            return matcher
        return UniqueItemsMatcher(matcher, compiled.scanner, self._loaded_tokens())

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _compile(self, grammar: Grammar, future: "Future[Any]", times: float) -> None:
        key = (grammar.kind, grammar.text)
        try:
            compiled = self._keep(grammar, self._from_process(grammar, times))
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            future.set_exception(error)
            return
        with self._lock:
            del self._under_way[key]
        future.set_result(compiled)

    def _keep(self, grammar: Grammar, compiled: Any) -> _Compiled:
        """Keep a grammar with all that its matchers need, so that the engine's thread does not make it."""
        key, scanner = (grammar.kind, grammar.text), scanner_of(grammar)
        if scanner is not None:
            self._loaded_tokens()
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = _Compiled(compiled, scanner)
                self._bytes += compiled.memory_size_bytes
            found = self._compiled[key]
            while self._bytes > CACHE_BYTES and len(self._compiled) > 1:
                self._bytes -= self._compiled.popitem(last=False)[1].grammar.memory_size_bytes
            return found

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
        info = self._loaded_info()
        from xgrammar import GrammarCompiler

        with self._compiler_lock:
            if self._compiler is None:
                # Our cache knows what is in use; one thread, since the others compute.
                self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
            return self._compiler

    def _loaded_tokens(self) -> TokenBytes:
        info = self._loaded_info()
        with self._compiler_lock:
            if self._tokens is None:
                words = info.decoded_vocab[: self._vocab]
                # Models have more tokens than their tokenizers: those have no text.
                self._tokens = TokenBytes([*words, *[b""] * (self._vocab - len(words))])
            return self._tokens

    def _loaded_info(self) -> Any:
        with self._compiler_lock:
            if self._info is None:
                self._info = self._load()
            return self._info

    def _load(self) -> Any:
        """Raises GrammarError, CompilerBusy."""
        source = (self._folder, self._vocab, self._eos)
        # Here, not above: it takes a second. xgrammar imports transformers, and a second more of its modules,
        # for a function that is called in the other process.
        with left_out("transformers"):
            from xgrammar import TokenizerInfo
        try:
            try:
                return TokenizerInfo.deserialize_json(vocabulary_of(*source))
            except RuntimeError as error:  # of xgrammar, about its text
                log.warning(
                    "the vocabulary of %s in the cache is broken, and read anew: %s", *source[:1], error
                )
                forget_vocabulary(*source)
                return TokenizerInfo.deserialize_json(vocabulary_of(*source))
        except VocabularyUnread as error:
            raise CompilerBusy(f"this model's tokenizer was not read: {one_line(error)}") from error
        except TokenizerUnusable as error:
            text = f"this model's tokenizer has no structured output: {one_line(error)}"
            raise GrammarError(text) from error
