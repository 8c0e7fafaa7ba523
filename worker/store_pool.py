"""How bytes get between a KV pool and the store's arena, by the kind of memory the pool is in."""

import os
import threading
from collections.abc import Sequence

from baton.core.errors import SetupError
from baton.core.store import StoreWelcome
from engine.kv.pool import KVPool
from engine.kv.staging import Staging
from kv_store.arena import Arena
from kv_store.copying import BlockCopier
from worker.store_copier import ArenaCopies, OpenCopies

STAGING_BYTES = 32 * 2**20
"""The pinned memory of a worker whose pool is on a GPU."""

MAP_ROUNDS, MAP_ROUND_S = 20, 0.5
"""How often, and how long apart, memory of the arena is mapped that the node has taken since."""


def copies_of(pool: KVPool) -> OpenCopies:
    """Choose the copies of a pool for `StoreCopier`."""

    def open_copies(descriptor: int, welcome: StoreWelcome) -> ArenaCopies:
        if welcome.slot_bytes < pool.block_bytes:
            raise ValueError(f"slots of {welcome.slot_bytes} bytes for blocks of {pool.block_bytes}")
        try:
            arena = Arena.attach(os.dup(descriptor), welcome.slot_bytes, welcome.slot_count)
        except SetupError as error:
            raise ValueError(str(error)) from None
        kind = HostCopies if pool.device.type == "cpu" else DeviceCopies
        return kind(pool, arena, has_checksums=welcome.has_checksums)

    return open_copies


class _MappedArena:
    """The part that both kinds share: the mapped arena, which it owns, and the copier."""

    def __init__(self, pool: KVPool, arena: Arena, *, has_checksums: bool) -> None:
        self._pool, self._arena, self._has_checksums = pool, arena, has_checksums
        self._copier = BlockCopier()
        self._closing = threading.Event()
        self._mapping = threading.Thread(target=self._map, name="store-map", daemon=True)
        self._mapping.start()

    def close(self) -> None:
        self._closing.set()
        self._mapping.join()  # a slab's time at most
        self._arena.close()
        self._copier.close()

    def _map(self) -> None:
        """Map the arena's memory ahead of the first copies, which are several times slower into unmapped
        pages. The node takes the arena's memory meanwhile, so it is looked for more than once."""
        size, mapped_bytes = self._arena.slot_bytes * self._arena.slot_count, 0
        for _ in range(MAP_ROUNDS):
            for mapped_bytes in self._arena.map_slabs():  # noqa: B007 - the last one counts
                if self._closing.is_set():
                    return
            if mapped_bytes >= size or self._closing.wait(MAP_ROUND_S):
                return

    def _slots_at(self, slots: Sequence[int]) -> list[int]:
        return [self._arena.address(slot) for slot in slots]

    def _copy(self, sources: list[int], destinations: list[int], *, has_checksums: bool) -> list[int]:
        """Copy, and return the checksum of each block as it arrived; 0 without checksums."""
        sums = self._copier.copy(sources, destinations, self._pool.block_bytes, has_checksums=has_checksums)
        return sums if has_checksums else [0] * len(sources)


class HostCopies(_MappedArena):
    """`store_copier.ArenaCopies` of a pool in host memory."""

    def to_slots(self, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        sources, destinations = self._blocks_at(blocks), self._slots_at(slots)
        return tuple(self._copy(sources, destinations, has_checksums=self._has_checksums))

    def from_slots(
        self, slots: Sequence[int], blocks: Sequence[int], checksums: Sequence[int]
    ) -> tuple[int, ...]:
        sources, destinations = self._slots_at(slots), self._blocks_at(blocks)
        return _wrong(self._copy(sources, destinations, has_checksums=any(checksums)), checksums)

    def _blocks_at(self, blocks: Sequence[int]) -> list[int]:
        base, size = self._pool.base_address, self._pool.block_bytes
        return [base + block * size for block in blocks]


class DeviceCopies(_MappedArena):
    """`store_copier.ArenaCopies` of a pool on a GPU, by way of pinned memory of the worker's own, in halves:
    while one is copied on the host, the other moves over the link.

    The arena itself is not registered with the driver. Pages that it gives back to the system
    (`Arena.release`) would stay pinned to the mapping, and the GPU would go on to use memory that nobody
    sees.
    """

    def __init__(self, pool: KVPool, arena: Arena, *, has_checksums: bool) -> None:
        count = max(1, STAGING_BYTES // 2 // pool.block_bytes)
        self._halves = (Staging(pool, count), Staging(pool, count))
        super().__init__(pool, arena, has_checksums=has_checksums)

    def to_slots(self, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        parts, sums = self._parts(len(blocks)), list[int]()
        for index, part in enumerate(parts):
            if index == 0:
                self._halves[0].fetch(blocks[part])
            if index + 1 < len(parts):
                self._halves[(index + 1) % 2].fetch(blocks[parts[index + 1]])
            half, destinations = self._halves[index % 2], self._slots_at(slots[part])
            half.wait()
            sources = half.addresses(len(destinations))
            sums += self._copy(sources, destinations, has_checksums=self._has_checksums)
        return tuple(sums)

    def from_slots(
        self, slots: Sequence[int], blocks: Sequence[int], checksums: Sequence[int]
    ) -> tuple[int, ...]:
        sums: list[int] = []
        for index, part in enumerate(self._parts(len(slots))):
            half, sources = self._halves[index % 2], self._slots_at(slots[part])
            half.wait()
            destinations = half.addresses(len(sources))
            sums += self._copy(sources, destinations, has_checksums=any(checksums))
            half.fill(blocks[part])
        for half in self._halves:
            half.wait()
        return _wrong(sums, checksums)

    def _parts(self, count: int) -> list[slice]:
        size = self._halves[0].block_count
        return [slice(first, min(count, first + size)) for first in range(0, count, size)]


def _wrong(found: Sequence[int], expected: Sequence[int]) -> tuple[int, ...]:
    """Positions where the two differ; 0 is expected where nothing is known."""
    pairs = zip(found, expected, strict=True)
    return tuple(index for index, (actual, wanted) in enumerate(pairs) if wanted and actual != wanted)
