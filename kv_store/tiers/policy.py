"""The interface of an eviction policy of one tier."""

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts


class EvictionPolicy(Protocol):
    """Knows the blocks of one tier and an order of leaving. Pure: no clock, no randomness of its own.

    The caller owns capacity, pins, TTL and quotas: it says what came, what was hit and what left, and asks
    for victims. What a policy remembers of blocks that left (ghosts) is bounded by a multiple of
    `capacity_blocks`.
    """

    name: str

    def expect(self, chain: Sequence[BlockHash], *, now_s: float) -> None:
        """A request asks for this chain, first block first. Said once per request, before the touches and
        inserts that follow from it (which may take their time); a policy that is not told only decides with
        less knowledge."""
        ...

    def insert(self, block: BlockFacts, *, now_s: float) -> None:
        """It is in the tier now. Not in it before."""
        ...

    def touch(self, block_hash: BlockHash, *, now_s: float) -> None:
        """A request hit it here. Blocks of one request are touched deepest first, so that under LRU a
        prefix outlives what follows it."""
        ...

    def remove(self, block_hash: BlockHash, *, now_s: float, was_evicted: bool) -> None:
        """It left. `was_evicted`: to make room (a ghost may be worth remembering)."""
        ...

    def victim(self, may_go: Callable[[BlockHash], bool]) -> BlockHash | None:
        """The block that leaves next, of those for which `may_go` is true (not pinned, of that tenant); None:
        nobody. The block stays until `remove`. One whose turn comes while it may not go steps aside. It goes
        when a later call finds that it may, or gets a place again when it is touched: the cost is O(1)
        amortised as long as `may_go` is false for those in use only, and O(blocks) where there is nobody."""
        ...

    def earns_next(self, block_hash: BlockHash) -> bool:
        """Whether a block of this tier that leaves, or was just hit, is worth a write to the tier below."""
        ...
