"""What all policies share: blocks whose turn comes while they are in use step aside."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.core.ids import BlockHash

RETRIES = 2
"""Blocks aside that each call looks at again. More than one, so that they drain faster than they gather."""


class ParkingPolicy(ABC):
    """An order of leaving, and aside from it the blocks that were in use when their turn came.

    Without the second a long load at the front of the order would be stepped over again for every victim.
    A block aside goes as soon as it is seen free: its turn was before everybody's who is still in order. When
    it is touched it takes its place in the order again. So every block is stepped over once per use.
    """

    def __init__(self) -> None:
        self._aside: OrderedDict[BlockHash, None] = OrderedDict()

    def expect(self, chain: Sequence[BlockHash], *, now_s: float) -> None:  # noqa: B027  (a default)
        """See `EvictionPolicy.expect`. Most orders know blocks only."""

    def victim(self, may_go: Callable[[BlockHash], bool]) -> BlockHash | None:
        """See `EvictionPolicy.victim`."""
        for _ in range(min(RETRIES, len(self._aside))):
            block_hash = next(iter(self._aside))
            if may_go(block_hash):
                return block_hash
            self._aside.move_to_end(block_hash)
        while (block_hash := self._front()) is not None:
            if may_go(block_hash):
                return block_hash
            self._unlink(block_hash)
            self._aside[block_hash] = None
        return next((h for h in self._aside if may_go(h)), None)

    def _take_aside(self, block_hash: BlockHash) -> bool:
        """Whether it was aside; it is in neither place now."""
        if block_hash not in self._aside:
            return False
        del self._aside[block_hash]
        return True

    @abstractmethod
    def _front(self) -> BlockHash | None:
        """The block that goes next of those in order. May reorder them, removes none."""

    @abstractmethod
    def _unlink(self, block_hash: BlockHash) -> None:
        """Out of the order, nothing forgotten."""
