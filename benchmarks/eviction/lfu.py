"""Least often used goes first, among equals the least recently used."""

from collections import OrderedDict
from heapq import heappop, heappush

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from kv_store.tiers.parking import ParkingPolicy

STALE_LEVELS = 64
"""Number of stale entries, beyond that of live ones, at which the heap is rebuilt."""


class LfuPolicy(ParkingPolicy):
    """`EvictionPolicy`. Uses count from insertion on and are forgotten when a block leaves (in-cache LFU)."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[BlockHash, int] = {}
        self._by_uses: dict[int, OrderedDict[BlockHash, None]] = {}
        self._levels: list[int] = []  # heap; each key of _by_uses at least once, and some that are gone

    def insert(self, block: BlockFacts, *, now_s: float) -> None:
        self._uses[block.block_hash] = 1
        self._link(block.block_hash)

    def touch(self, block_hash: BlockHash, *, now_s: float) -> None:
        if not self._take_aside(block_hash):
            self._unlink(block_hash)
        self._uses[block_hash] += 1
        self._link(block_hash)

    def remove(self, block_hash: BlockHash, *, now_s: float, was_evicted: bool) -> None:
        if not self._take_aside(block_hash):
            self._unlink(block_hash)
        del self._uses[block_hash]

    def earns_next(self, block_hash: BlockHash) -> bool:
        return True

    def _front(self) -> BlockHash | None:
        while self._levels:
            level = self._by_uses.get(self._levels[0])
            if level is not None:
                return next(iter(level))
            heappop(self._levels)
        return None

    def _link(self, block_hash: BlockHash) -> None:
        uses = self._uses[block_hash]
        level = self._by_uses.get(uses)
        if level is None:
            level = self._by_uses[uses] = OrderedDict()
            heappush(self._levels, uses)
            if len(self._levels) > 2 * len(self._by_uses) + STALE_LEVELS:
                self._levels = sorted(self._by_uses)
        level[block_hash] = None

    def _unlink(self, block_hash: BlockHash) -> None:
        uses = self._uses[block_hash]
        level = self._by_uses[uses]
        del level[block_hash]
        if not level:
            del self._by_uses[uses]
