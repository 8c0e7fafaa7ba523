"""Copies between a KV pool in host memory and the store's arena."""

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from baton.core.store import StoreWelcome
from baton.engine.kv_pool import KVPool
from baton.worker.store_copier import Copies, OpenCopies


def copies_of(pool: KVPool) -> OpenCopies:
    """For `StoreCopier`, by the device where the pool is."""

    def open_copies(descriptor: int, welcome: StoreWelcome) -> Copies:
        if welcome.slot_bytes < pool.block_bytes:
            raise ValueError(f"slots of {welcome.slot_bytes} bytes for blocks of {pool.block_bytes}")
        return HostCopies(pool, descriptor, welcome)

    return open_copies


class HostCopies:
    """`store_copier.Copies` of a pool in host memory."""

    def __init__(self, pool: KVPool, descriptor: int, welcome: StoreWelcome) -> None:
        """Raises OSError or ValueError if the descriptor is no arena of that size."""
        self._block_bytes, self._has_checksums = pool.block_bytes, welcome.has_checksums
        self._blocks: npt.NDArray[np.uint8] = pool.memory.numpy()
        """[B, block_bytes]"""
        self._map = mmap.mmap(descriptor, welcome.slot_bytes * welcome.slot_count)
        arena = np.frombuffer(self._map, dtype=np.uint8)
        self._slots = arena.reshape(welcome.slot_count, welcome.slot_bytes)[:, : pool.block_bytes]

    def to_slots(self, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        for block, slot in zip(blocks, slots, strict=True):
            self._slots[slot] = self._blocks[block]
        return tuple(self._checksum(self._slots[slot]) if self._has_checksums else 0 for slot in slots)

    def from_slots(
        self, slots: Sequence[int], blocks: Sequence[int], checksums: Sequence[int]
    ) -> tuple[int, ...]:
        for slot, block in zip(slots, blocks, strict=True):
            self._blocks[block] = self._slots[slot]
        return tuple(
            index
            for index, (block, checksum) in enumerate(zip(blocks, checksums, strict=True))
            if checksum and self._checksum(self._blocks[block]) != checksum
        )

    def close(self) -> None:
        del self._slots
        self._map.close()

    @staticmethod
    def _checksum(data: npt.NDArray[np.uint8]) -> int:
        return xxhash.xxh3_64_intdigest(data.data)
