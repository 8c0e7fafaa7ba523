"""SIEVE: a FIFO queue and a hand that spares who was used since it last came by (Zhang et al., NSDI 2024)."""

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from kv_store.tiers.parking import ParkingPolicy


class _Entry:
    __slots__ = ("block_hash", "newer", "older", "was_used")

    def __init__(self, block_hash: BlockHash) -> None:
        self.block_hash = block_hash
        self.newer: _Entry | None = None
        self.older: _Entry | None = None
        self.was_used = False


class SievePolicy(ParkingPolicy):
    """`EvictionPolicy`. A use moves nothing: the hand goes from old to new and stays where it evicted."""

    name = "sieve"

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[BlockHash, _Entry] = {}
        self._newest: _Entry | None = None
        self._oldest: _Entry | None = None
        self._hand: _Entry | None = None

    def insert(self, block: BlockFacts, *, now_s: float) -> None:
        entry = self._entries[block.block_hash] = _Entry(block.block_hash)
        self._link_newest(entry)

    def touch(self, block_hash: BlockHash, *, now_s: float) -> None:
        entry = self._entries[block_hash]
        entry.was_used = True
        if self._take_aside(block_hash):
            self._link_newest(entry)

    def remove(self, block_hash: BlockHash, *, now_s: float, was_evicted: bool) -> None:
        if not self._take_aside(block_hash):
            self._unlink(block_hash)
        del self._entries[block_hash]

    def earns_next(self, block_hash: BlockHash) -> bool:
        return True

    def _front(self) -> BlockHash | None:
        # Two rounds at most: the first leaves nobody marked.
        entry = self._hand or self._oldest
        while entry is not None and entry.was_used:
            entry.was_used = False
            entry = entry.newer or self._oldest
        self._hand = entry
        return entry.block_hash if entry else None

    def _link_newest(self, entry: _Entry) -> None:
        entry.older, entry.newer = self._newest, None
        if self._newest is not None:
            self._newest.newer = entry
        else:
            self._oldest = entry
        self._newest = entry

    def _unlink(self, block_hash: BlockHash) -> None:
        entry = self._entries[block_hash]
        if self._hand is entry:
            self._hand = entry.newer
        if entry.older is not None:
            entry.older.newer = entry.newer
        else:
            self._oldest = entry.newer
        if entry.newer is not None:
            entry.newer.older = entry.older
        else:
            self._newest = entry.older
        entry.older = entry.newer = None
