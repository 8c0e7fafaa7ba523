"""How bytes get between a KV pool and the store's arena: by the kind of memory the pool is in."""

import os
import threading
from collections.abc import Sequence

from baton.core.errors import SetupError
from baton.core.store import StoreWelcome
from baton.engine.kv_pool import KVPool
from baton.worker.store_copier import Copies, OpenCopies
from kv_store.arena import Arena
from kv_store.copying import BlockCopier


def copies_of(pool: KVPool) -> OpenCopies:
    """For `StoreCopier`."""

    def open_copies(descriptor: int, welcome: StoreWelcome) -> Copies:
        if welcome.slot_bytes < pool.block_bytes:
            raise ValueError(f"slots of {welcome.slot_bytes} bytes for blocks of {pool.block_bytes}")
        try:
            arena = Arena.attach(os.dup(descriptor), welcome.slot_bytes, welcome.slot_count)
        except SetupError as error:
            raise ValueError(str(error)) from None
        return HostCopies(pool, arena, has_checksums=welcome.has_checksums)

    return open_copies


class HostCopies:
    """`store_copier.Copies` of a pool in host memory. Owns the arena's mapping."""

    def __init__(self, pool: KVPool, arena: Arena, *, has_checksums: bool) -> None:
        self._pool, self._arena, self._has_checksums = pool, arena, has_checksums
        self._copier = BlockCopier()
        self._is_closing = False
        self._mapping = threading.Thread(target=self._map, name="store-map", daemon=True)
        self._mapping.start()

    def to_slots(self, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        sums = self._copier.copy(
            self._blocks_at(blocks),
            self._slots_at(slots),
            self._pool.block_bytes,
            has_checksums=self._has_checksums,
        )
        return tuple(sums) if self._has_checksums else (0,) * len(blocks)

    def from_slots(
        self, slots: Sequence[int], blocks: Sequence[int], checksums: Sequence[int]
    ) -> tuple[int, ...]:
        found = self._copier.copy(
            self._slots_at(slots),
            self._blocks_at(blocks),
            self._pool.block_bytes,
            has_checksums=any(checksums),
        )
        return tuple(
            index
            for index, (actual, expected) in enumerate(zip(found, checksums, strict=False))
            if expected and actual != expected
        )

    def close(self) -> None:
        self._is_closing = True
        self._mapping.join()  # a slab's time at most
        self._arena.close()
        self._copier.close()

    def _map(self) -> None:
        """A first copy into pages that this process has not mapped is several times slower."""
        for _ in self._arena.map_slabs():
            if self._is_closing:
                return

    def _blocks_at(self, blocks: Sequence[int]) -> list[int]:
        base, size = self._pool.base_address, self._pool.block_bytes
        return [base + block * size for block in blocks]

    def _slots_at(self, slots: Sequence[int]) -> list[int]:
        return [self._arena.address(slot) for slot in slots]
