"""KV reads within one host by cross-memory attach: the reader's kernel copies out of the source's pages.

The source does nothing at all, so a frozen one can be read and a busy one is not slowed down. It must be a
process of the same host and PID namespace that this one may trace (same user, and where Yama restricts that,
kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE); `add_peer` finds out, and another backend is taken otherwise.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.core.errors import OtherMemory, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory, check_blocks
from kv_transfer.backends.cma_memory import CopyPlan
from kv_transfer.backends.host_reads import HostReads
from kv_transfer.backends.source_process import (
    ProcessOffer,
    SourceProcess,
    out_of_range,
    parse_process_offer,
)
from kv_transfer.layout import Ranges, check_ranges

STEP_BYTES = 16 * 2**20
"""Bytes copied in about a millisecond: the longest wait of a late read, or of a short one behind it."""
THREADS_MAX = 2
"""More do not add to what one read gets out of a host's memory, and take cores from the engine."""


class CmaOffer(ProcessOffer, frozen=True):
    base_address: int


@dataclass(frozen=True, slots=True)
class _CmaRead:
    """`copy_threads.Steps`."""

    source: SourceProcess
    memory: KVMemory
    offer: CmaOffer
    source_blocks: Sequence[int]
    local_blocks: Sequence[int]
    ranges: Ranges
    plans: list[CopyPlan]

    def plan(self) -> int:
        if not self.local_blocks:
            return 0
        offer, memory = self.offer, self.memory
        plan = CopyPlan(
            self.source_blocks,
            self.local_blocks,
            self.ranges,
            source=(offer.base_address, offer.block_bytes),
            local=(memory.base_address, memory.block_bytes),
            step_bytes=STEP_BYTES,
        )
        self.plans.append(plan)
        return plan.step_count

    def copy(self, index: int) -> None:
        self.source.read(*self.plans[0].step(index))

    def finish(self) -> list[int]:
        return self.source.generations(self.source_blocks)


class CmaBackend:
    """See `kv_transfer.backend.TransferBackend`; all public methods belong to the event loop."""

    name = "cma"

    def __init__(self, worker_id: WorkerId, memory: KVMemory) -> None:
        self._worker_id, self._memory = worker_id, memory
        self._peers: dict[WorkerId, CmaOffer] = {}
        self._host: HostReads | None = None

    async def start(self) -> None:
        if not self._memory.is_host:
            raise OtherMemory(f"cross-memory attach reads host memory, not {self._memory.device}")
        count = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self._host = HostReads(thread_count=count, name=f"kv cma {self._worker_id}")

    async def close(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            await host.close()
            self._peers.clear()

    def offer(self) -> bytes:
        fields = self._open_host().offered(self._memory)
        return msgspec.msgpack.encode(CmaOffer(base_address=self._memory.base_address, **fields))

    async def add_peer(self, peer: WorkerId, offer: bytes, *, block_bytes: int | None = None) -> None:
        parsed = parse_offer(offer, block_bytes=block_bytes or self._memory.block_bytes)
        self._open_host().check(peer, parsed)
        if self._peers.get(peer) not in (None, parsed):
            await self.remove_peer(peer)
        self._peers[peer] = parsed

    async def remove_peer(self, peer: WorkerId) -> None:
        if self._peers.pop(peer, None) is not None and self._host is not None:
            self._host.give_up(peer)

    async def read(
        self,
        peer: WorkerId,
        source_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout_s: float,
        ranges: Ranges = (),
    ) -> list[int]:
        offer = self._known(peer)
        check_blocks(self._memory, peer, offer.block_count, source_blocks, local_blocks)
        check_ranges(ranges, source_bytes=offer.block_bytes, local_bytes=self._memory.block_bytes)
        host = self._open_host()
        steps = _CmaRead(host.source(offer), self._memory, offer, source_blocks, local_blocks, ranges, [])
        return await host.run(peer, steps, local_blocks, timeout_s)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        if self._host is not None:
            await self._host.settled(local_blocks)

    def _open_host(self) -> HostReads:
        if self._host is None:
            raise TransferFailed("transfers are closed")
        return self._host

    def _known(self, peer: WorkerId) -> CmaOffer:
        offer = self._peers.get(peer)
        if offer is None:
            raise TransferFailed(f"{peer} is not a peer on this host")
        return offer


def parse_offer(offer: bytes, *, block_bytes: int) -> CmaOffer:
    """Raises IncompatiblePeer: malformed, another version, other blocks than expected."""
    parsed = parse_process_offer(CmaOffer, offer, block_bytes=block_bytes, backend="CMA")
    end = parsed.base_address + parsed.block_bytes * parsed.block_count
    if parsed.base_address <= 0 or end >= 2**63:
        raise out_of_range("CMA")
    return parsed
