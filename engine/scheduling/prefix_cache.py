"""Finds blocks by content: block hash <-> block id over the pool, free blocks included."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockHash, BlockId
from engine.scheduling.block_pool import BlockPool, OutOfBlocks


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Net changes since the last collection. Hashes that came and went in between are left out."""

    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlockReservation:
    """A block table in sequence order. The caller holds one reference to each block."""

    blocks: list[BlockId]
    cached_count: int
    """Number of blocks, from the front, that hold their content already."""
    copy_source: BlockId | None = None
    """Holds the tail that was asked for, to be copied into blocks[cached_count]; with one more reference."""


class PrefixCache:
    """An index, not a holder: blocks stay findable until the pool gives them out for new content.

    Two blocks with the same content are not merged: the second stays without a hash.

    Full blocks are shared as they are. A part-filled block is appended to by its sequence, so what
    others find of it (a *tail*: its first positions, known by `tail_hash`) they copy.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._tail_block_of: dict[BlockHash, BlockId] = {}
        self._tail_hash_of: dict[BlockId, BlockHash] = {}
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        pool.on_reuse(self._forget)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest run of `hashes` from its start that is here. No references are added."""
        found: list[BlockId] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def has(self, block_hash: BlockHash) -> bool:
        """True if the hash is known, for a full block or for a tail."""
        return block_hash in self._block_of or block_hash in self._tail_block_of

    def reserve(
        self,
        hashes: Sequence[BlockHash],
        block_count: int,
        *,
        keep_free: int,
        tail: BlockHash | None = None,
    ) -> BlockReservation:
        """Reserve `block_count` blocks: references to those that match `hashes`, and new blocks for the rest.
        `tail` is looked for when all hashes match.

        Raises OutOfBlocks, and changes nothing, if fewer than `keep_free` blocks would stay free.
        """
        matched = self.match(hashes)
        source = None
        if tail is not None and len(matched) == len(hashes):
            source = self._tail_block_of.get(tail)
        new_count = block_count - len(matched)
        left_count = (
            self.pool.free_count - new_count - sum(self.pool.ref_count(block) == 0 for block in matched)
        )
        if source is not None and self.pool.ref_count(source) == 0:
            if left_count - 1 < keep_free:
                source = None  # computing the tail again is better than not being admitted
            else:
                left_count -= 1
        if left_count < keep_free:
            raise OutOfBlocks(f"{block_count} blocks would leave {left_count} free, not {keep_free}")
        self.pool.acquire(matched)  # first: taking must not reuse what was matched
        if source is not None:
            self.pool.acquire([source])
        return BlockReservation(matched + self.pool.allocate(new_count), len(matched), source)

    def insert_tail(self, tail: BlockHash, block: BlockId) -> None:
        """The first positions of the held block hold this content, and will."""
        if tail not in self._tail_block_of and block not in self._tail_hash_of:
            self._tail_block_of[tail] = block
            self._tail_hash_of[block] = tail
            self.pool.remember(block)

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
        assert {h: b for b, h in self._tail_hash_of.items()} == self._tail_block_of
        assert self._stored.keys() <= self._block_of.keys()
        assert self._removed.keys().isdisjoint(self._block_of)

    def _forget(self, block: BlockId) -> None:
        tail = self._tail_hash_of.pop(block, None)
        if tail is not None:
            del self._tail_block_of[tail]
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        del self._block_of[block_hash]
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None
