"""Copies between the pool and the store's arena. Each has references of its own to the pool's blocks, so
whoever started it may end at any time, and no block is given out while bytes may still move."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.core.ids import BlockId
from engine.scheduling.block_pool import BlockPool
from worker.events import CopyFromStore, CopyToStore


@dataclass(frozen=True, slots=True)
class _Copy:
    owner: object
    blocks: list[BlockId]


class PoolCopies:
    """Copies under way. Every copy ends by one CopyDone, whatever happens to the store."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._open: dict[int, _Copy] = {}
        self._next_id = 0

    @property
    def count(self) -> int:
        return len(self._open)

    def held_blocks(self) -> Iterator[BlockId]:
        """The blocks that copies hold, one entry for each reference."""
        for copy in self._open.values():
            yield from copy.blocks

    def to_store(self, owner: object, blocks: Sequence[BlockId], slots: Sequence[int]) -> CopyToStore:
        return CopyToStore(self._start(owner, blocks), tuple(blocks), tuple(slots))

    def from_store(
        self, owner: object, slots: Sequence[int], blocks: Sequence[BlockId], checksums: Sequence[int]
    ) -> CopyFromStore:
        return CopyFromStore(self._start(owner, blocks), tuple(slots), tuple(blocks), tuple(checksums))

    def owner(self, copy_id: int) -> object:
        """The object that started the copy. Raises KeyError for a copy that we did not start."""
        return self._open[copy_id].owner

    def done(self, copy_id: int) -> None:
        """Release the references of a copy that has ended."""
        self._pool.release(self._open.pop(copy_id).blocks)

    def _start(self, owner: object, blocks: Sequence[BlockId]) -> int:
        self._pool.acquire(blocks)
        self._next_id += 1
        self._open[self._next_id] = _Copy(owner, list(blocks))
        return self._next_id
