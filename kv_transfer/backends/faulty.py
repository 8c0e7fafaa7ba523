"""A backend that misbehaves on purpose, around one that does not: for tests of whoever reads.

What happens to a read is drawn from a seeded generator, or taken from a script, so a failure repeats.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from random import Random

from baton.core.errors import TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import TransferBackend


class Fault(StrEnum):
    NONE = auto()
    DELAY = auto()
    """Arrives well, `delay_s` late (or out of time, if that is sooner)."""
    FAIL = auto()
    """Nothing arrives."""
    TRUNCATE = auto()
    """The first half arrives, then the peer is lost."""
    LATE = auto()
    """Out of time at once; the bytes land `delay_s` later, and only then is the read settled."""
    STALE = auto()
    """Arrives, with generations that have moved on."""


FAULTS = tuple(fault for fault in Fault if fault is not Fault.NONE)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """`script` first, one entry per read; then a fault with `probability`, any of `faults` alike."""

    seed: int = 0
    probability: float = 0.0
    faults: tuple[Fault, ...] = FAULTS
    script: tuple[Fault, ...] = ()
    delay_s: float = 0.01


class FaultyBackend:
    """See `kv_transfer.backend.TransferBackend`."""

    def __init__(self, inner: TransferBackend, plan: FaultPlan) -> None:
        self.name = inner.name
        self.happened: dict[Fault, int] = dict.fromkeys(Fault, 0)
        self._inner, self._plan = inner, plan
        self._random = Random(plan.seed)
        self._script = iter(plan.script)
        self._late: dict[asyncio.Task[None], frozenset[int]] = {}

    async def start(self) -> None:
        await self._inner.start()

    async def close(self) -> None:
        for task in list(self._late):
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._inner.close()

    def offer(self) -> bytes:
        return self._inner.offer()

    async def add_peer(self, peer: WorkerId, offer: bytes) -> None:
        await self._inner.add_peer(peer, offer)

    async def remove_peer(self, peer: WorkerId) -> None:
        await self._inner.remove_peer(peer)

    async def read_generations(
        self, peer: WorkerId, source_blocks: Sequence[int], *, timeout_s: float
    ) -> list[int]:
        return await self._inner.read_generations(peer, source_blocks, timeout_s=timeout_s)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        wanted = frozenset(local_blocks)
        late = [task for task, blocks in self._late.items() if blocks & wanted]
        if late:
            await asyncio.wait(late)
        await self._inner.settled(local_blocks)

    async def read(
        self,
        peer: WorkerId,
        source_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout_s: float,
    ) -> list[int]:
        fault = self._draw()
        self.happened[fault] += 1
        match fault:
            case Fault.FAIL:
                raise TransferFailed(f"{peer}: made to fail")
            case Fault.LATE:
                self._land_later(peer, source_blocks, local_blocks, timeout_s)
                raise TransferFailed(f"{peer}: made to be late", may_still_land=True)
            case Fault.TRUNCATE:
                half = len(source_blocks) // 2
                await self._inner.read(peer, source_blocks[:half], local_blocks[:half], timeout_s=timeout_s)
                raise TransferFailed(f"{peer}: made to break off")
            case Fault.DELAY:
                await asyncio.sleep(min(self._plan.delay_s, timeout_s))
                if self._plan.delay_s >= timeout_s:
                    raise TransferFailed(f"{peer}: made to be too slow")
            case Fault.NONE | Fault.STALE:
                pass
        generations = await self._inner.read(peer, source_blocks, local_blocks, timeout_s=timeout_s)
        return [g + 1 for g in generations] if fault is Fault.STALE else generations

    def _draw(self) -> Fault:
        scripted = next(self._script, None)
        if scripted is not None:
            return scripted
        if self._random.random() < self._plan.probability:
            return self._random.choice(self._plan.faults)
        return Fault.NONE

    def _land_later(
        self, peer: WorkerId, source: Sequence[int], local: Sequence[int], timeout_s: float
    ) -> None:
        async def land() -> None:
            await asyncio.sleep(self._plan.delay_s)
            with contextlib.suppress(TransferFailed):  # the peer is gone: nothing lands
                await self._inner.read(peer, source, local, timeout_s=timeout_s)

        task = asyncio.create_task(land())
        self._late[task] = frozenset(local)
        task.add_done_callback(lambda ended: self._late.pop(ended, None))
