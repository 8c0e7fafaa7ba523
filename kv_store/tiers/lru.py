"""Least recently used goes first."""

from collections import OrderedDict

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from kv_store.tiers.parking import ParkingPolicy


class LruPolicy(ParkingPolicy):
    """`EvictionPolicy`. Remembers nothing of blocks that left; what leaves is worth the next tier."""

    name = "lru"

    def __init__(self, capacity_blocks: int = 0) -> None:
        """LRU needs no capacity, since it remembers nothing of blocks that left."""
        super().__init__()
        self._order: OrderedDict[BlockHash, None] = OrderedDict()

    def insert(self, block: BlockFacts, *, now_s: float) -> None:
        self._order[block.block_hash] = None

    def touch(self, block_hash: BlockHash, *, now_s: float) -> None:
        if self._take_aside(block_hash):
            self._order[block_hash] = None
        else:
            self._order.move_to_end(block_hash)

    def remove(self, block_hash: BlockHash, *, now_s: float, was_evicted: bool) -> None:
        if not self._take_aside(block_hash):
            del self._order[block_hash]

    def earns_next(self, block_hash: BlockHash) -> bool:
        return True

    def _front(self) -> BlockHash | None:
        return next(iter(self._order), None)

    def _unlink(self, block_hash: BlockHash) -> None:
        del self._order[block_hash]
