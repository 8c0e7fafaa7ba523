"""How grammars are compiled and adapters loaded for sequences, see `worker.preparation`."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf, isinf
from typing import Any, Protocol

from baton.core.errors import SetupError
from baton.core.ids import tenant_of
from baton.core.messages import STILL_COMPILED, AdapterRef, RefusalReason, StartSequence
from baton.core.sampling import Grammar
from engine.execution.executor import Executor
from engine.grammar import CompilerBusy
from engine.grammar_compile import GrammarError
from worker.engine_thread import EngineThread
from worker.preparation import NotPrepared
from worker.turns import FairTurns

log = logging.getLogger(__name__)

THREADS = 4
"""Threads that read adapters."""


def compiling_threads() -> ThreadPoolExecutor:
    """Make one thread that waits for the compiling process and reads what it made."""
    return ThreadPoolExecutor(1, thread_name_prefix="compile")


class Warmable(Protocol):
    """The part of `engine.grammar.GrammarStore` that is needed before the first grammar."""

    def warm(self) -> None: ...


def warm_compiler(grammars: Warmable) -> None:
    """Load what the first grammar needs, on the compiling thread.

    The thread does not give way to others: it reads what was compiled, for milliseconds and under the
    interpreter's lock, so that the event loop would wait for whoever keeps it from the processor.
    """
    grammars.warm()


class GrammarCompiler(Protocol):
    """The part of `engine.grammar.GrammarStore` that is needed here."""

    def has(self, grammar: Grammar) -> bool: ...

    def prepare(self, grammar: Grammar, *, is_continued: bool = False) -> None: ...


class GrammarPreparer:
    """Compiles grammars, one at a time and for one tenant after the other. Implements
    `worker.preparation.Preparer`."""

    def __init__(
        self, store: GrammarCompiler, threads: ThreadPoolExecutor, *, prepare_s: float = inf
    ) -> None:
        """A sequence waits `prepare_s` for its turn at most, and then as long again for its own grammar."""
        self._store, self._threads, self._prepare_s = store, threads, prepare_s
        self._turns = FairTurns()

    def is_ready(self, start: StartSequence) -> bool:
        grammar = start.sampling.grammar
        return grammar is None or self._store.has(grammar)

    async def prepare(self, start: StartSequence, claimed: Callable[[], Collection[str]]) -> None:
        grammar = start.sampling.grammar
        if grammar is None:
            return
        await self._within_limit(
            self._turns.take(tenant_of(start.fairness_key)), "others come first for the compiler"
        )
        if self._store.has(grammar):
            self._turns.release()
            return
        is_continued = len(start.tokens) > start.prompt_token_count
        call = partial(self._store.prepare, grammar, is_continued=is_continued)
        compiled = asyncio.get_running_loop().run_in_executor(self._threads, call)
        # The turn lasts as long as the thread works, even if this sequence is cancelled meanwhile.
        compiled.add_done_callback(self._done)
        try:
            await self._within_limit(asyncio.shield(compiled), "this machine is busy")
        except GrammarError as error:
            raise NotPrepared(RefusalReason.UNSUPPORTED, str(error)) from error
        except CompilerBusy as error:
            raise NotPrepared(RefusalReason.BUSY, str(error)) from error

    async def _within_limit(self, step: Awaitable[None], reason: str) -> None:
        try:
            async with asyncio.timeout(None if isinf(self._prepare_s) else self._prepare_s):
                await step
        except TimeoutError:
            waited = f"after {self._prepare_s:g} s (engine.prepare_s)"
            raise NotPrepared(RefusalReason.BUSY, f"{STILL_COMPILED} {waited}: {reason}") from None

    def _done(self, compiled: asyncio.Future[None]) -> None:
        if not compiled.cancelled():
            compiled.exception()  # whoever waited may be gone, and nobody misses it then
        self._turns.release()


class AdapterLoader(Protocol):
    """How adapters come and go. `read` runs in a thread and raises SetupError; the others wait for the
    engine's thread."""

    def read(self, ref: AdapterRef) -> Any: ...

    async def install(self, adapter: Any) -> None: ...

    async def drop(self, key: str) -> None: ...


class EngineAdapters:
    """Loads adapters into the engine. Implements AdapterLoader."""

    def __init__(self, executor: Executor, engine: EngineThread) -> None:
        self._executor, self._engine = executor, engine

    def read(self, ref: AdapterRef) -> Any:
        return self._executor.read_adapter(ref)

    async def install(self, adapter: Any) -> None:
        await self._engine.run(self._executor.install_adapter, adapter)

    async def drop(self, key: str) -> None:
        await self._engine.run(self._executor.drop_adapter, key)


class AdapterPreparer:
    """Loads adapters. The least recently started one that nobody uses makes room for another. Implements
    `worker.preparation.Preparer`."""

    def __init__(
        self,
        loader: AdapterLoader,
        threads: ThreadPoolExecutor,
        *,
        count_max: int,
        in_use: Callable[[], Collection[str]],
    ) -> None:
        """`in_use` returns the keys that the core's sequences name."""
        self._loader, self._threads, self._count_max, self._in_use = loader, threads, count_max, in_use
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._loading: dict[str, asyncio.Task[NotPrepared | None]] = {}
        self._one_at_a_time = asyncio.Lock()

    def is_ready(self, start: StartSequence) -> bool:
        if start.adapter is None:
            return True
        if start.adapter.key not in self._loaded:
            return False
        self._loaded.move_to_end(start.adapter.key)
        return True

    async def prepare(self, start: StartSequence, claimed: Callable[[], Collection[str]]) -> None:
        ref = start.adapter
        if ref is None or ref.key in self._loaded:
            return
        task = self._loading.get(ref.key)
        if task is None:
            task = asyncio.create_task(self._load(ref, claimed))
            self._loading[ref.key] = task
            task.add_done_callback(lambda _: self._loading.pop(ref.key))
        # A call that began is finished, whoever loses interest: engine and book must agree.
        refusal = await asyncio.shield(task)
        if refusal is not None:
            raise refusal

    async def _load(self, ref: AdapterRef, claimed: Callable[[], Collection[str]]) -> NotPrepared | None:
        async with self._one_at_a_time:
            loop = asyncio.get_running_loop()
            try:
                adapter = await loop.run_in_executor(self._threads, self._loader.read, ref)
            except SetupError as error:
                return NotPrepared(RefusalReason.UNSUPPORTED, str(error))
            if len(self._loaded) >= self._count_max:
                needed = {*self._in_use(), *claimed()}
                victim = next((key for key in self._loaded if key not in needed), None)
                if victim is None:
                    reason = f"all {self._count_max} adapters of this worker are in use (engine.adapters_max)"
                    return NotPrepared(RefusalReason.NO_ROOM, reason)
                del self._loaded[victim]
                log.info("adapter %s makes room", victim)
                await self._loader.drop(victim)
            await self._loader.install(adapter)
            self._loaded[ref.key] = None
            return None
