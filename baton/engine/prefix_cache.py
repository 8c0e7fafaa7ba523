"""Finds blocks by content: block hash <-> block id over the pool, free blocks included."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockHash, BlockId
from baton.engine.block_pool import BlockPool, OutOfBlocks


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Net changes since the last collection; what came and went in between is not in it."""

    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Reservation:
    """A block table in sequence order. The caller holds one share of each block."""

    blocks: list[BlockId]
    cached_count: int
    """How many of them, from the front, hold their content already."""


class PrefixCache:
    """An index, not a holder: blocks stay findable until the pool gives them out for new content.

    Two blocks with the same content are not merged: the second stays without a hash.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        pool.when_reused(self._forget)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest run of `hashes` from its start that is here. Shares nothing."""
        found: list[BlockId] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def reserve(self, hashes: Sequence[BlockHash], block_count: int, *, keep_free: int) -> Reservation:
        """Shares what matches of `hashes` and takes the rest, `block_count` blocks together.

        Raises OutOfBlocks, and changes nothing, if fewer than `keep_free` blocks would stay free.
        """
        matched = self.match(hashes)
        new_count = block_count - len(matched)
        revived_count = sum(self.pool.shares(block) == 0 for block in matched)
        left_count = self.pool.free_count - revived_count - new_count
        if left_count < keep_free:
            raise OutOfBlocks(f"{block_count} blocks would leave {left_count} free, not {keep_free}")
        self.pool.share(matched)  # first: taking must not reuse what was matched
        return Reservation(matched + self.pool.take(new_count), len(matched))

    def insert(self, block_hash: BlockHash, block: BlockId) -> None:
        """The held block is full and holds this content. A hash known already stays where it is."""
        if block_hash in self._block_of:
            return
        assert block not in self._hash_of, f"block {block} has a hash and was not taken anew"
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self.pool.remember(block)
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def collect_changes(self) -> CacheChanges | None:
        """Net changes since the last call; None if there are none."""
        if not self._stored and not self._removed:
            return None
        changes = CacheChanges(tuple(self._stored), tuple(self._removed))
        self._stored, self._removed = {}, {}
        return changes

    def snapshot(self) -> tuple[BlockHash, ...]:
        """All hashes that are findable now."""
        return tuple(self._block_of)

    def check(self) -> None:
        assert {h: b for b, h in self._hash_of.items()} == self._block_of
        assert self._stored.keys() <= self._block_of.keys()
        assert self._removed.keys().isdisjoint(self._block_of)

    def _forget(self, block: BlockId) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None
