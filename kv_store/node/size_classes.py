"""The slots of one block size, and what is in them."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field

from baton.core.store import BlockFacts
from kv_store.tiers.policy import EvictionPolicy

PAGE_BYTES = 4096
"""Slots are whole pages. On SSD one more page comes before each, for its header."""


def slot_bytes_for(block_bytes: int) -> int:
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def is_checksum(number: int) -> bool:
    """Whether a label on SSD has room for the number."""
    return 0 <= number < 2**64


class HostSlots:
    """The slots of a size class's host memory: which are held, and which free ones have memory.

    `generations[i]` rises when slot i is given out for new content, before anything is written: a one-sided
    reader compares it to notice that a slot changed hands. The caller sees to it that resident slots of all
    size classes together stay below the host memory.
    """

    def __init__(self, slot_bytes: int, slot_count: int, generations: MutableSequence[int]) -> None:
        assert len(generations) == slot_count
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self._generations = generations
        self._held: dict[int, str] = {}
        self._warm: list[int] = []
        self._cold: list[int] = []
        self._untouched = 0

    @property
    def held_count(self) -> int:
        return len(self._held)

    @property
    def warm_count(self) -> int:
        """Free slots that have memory."""
        return len(self._warm)

    @property
    def resident_bytes(self) -> int:
        return (len(self._held) + len(self._warm)) * self.slot_bytes

    def generation(self, slot: int) -> int:
        return int(self._generations[slot])

    def tenant(self, slot: int) -> str:
        """The tenant for whom the slot is held."""
        return self._held[slot]

    def take(self, tenant: str) -> int:
        """Take a slot for new content. The last one freed comes first: its pages are likely in the caches."""
        slot = self._next_free()
        self._generations[slot] += 1
        self._held[slot] = tenant
        return slot

    def free(self, slot: int) -> None:
        del self._held[slot]  # a KeyError is our bug: the slot is free
        self._warm.append(slot)

    def forget_one(self) -> int:
        """Choose a free slot whose memory goes back to the system."""
        slot = self._warm.pop(0)
        self._cold.append(slot)
        return slot

    def held_slots(self) -> set[int]:
        return set(self._held)

    def check(self) -> None:
        """Check that every slot is either held or free."""
        free = [*self._warm, *self._cold]
        assert len(free) == len(set(free))
        assert self._held.keys().isdisjoint(free)
        assert len(free) + len(self._held) == self._untouched <= self.slot_count
        assert all(0 <= slot < self._untouched for slot in (*free, *self._held))

    def _next_free(self) -> int:
        if self._warm:
            return self._warm.pop()
        if self._cold:
            return self._cold.pop()
        assert self._untouched < self.slot_count, "the caller counts bytes"
        self._untouched += 1
        return self._untouched - 1


@dataclass(slots=True, eq=False)
class HostCopy:
    """A whole block in a slot. The slot stays while there are pins, also when the block is found no more."""

    size_class: "SizeClass"
    facts: BlockFacts
    slot: int
    checksum: int
    pins: int = 0
    is_gone: bool = False
    """The block is not found any more, and the slot is freed with the last pin."""
    is_transient: bool = False
    """The block was fetched for one use: policy and directory do not know it, and it is gone when
    unpinned."""
    is_writing: bool = False
    """A write to SSD waits or is under way, which is one of the pins."""
    is_leaving: bool = False
    """The block goes when that write ends."""


@dataclass(slots=True, eq=False)
class SsdCopy:
    """A whole block in a slot of the SSD file."""

    size_class: "SizeClass"
    facts: BlockFacts
    ssd_slot: int
    reads: int = 0
    is_gone: bool = False
    """The block is not found any more, and the slot is free when the last read has ended."""


@dataclass(slots=True, eq=False)
class BlockEntry:
    """A block that can be found here, in one tier or two."""

    size_class: "SizeClass"
    facts: BlockFacts
    used_s: float
    use_count: int = 0
    host: HostCopy | None = None
    ssd: SsdCopy | None = None


class SsdSlots:
    """The slots of a size class's SSD file. The caller counts bytes over all size classes."""

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self.held: dict[int, str] = {}
        """The tenant of each slot."""
        self._free: list[int] = []
        self._untouched = 0

    def take(self, tenant: str) -> int | None:
        """Take a slot; None if all are held."""
        while self._free or self._untouched < self.slot_count:
            slot = self._free.pop() if self._free else self._fresh()
            if slot not in self.held:
                self.held[slot] = tenant
                return slot
        return None

    def adopt(self, slot: int, tenant: str) -> bool:
        """Adopt a slot that the file held at the start. False means that there is no such slot (any more), or
        that it is held."""
        if slot in self.held or not 0 <= slot < self.slot_count:
            return False
        self.held[slot] = tenant  # still ahead of `_untouched`: skipped when its turn comes
        return True

    def free(self, slot: int) -> None:
        del self.held[slot]  # a KeyError is our bug: the slot is free
        if slot < self._untouched:
            self._free.append(slot)

    def check(self) -> None:
        assert len(self._free) == len(set(self._free))
        assert self.held.keys().isdisjoint(self._free)
        assert all(0 <= slot < self.slot_count for slot in self.held)
        touched = sum(1 for slot in self.held if slot < self._untouched)
        assert touched + len(self._free) == self._untouched

    def _fresh(self) -> int:
        self._untouched += 1
        return self._untouched - 1


@dataclass(slots=True, eq=False)
class SizeClass:
    """The arena and the SSD file of one block size."""

    block_bytes: int
    arena: HostSlots
    ssd: SsdSlots
    host_policy: EvictionPolicy
    ssd_policy: EvictionPolicy
    is_ssd_open: bool = False
    host_blocks: set[HostCopy] = field(default_factory=set[HostCopy])
    """All copies that hold a slot, those included that are gone but pinned."""

    @property
    def slot_bytes(self) -> int:
        return self.arena.slot_bytes

    @property
    def ssd_slot_bytes(self) -> int:
        return self.arena.slot_bytes + PAGE_BYTES
