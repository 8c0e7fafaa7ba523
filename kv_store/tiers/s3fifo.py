"""S3-FIFO: a small queue on trial, a main queue with second chances, ghosts (Yang et al., SOSP 2023)."""

from collections import OrderedDict

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from kv_store.tiers.parking import ParkingPolicy

SMALL_SHARE = 0.1
"""Share of the capacity that is on trial (section 4.1 of the paper)."""
USES_MAX = 3
"""A two-bit counter."""
USES_TO_STAY = 2
"""Uses on trial after which a block moves to the main queue; the paper evicts at `freq <= 1`."""


class S3FifoPolicy(ParkingPolicy):
    """`EvictionPolicy`. Ghosts: at most as many as the main queue's share of the capacity."""

    name = "s3fifo"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__()
        self._small_max = max(1, int(capacity_blocks * SMALL_SHARE))
        self._ghosts_max = max(1, capacity_blocks - self._small_max)
        self._uses: dict[BlockHash, int] = {}
        self._small: OrderedDict[BlockHash, None] = OrderedDict()
        self._main: OrderedDict[BlockHash, None] = OrderedDict()
        self._on_trial: set[BlockHash] = set()  # those of `small`, aside or not
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()

    def insert(self, block: BlockFacts, *, now_s: float) -> None:
        block_hash = block.block_hash
        self._uses[block_hash] = 0
        if block_hash in self._ghosts:
            del self._ghosts[block_hash]
            self._main[block_hash] = None
        else:
            self._on_trial.add(block_hash)
            self._small[block_hash] = None

    def touch(self, block_hash: BlockHash, *, now_s: float) -> None:
        self._uses[block_hash] = min(USES_MAX, self._uses[block_hash] + 1)
        if self._take_aside(block_hash):
            (self._small if block_hash in self._on_trial else self._main)[block_hash] = None

    def remove(self, block_hash: BlockHash, *, now_s: float, was_evicted: bool) -> None:
        if not self._take_aside(block_hash):
            self._unlink(block_hash)
        if block_hash in self._on_trial:
            self._on_trial.discard(block_hash)
            if was_evicted:
                self._remember(block_hash)
        del self._uses[block_hash]

    def earns_next(self, block_hash: BlockHash) -> bool:
        return True

    def _front(self) -> BlockHash | None:
        # Every turn moves a block out of the small queue or takes a use from one of the main queue.
        while self._small or self._main:
            from_small = bool(self._small) and (len(self._small) >= self._small_max or not self._main)
            queue = self._small if from_small else self._main
            block_hash = next(iter(queue))
            if self._uses[block_hash] < (USES_TO_STAY if from_small else 1):
                return block_hash
            if from_small:
                del self._small[block_hash]
                self._on_trial.discard(block_hash)
                self._main[block_hash] = None
                self._uses[block_hash] = 0
            else:
                self._uses[block_hash] -= 1
                self._main.move_to_end(block_hash)
        return None

    def _unlink(self, block_hash: BlockHash) -> None:
        del (self._small if block_hash in self._on_trial else self._main)[block_hash]

    def _remember(self, block_hash: BlockHash) -> None:
        self._ghosts[block_hash] = None
        if len(self._ghosts) > self._ghosts_max:
            self._ghosts.popitem(last=False)
