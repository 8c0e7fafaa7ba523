"""Sole owner of block ids: which blocks are free, and how many references each held one has."""

from collections import OrderedDict
from collections.abc import Callable, MutableSequence, Sequence

from baton.core.ids import BlockId


class OutOfBlocks(Exception):
    """Too few free blocks. This is expected under load: the caller preempts, waits or refuses."""


class BlockPool:
    """Holders have references; the last reference released frees the block.

    A free block may still carry content worth finding (`remember`). Blank free blocks are given out
    first, then remembered ones, least recently freed first and the tail of a sequence before its head.

    `generations[i]` rises when block i is given out for new content, before anything is written: a
    one-sided reader compares it to notice that a block changed hands (memory that peers read).
    """

    def __init__(self, block_count: int, generations: MutableSequence[int]) -> None:
        assert len(generations) == block_count
        self.block_count = block_count
        self._generations = generations
        self._blank: OrderedDict[BlockId, None] = OrderedDict((BlockId(i), None) for i in range(block_count))
        self._kept: OrderedDict[BlockId, None] = OrderedDict()
        self._ref_counts: dict[BlockId, int] = {}
        self._remembered: set[BlockId] = set()
        self._forget: Callable[[BlockId], None] | None = None

    @property
    def free_count(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def held_count(self) -> int:
        return len(self._ref_counts)

    def generation(self, block: BlockId) -> int:
        return int(self._generations[block])

    def ref_count(self, block: BlockId) -> int:
        """References to the block; 0 if it is free."""
        return self._ref_counts.get(block, 0)

    def on_reuse(self, forget: Callable[[BlockId], None]) -> None:
        """Call `forget` for every remembered block that is given out for new content."""
        assert self._forget is None, "one index per pool"
        self._forget = forget

    def remember(self, block: BlockId) -> None:
        """Keep the content of the held block findable after it is freed."""
        assert block in self._ref_counts, f"block {block} is free"
        self._remembered.add(block)

    def allocate(self, count: int) -> list[BlockId]:
        """Blocks for new content, one reference each. Raises OutOfBlocks and then changes nothing."""
        if count > self.free_count:
            raise OutOfBlocks(f"want {count}, {self.free_count} of {self.block_count} are free")
        return [self._allocate_one() for _ in range(count)]

    def acquire(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference to each block. Free blocks that are remembered come back with their content."""
        for block in blocks:
            if block not in self._ref_counts:
                del self._kept[block]  # KeyError is our bug: a blank block has no content to find
                self._ref_counts[block] = 0
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Release a reference to each block, the last one first: `blocks` are in sequence order, and the
        tail is to be reused before the head."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1  # KeyError is our bug: releasing what is not held
            if self._ref_counts[block] == 0:
                del self._ref_counts[block]
                (self._kept if block in self._remembered else self._blank)[block] = None

    def check(self) -> None:
        """Assert that every block is free or held, never both, never neither."""
        held, blank, kept = self._ref_counts.keys(), self._blank.keys(), self._kept.keys()
        assert held.isdisjoint(blank)
        assert held.isdisjoint(kept)
        assert blank.isdisjoint(kept)
        assert len(held) + len(blank) + len(kept) == self.block_count
        assert all(count > 0 for count in self._ref_counts.values())
        assert kept <= self._remembered
        assert self._remembered.isdisjoint(blank)

    def _allocate_one(self) -> BlockId:
        block, _ = (self._blank or self._kept).popitem(last=False)
        self._generations[block] += 1
        if block in self._remembered:
            self._remembered.remove(block)
            if self._forget is not None:
                self._forget(block)
        self._ref_counts[block] = 1
        return block
