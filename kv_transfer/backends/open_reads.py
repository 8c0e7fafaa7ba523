"""The event loop's side of reads that other threads carry out: time limits, giving up, settling."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from baton.core.errors import TransferFailed
from baton.core.ids import WorkerId

_T = TypeVar("_T")

ABORT_S = 0.25
"""Time for a read that is out of time to end its step; if it does, nothing of it can land any more."""


def _nothing() -> None:
    """Do nothing, since no thread carries the read out."""


@dataclass(slots=True, eq=False)
class BackendRead:
    """`abandon` asks its threads to begin nothing more; they answer with `BackendReads.ended`."""

    peer: WorkerId
    local_blocks: frozenset[int]
    result: asyncio.Future[list[int]]
    abandon: Callable[[], None] = _nothing
    is_abandoned: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def give_up(self, message: str) -> None:
        """Its reader hears at once; bytes may land until it is over."""
        self.is_abandoned = True
        self.abandon()
        if not self.result.done():
            self.result.set_exception(TransferFailed(message, may_still_land=not self.over.is_set()))
            self.result.exception()  # looked at: a cancelled reader does not


class BackendReads:
    """`ended` may be called from any thread, everything else belongs to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reads: set[BackendRead] = set()

    def open(self, peer: WorkerId, local_blocks: Sequence[int]) -> BackendRead:
        return BackendRead(peer, frozenset(local_blocks), self._loop.create_future())

    async def run(self, read: BackendRead, *, timeout_s: float) -> list[int]:
        """Raises TransferFailed. Whoever carries the read out has been told, and keeps to its time too."""
        self._reads.add(read)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(read.result)
        except TimeoutError:
            read.is_abandoned = True
            read.abandon()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await read.over.wait()
            message = f"{read.peer}: no end within {timeout_s:.3f} s"
            may_land = bool(read.local_blocks) and not read.over.is_set()
            raise TransferFailed(message, may_still_land=may_land) from None
        except asyncio.CancelledError:
            read.is_abandoned = True
            read.abandon()
            raise

    def ended(self, read: BackendRead, result: list[int], error: str) -> None:
        """Nothing of the read can land any more. The loop may be gone when the process ends."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_over, read, result, error)

    def _on_over(self, read: BackendRead, result: list[int], error: str) -> None:
        self._reads.discard(read)
        read.over.set()
        # What it abandons refers to the read: only the garbage collector would free both.
        read.abandon = _nothing
        if read.result.done():
            return
        if error:
            read.result.set_exception(TransferFailed(f"{read.peer}: {error}"))
        else:
            read.result.set_result(result)
        if read.is_abandoned:
            read.result.exception()  # looked at: nobody else will

    def give_up(self, message: str, *, peer: WorkerId | None = None) -> None:
        """All reads, or those from one peer."""
        for read in list(self._reads):
            if peer is None or read.peer == peer:
                read.give_up(message)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        wanted = frozenset(local_blocks)
        for read in list(self._reads):
            if read.is_abandoned and read.local_blocks & wanted:
                await read.over.wait()

    async def all_over(self) -> None:
        for read in list(self._reads):
            await read.over.wait()
