"""What a sequence needs before the core may know of it: its grammar compiled, its adapter loaded.

Both take from a millisecond to seconds, elsewhere than on the event loop. What reaches the core is therefore
always ready to run, and a step never waits for a compiler.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from baton.core.ids import RouterId, SeqKey, SequenceId, tenant_of
from baton.core.messages import (
    CancelSequence,
    FailureReason,
    Phase,
    RefusalReason,
    RouterMessage,
    SequenceFailed,
    SequenceRefused,
    StartSequence,
    WorkerMessage,
)
from worker.core_starts import preparation_s
from worker.service import RouterSink

log = logging.getLogger(__name__)


class NotPrepared(Exception):
    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PreparationSink(RouterSink, Protocol):
    """The core, which also hears of what is under preparation: a drain waits for it, and readers ask for the
    KV of prefill phases."""

    def preparation_began(self, key: SeqKey, phase: Phase) -> None: ...

    def preparation_ended(self, key: SeqKey, reason: str) -> None: ...


class Preparer(Protocol):
    """One thing that sequences need."""

    def is_ready(self, start: StartSequence) -> bool:
        """The sequence needs nothing of this kind, or it is there."""
        ...

    async def prepare(self, start: StartSequence, claimed: Callable[[], Collection[str]]) -> None:
        """Make ready what the sequence needs. `claimed` returns `AdapterRef.key` of everything under
        preparation. Raises NotPrepared."""
        ...


@dataclass(frozen=True, slots=True)
class _PendingStart:
    router_id: RouterId
    start: StartSequence
    task: asyncio.Task[None]


class StartPreparation:
    """Stands between the routers' sessions and the core. Implements `RouterSink`.

    While a sequence is prepared the core does not know it. A cancel, a higher epoch and the loss of its
    router end the preparation here, and its deadline runs here.
    """

    def __init__(
        self,
        core: PreparationSink,
        preparers: Sequence[Preparer],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        prepare_s: float,
        pending_max: int,
        is_draining: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_draining` tells whether the core refuses new sequences, which then need no preparation."""
        self._core, self._preparers = core, tuple(preparers)
        self._spawn, self._is_draining, self._now = spawn, is_draining, now
        self._prepare_s, self._pending_max = prepare_s, pending_max
        self._pending: dict[SequenceId, _PendingStart] = {}
        self.answer: Callable[[RouterId, WorkerMessage], None] = lambda router_id, message: None
        """Where refusals go. Set it before the first message."""

    def router_joined(self, router_id: RouterId) -> None:
        self._drop_all_of(router_id)
        self._core.router_joined(router_id)

    def router_lost(self, router_id: RouterId) -> None:
        # A router that comes back does not know what never started here.
        self._drop_all_of(router_id)
        self._core.router_lost(router_id)

    def drain(self) -> None:
        self._core.drain()

    def from_router(self, router_id: RouterId, message: RouterMessage) -> None:
        match message:
            case StartSequence():
                self._on_start(router_id, message)
            case CancelSequence(seq_id, epoch):
                pending = self._pending.get(seq_id)
                if pending is not None and pending.start.epoch <= epoch:
                    self._drop(seq_id)
                self._core.from_router(router_id, message)
            case _:
                self._core.from_router(router_id, message)

    def _on_start(self, router_id: RouterId, start: StartSequence) -> None:
        pending = self._pending.get(start.seq_id)
        if pending is not None:
            if start.epoch == pending.start.epoch:
                return
            if start.epoch < pending.start.epoch:
                reason = f"epoch {pending.start.epoch} is known"
                self._refuse(router_id, start, RefusalReason.STALE_EPOCH, reason)
                return
            self._drop(start.seq_id)
        if self._is_draining() or all(preparer.is_ready(start) for preparer in self._preparers):
            self._core.from_router(router_id, start)
        elif len(self._pending) >= self._pending_max or self._is_over_share(start):
            reason = f"{len(self._pending)} sequences wait for their grammar or adapter"
            self._refuse(router_id, start, RefusalReason.BUSY, reason)
        else:
            # The core ends the epoch before at once, not when the new one is ready.
            if start.epoch:
                self._core.from_router(router_id, CancelSequence(start.seq_id, start.epoch - 1))
            task = self._spawn(self._prepare(router_id, start))
            self._pending[start.seq_id] = _PendingStart(router_id, start, task)
            self._core.preparation_began(SeqKey(start.seq_id, start.epoch), start.phase)

    async def _prepare(self, router_id: RouterId, start: StartSequence) -> None:
        began_s = self._now()
        try:
            async with asyncio.timeout(min(preparation_s(start, self._prepare_s), start.time_left_s)):
                for preparer in self._preparers:
                    await preparer.prepare(start, self._claimed)
        except NotPrepared as error:
            self._gave_up(start, str(error))
            self._refuse(router_id, start, error.reason, str(error))
        except TimeoutError:
            self._gave_up(start, "not ready in time")
            self._time_is_up(router_id, start)
        except asyncio.CancelledError:
            raise
        except (
            BaseException
        ) as error:  # an error of this request alone, whatever it is, a library's panic too
            log.exception("sequence %s cannot be prepared", start.seq_id)
            self._gave_up(start, "cannot be prepared")
            failed = SequenceFailed(start.seq_id, start.epoch, FailureReason.INTERNAL, str(error))
            self.answer(router_id, failed)
        else:
            self._forget(start)
            time_left_s = start.time_left_s - (self._now() - began_s)
            self._core.from_router(router_id, msgspec.structs.replace(start, time_left_s=time_left_s))

    def _time_is_up(self, router_id: RouterId, start: StartSequence) -> None:
        limit_s = preparation_s(start, self._prepare_s)
        if start.time_left_s <= limit_s:
            key = SeqKey(start.seq_id, start.epoch)
            reason = "the request's time is up, and its grammar or adapter not ready"
            self.answer(router_id, SequenceFailed(*key, FailureReason.DEADLINE, reason))
            return
        # A grammar that takes too long is refused by the compiler. This one waited for those of others.
        what = "its grammar or adapter" if start.sampling.grammar and start.adapter else "its grammar"
        what = what if start.sampling.grammar else "its adapter"
        reason = f"{what} was not ready in time (engine.prepare_s is {self._prepare_s:g} s)"
        self._refuse(router_id, start, RefusalReason.BUSY, reason)

    def _is_over_share(self, start: StartSequence) -> bool:
        """Whether the tenant has as many sequences under preparation as one may have."""
        tenant = tenant_of(start.fairness_key)
        starts = (pending.start for pending in self._pending.values())
        count = sum(tenant_of(one.fairness_key) == tenant for one in starts)
        return count >= max(1, self._pending_max // 2)

    def _claimed(self) -> set[str]:
        starts = (pending.start for pending in self._pending.values())
        return {start.adapter.key for start in starts if start.adapter is not None}

    def _refuse(self, router_id: RouterId, start: StartSequence, reason: RefusalReason, detail: str) -> None:
        self.answer(router_id, SequenceRefused(start.seq_id, start.epoch, reason, detail))

    def _forget(self, start: StartSequence) -> None:
        pending = self._pending.get(start.seq_id)
        if pending is not None and pending.start is start:
            del self._pending[start.seq_id]

    def _gave_up(self, start: StartSequence, reason: str) -> None:
        self._forget(start)
        self._core.preparation_ended(SeqKey(start.seq_id, start.epoch), reason)

    def _drop(self, seq_id: SequenceId) -> None:
        pending = self._pending[seq_id]
        pending.task.cancel()
        self._gave_up(pending.start, "cancelled")

    def _drop_all_of(self, router_id: RouterId) -> None:
        for seq_id in [s for s, pending in self._pending.items() if pending.router_id == router_id]:
            self._drop(seq_id)
