"""KV reads within one process: peers are other backends of the same `LoopbackFabric`."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.core.errors import IncompatiblePeer, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory, check_blocks
from kv_transfer.layout import Ranges, check_ranges, runs


class LoopbackOffer(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    block_bytes: int


@dataclass(slots=True)
class LoopbackFabric:
    """The memories that backends of one fabric can read."""

    memories: dict[WorkerId, KVMemory] = field(default_factory=dict[WorkerId, KVMemory])


class LoopbackBackend:
    """See `kv_transfer.backend.TransferBackend`. Reads complete at once; `timeout_s` never matters."""

    name = "loopback"

    def __init__(self, worker_id: WorkerId, memory: KVMemory, fabric: LoopbackFabric) -> None:
        assert memory.is_host
        self._worker_id, self._memory, self._fabric = worker_id, memory, fabric
        self._peers: set[WorkerId] = set()

    async def start(self) -> None:
        self._fabric.memories[self._worker_id] = self._memory

    async def close(self) -> None:
        self._fabric.memories.pop(self._worker_id, None)
        self._peers.clear()

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(LoopbackOffer(self._worker_id, self._memory.block_bytes))

    async def add_peer(self, peer: WorkerId, offer: bytes, *, block_bytes: int | None = None) -> None:
        try:
            parsed = msgspec.msgpack.decode(offer, type=LoopbackOffer)
        except msgspec.DecodeError as error:
            raise IncompatiblePeer(f"malformed loopback offer: {error}") from error
        if parsed.block_bytes != (block_bytes or self._memory.block_bytes) or parsed.worker_id != peer:
            raise IncompatiblePeer(f"{peer} offers {parsed}")
        self._peers.add(peer)

    async def remove_peer(self, peer: WorkerId) -> None:
        self._peers.discard(peer)

    async def read(
        self,
        peer: WorkerId,
        source_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout_s: float,
        ranges: Ranges = (),
    ) -> list[int]:
        theirs, ours = self._memory_of(peer), self._memory
        check_blocks(ours, peer, theirs.block_count, source_blocks, local_blocks)
        check_ranges(ranges, source_bytes=theirs.block_bytes, local_bytes=ours.block_bytes)
        for source, local in zip(source_blocks, local_blocks, strict=True) if ranges else ():
            there = theirs.base_address + source * theirs.block_bytes
            here = ours.base_address + local * ours.block_bytes
            for piece in ranges:
                ctypes.memmove(here + piece.local, there + piece.source, piece.length)
        if not ranges:
            self._copy_whole(theirs, source_blocks, local_blocks)
        return [int(theirs.generations[block]) for block in source_blocks]

    def _copy_whole(
        self, theirs: KVMemory, source_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> None:
        ours, size = self._memory, self._memory.block_bytes
        for run in runs(source_blocks, local_blocks):
            to = ours.base_address + run.local * size
            ctypes.memmove(to, theirs.base_address + run.source * size, run.block_count * size)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        pass  # a read never outlives its call

    def _memory_of(self, peer: WorkerId) -> KVMemory:
        memory = self._fabric.memories.get(peer)
        if memory is None or peer not in self._peers:
            raise TransferFailed(f"{peer} is not a loopback peer, or closed")
        return memory
