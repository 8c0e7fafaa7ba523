"""A backend that misbehaves on purpose, around one that does not: for tests of whoever reads.

What happens to a read is drawn from a seeded generator, or taken from a script, so a failure repeats.
"""

import asyncio
import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from random import Random

from baton.core.errors import TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory, TransferBackend
from kv_transfer.layout import Ranges


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
    LOSE = auto()
    """Nothing arrives, and nothing is heard until the read is out of time."""
    CORRUPT = auto()
    """Arrives as if well, with one bit of one block flipped."""
    HOLE = auto()
    """Arrives as if well, but for one block that was never written."""


SILENT = (Fault.CORRUPT, Fault.HOLE)
"""Only checksums show these; they need the memory that is read into, in host memory."""
FAULTS = tuple(fault for fault in Fault if fault is not Fault.NONE and fault not in SILENT)


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

    def __init__(self, inner: TransferBackend, plan: FaultPlan, *, memory: KVMemory | None = None) -> None:
        """`memory`: what `inner` reads into; for the SILENT faults."""
        if memory is None and not set(SILENT).isdisjoint((*plan.faults, *plan.script)):
            raise ValueError(f"{', '.join(SILENT)} need the memory that is read into")
        self.name = inner.name
        self._memory = memory
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

    async def add_peer(self, peer: WorkerId, offer: bytes, *, block_bytes: int | None = None) -> None:
        await self._inner.add_peer(peer, offer, block_bytes=block_bytes)

    async def remove_peer(self, peer: WorkerId) -> None:
        await self._inner.remove_peer(peer)

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
        ranges: Ranges = (),
    ) -> list[int]:
        fault = self._draw()
        self.happened[fault] += 1
        match fault:
            case Fault.FAIL:
                raise TransferFailed(f"{peer}: made to fail")
            case Fault.LATE:
                self._land_later(peer, source_blocks, local_blocks, timeout_s, ranges)
                raise TransferFailed(f"{peer}: made to be late", may_still_land=True)
            case Fault.TRUNCATE:
                half = len(source_blocks) // 2
                await self._inner.read(
                    peer, source_blocks[:half], local_blocks[:half], timeout_s=timeout_s, ranges=ranges
                )
                raise TransferFailed(f"{peer}: made to break off")
            case Fault.DELAY:
                await asyncio.sleep(min(self._plan.delay_s, timeout_s))
                if self._plan.delay_s >= timeout_s:
                    raise TransferFailed(f"{peer}: made to be too slow")
            case Fault.LOSE:
                await asyncio.sleep(timeout_s)
                raise TransferFailed(f"{peer}: made to be lost")
            case _:
                pass
        spoilt = self._before(fault, local_blocks)
        generations = await self._inner.read(
            peer, source_blocks, local_blocks, timeout_s=timeout_s, ranges=ranges
        )
        spoilt()
        return [g + 1 for g in generations] if fault is Fault.STALE else generations

    def _before(self, fault: Fault, local_blocks: Sequence[int]) -> Callable[[], None]:
        """What to do when the bytes have arrived."""
        if fault not in SILENT or not local_blocks:
            return lambda: None
        assert self._memory is not None
        size = self._memory.block_bytes
        address = self._memory.base_address + self._random.choice(local_blocks) * size
        block = (ctypes.c_ubyte * size).from_address(address)
        if fault is Fault.HOLE:
            before = bytes(block)

            def restore() -> None:
                ctypes.memmove(address, before, size)

            return restore
        at, bit = self._random.randrange(size), 1 << self._random.randrange(8)

        def flip() -> None:
            block[at] ^= bit

        return flip

    def _draw(self) -> Fault:
        scripted = next(self._script, None)
        if scripted is not None:
            return scripted
        if self._random.random() < self._plan.probability:
            return self._random.choice(self._plan.faults)
        return Fault.NONE

    def _land_later(
        self,
        peer: WorkerId,
        source: Sequence[int],
        local: Sequence[int],
        timeout_s: float,
        ranges: Ranges,
    ) -> None:
        async def land() -> None:
            await asyncio.sleep(self._plan.delay_s)
            with contextlib.suppress(TransferFailed):  # the peer is gone: nothing lands
                await self._inner.read(peer, source, local, timeout_s=timeout_s, ranges=ranges)

        task = asyncio.create_task(land())
        self._late[task] = frozenset(local)
        task.add_done_callback(lambda ended: self._late.pop(ended, None))
