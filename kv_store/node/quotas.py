"""How much of the host memory loads and writes under way may hold, and each worker's part of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core.ids import BlockHash


@dataclass(slots=True, eq=False)
class Holder:
    """A worker, or all peers together."""

    name: str
    counts: dict[BlockHash, int] = field(default_factory=dict[BlockHash, int])
    """The number of its loads that hold each block."""
    bytes: int = 0
    """Bytes of the slots it holds: those of `counts`, each counted once, and those it writes."""


class Quotas:
    """Limits of what holders have. Together they have at most `limit_bytes`. Each may have an equal share of
    it, or as much as is left for others beside what it has. So a holder that is alone gets all, and frozen
    ones cannot starve the rest."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.holders: set[Holder] = set()
        self.total_bytes = 0
        self.write_bytes = 0
        """Bytes that workers are writing. A block that two holders have counts once."""
        self._counts: dict[BlockHash, int] = {}

    def join(self, name: str) -> Holder:
        holder = Holder(name)
        self.holders.add(holder)
        return holder

    def leave(self, holder: Holder) -> None:
        assert not holder.counts
        assert holder.bytes == 0
        self.holders.remove(holder)

    @property
    def most_bytes(self) -> int:
        """What one holder could have if nobody had anything."""
        return self.limit_bytes if len(self.holders) <= 1 else self.limit_bytes // 2

    def fits(self, holder: Holder, own_bytes: int, total_bytes: int) -> bool:
        """Whether the holder may have so much more, of which `total_bytes` nobody else has yet."""
        own, total = holder.bytes + own_bytes, self.total_bytes + total_bytes
        equal = self.limit_bytes // max(1, len(self.holders))
        return total <= self.limit_bytes and (own <= equal or own <= self.limit_bytes - total)

    def need(self, holder: Holder, hashes: Iterable[BlockHash], slot_bytes: int) -> tuple[int, int]:
        """The bytes that are new to the holder, and new to all."""
        new = [block_hash for block_hash in hashes if block_hash not in holder.counts]
        unheld = sum(1 for block_hash in new if block_hash not in self._counts)
        return len(new) * slot_bytes, unheld * slot_bytes

    def reserve(self, holder: Holder, hashes: Iterable[BlockHash], slot_bytes: int) -> None:
        for block_hash in hashes:
            count = holder.counts.get(block_hash, 0)
            holder.counts[block_hash] = count + 1
            if count == 0:
                holder.bytes += slot_bytes
                shared = self._counts.get(block_hash, 0)
                self._counts[block_hash] = shared + 1
                self.total_bytes += slot_bytes if shared == 0 else 0

    def release(self, holder: Holder, hashes: Iterable[BlockHash], slot_bytes: int) -> None:
        for block_hash in hashes:
            holder.counts[block_hash] -= 1  # a KeyError is our bug: the holder does not have it
            if holder.counts[block_hash] == 0:
                del holder.counts[block_hash]
                holder.bytes -= slot_bytes
                self._counts[block_hash] -= 1
                if self._counts[block_hash] == 0:
                    del self._counts[block_hash]
                    self.total_bytes -= slot_bytes

    def begin_write(self, holder: Holder, slot_bytes: int) -> None:
        holder.bytes += slot_bytes
        self.total_bytes += slot_bytes
        self.write_bytes += slot_bytes

    def end_write(self, holder: Holder, slot_bytes: int) -> None:
        holder.bytes -= slot_bytes
        self.total_bytes -= slot_bytes
        self.write_bytes -= slot_bytes
        assert holder.bytes >= 0

    def check(self) -> None:
        assert 0 <= self.write_bytes <= self.total_bytes <= self.limit_bytes
        assert self.total_bytes <= sum(holder.bytes for holder in self.holders)
        assert all(count > 0 for holder in self.holders for count in holder.counts.values())
