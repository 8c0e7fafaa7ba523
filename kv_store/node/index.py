"""The blocks that are here: in which tier, who needs them, and how they leave."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts, DropReason, Tier
from kv_store.node.context import Context
from kv_store.node.events import ForgetSsd
from kv_store.node.publisher import Publisher
from kv_store.node.size_classes import BlockEntry, HostCopy, SizeClass, SsdCopy

_EXPIRED_MAX = 1024
"""Blocks that expire in one event; the rest follow in the next."""
_MADE_ROOM = (DropReason.EVICTED, DropReason.QUOTA, DropReason.REPLACED)


class Index:
    """All blocks by hash, in the order of last use. The index keeps policies, slots, tenants' accounts and
    directory in step, and decides nothing."""

    def __init__(self, context: Context, publisher: Publisher) -> None:
        self._context = context
        self._publisher = publisher
        self._entries: OrderedDict[BlockHash, BlockEntry] = OrderedDict()
        self.size_classes: dict[int, SizeClass] = {}
        self.host_tenants: Counter[str] = Counter()
        """Bytes of slots that are held for each tenant."""
        self.ssd_tenants: Counter[str] = Counter()
        self.block_counts: Counter[Tier] = Counter()
        """Blocks that can be found in each tier."""
        self.pinned_counts: Counter[Tier] = Counter()
        """Slots with pins or reads under way in each tier."""
        self.was_freed = False
        """A pin ended or a slot came back since the last look: whoever waits for room may try again."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[BlockEntry]:
        return iter(self._entries.values())

    def get(self, block_hash: BlockHash, size_class: SizeClass) -> BlockEntry | None:
        entry = self._entries.get(block_hash)
        return entry if entry is not None and entry.size_class is size_class else None

    def may_be_of(self, block_hash: BlockHash, size_class: SizeClass) -> bool:
        """Whether the hash can be one of this size class. No sound worker gives blocks of two sizes the same
        hash."""
        entry = self._entries.get(block_hash)
        return entry is None or entry.size_class is size_class

    def host_copy(self, block_hash: BlockHash) -> HostCopy | None:
        entry = self._entries.get(block_hash)
        return None if entry is None else entry.host

    def touch(self, entries: Sequence[BlockEntry]) -> None:
        """Note that a request uses these blocks, first block first."""
        now_s = self._context.now_s
        for entry in reversed(entries):
            block_hash = entry.facts.block_hash
            entry.used_s = now_s
            entry.use_count += 1
            self._entries.move_to_end(block_hash)
            if entry.host is not None and not entry.host.is_transient:
                entry.size_class.host_policy.touch(block_hash, now_s=now_s)
                entry.host.is_leaving = False
            if entry.ssd is not None:
                entry.size_class.ssd_policy.touch(block_hash, now_s=now_s)

    # --- slots ----------------------------------------------------------------------------------

    def hold_slot(self, size_class: SizeClass, tenant: str) -> int:
        self.host_tenants[tenant] += size_class.slot_bytes
        return size_class.arena.take(tenant)

    def free_slot(self, size_class: SizeClass, slot: int) -> None:
        tenant = size_class.arena.tenant(slot)
        size_class.arena.free(slot)
        _take_off(self.host_tenants, tenant, size_class.slot_bytes)
        self.was_freed = True

    def hold_ssd_slot(self, size_class: SizeClass, tenant: str) -> int | None:
        slot = size_class.ssd.take(tenant)
        if slot is not None:
            self.ssd_tenants[tenant] += size_class.ssd_slot_bytes
        return slot

    def adopt_ssd_slot(self, size_class: SizeClass, slot: int, tenant: str) -> bool:
        if not size_class.ssd.adopt(slot, tenant):
            return False
        self.ssd_tenants[tenant] += size_class.ssd_slot_bytes
        return True

    def free_ssd_slot(self, size_class: SizeClass, slot: int) -> None:
        tenant = size_class.ssd.held[slot]
        size_class.ssd.free(slot)
        _take_off(self.ssd_tenants, tenant, size_class.ssd_slot_bytes)
        self._context.emit(ForgetSsd(size_class.block_bytes, slot))

    @property
    def resident_bytes(self) -> int:
        return sum(size_class.arena.resident_bytes for size_class in self.size_classes.values())

    @property
    def ssd_bytes(self) -> int:
        return sum(len(one.ssd.held) * one.ssd_slot_bytes for one in self.size_classes.values())

    # --- blocks come ----------------------------------------------------------------------------

    def add_host(
        self,
        size_class: SizeClass,
        facts: BlockFacts,
        slot: int,
        checksum: int,
        *,
        is_transient: bool = False,
    ) -> HostCopy:
        """Add a whole block in a held slot. The block is not in host memory yet."""
        entry = self._entry(size_class, facts)
        assert entry.host is None
        copy = HostCopy(size_class, facts, slot, checksum, is_transient=is_transient)
        entry.host = copy
        size_class.host_blocks.add(copy)
        self.block_counts[Tier.HOST] += 1
        if not is_transient:
            size_class.host_policy.insert(facts, now_s=self._context.now_s)
            self._context.counts.stored[Tier.HOST] += 1
        self._report(entry)
        return copy

    def keep(self, copy: HostCopy) -> None:
        """Keep a copy that was transient."""
        entry = self._entries[copy.facts.block_hash]
        assert entry.host is copy
        assert copy.is_transient
        copy.is_transient = False
        copy.size_class.host_policy.insert(copy.facts, now_s=self._context.now_s)
        self._context.counts.stored[Tier.HOST] += 1
        self._report(entry)

    def add_ssd(self, size_class: SizeClass, facts: BlockFacts, ssd_slot: int) -> SsdCopy:
        entry = self._entry(size_class, facts)
        assert entry.ssd is None
        copy = SsdCopy(size_class, facts, ssd_slot)
        entry.ssd = copy
        self.block_counts[Tier.SSD] += 1
        size_class.ssd_policy.insert(facts, now_s=self._context.now_s)
        self._context.counts.stored[Tier.SSD] += 1
        self._report(entry)
        return copy

    # --- blocks go ------------------------------------------------------------------------------

    def drop_host(self, entry: BlockEntry, reason: DropReason | None) -> None:
        """Drop a copy. With `reason` None it was transient, and is nobody's loss."""
        copy = entry.host
        if copy is None:
            return
        entry.host = None
        self.block_counts[Tier.HOST] -= 1
        copy.is_gone = True
        if not copy.is_transient:
            assert reason is not None
            was_evicted = reason in _MADE_ROOM
            now_s = self._context.now_s
            copy.size_class.host_policy.remove(copy.facts.block_hash, now_s=now_s, was_evicted=was_evicted)
        if reason is not None:
            self._context.counts.dropped[Tier.HOST, reason] += 1
        self._free_if_over(copy)
        self._report(entry)

    def drop_ssd(self, entry: BlockEntry, reason: DropReason) -> None:
        copy = entry.ssd
        if copy is None:
            return
        entry.ssd = None
        self.block_counts[Tier.SSD] -= 1
        copy.is_gone = True
        block_hash, now_s = copy.facts.block_hash, self._context.now_s
        copy.size_class.ssd_policy.remove(block_hash, now_s=now_s, was_evicted=reason in _MADE_ROOM)
        self._context.counts.dropped[Tier.SSD, reason] += 1
        if copy.reads == 0:
            self.free_ssd_slot(copy.size_class, copy.ssd_slot)
        self._report(entry)

    def drop(self, entry: BlockEntry, reason: DropReason) -> None:
        self.drop_host(entry, reason)
        self.drop_ssd(entry, reason)

    def clear(self, entry: BlockEntry, tier: Tier | None) -> None:
        if tier is None or tier is Tier.HOST:
            self.drop_host(entry, DropReason.CLEARED)
        if tier is None or tier is Tier.SSD:
            self.drop_ssd(entry, DropReason.CLEARED)

    def expire(self, ttl_s: float) -> None:
        """Drop blocks that were not used for so long. A pinned block is in use."""
        for _ in range(_EXPIRED_MAX):
            entry = next(iter(self._entries.values()), None)
            if (
                entry is None or entry.used_s + ttl_s > self._context.now_s
            ):  # the same sum as in `next_tick_s`
                return
            if (entry.host is not None and entry.host.pins) or (entry.ssd is not None and entry.ssd.reads):
                entry.used_s = self._context.now_s
                self._entries.move_to_end(entry.facts.block_hash)
            else:
                self.drop(entry, DropReason.EXPIRED)

    @property
    def oldest_use_s(self) -> float | None:
        entry = next(iter(self._entries.values()), None)
        return None if entry is None else entry.used_s

    # --- pins -----------------------------------------------------------------------------------

    def pin(self, copy: HostCopy) -> None:
        self.pinned_counts[Tier.HOST] += copy.pins == 0
        copy.pins += 1

    def unpin(self, copy: HostCopy) -> None:
        assert copy.pins > 0
        copy.pins -= 1
        if copy.pins == 0:
            self.pinned_counts[Tier.HOST] -= 1
            self.was_freed = True
            if copy.is_transient and not copy.is_gone:
                self.drop_host(self._entries[copy.facts.block_hash], None)
            else:
                self._free_if_over(copy)

    def read_begins(self, copy: SsdCopy) -> None:
        self.pinned_counts[Tier.SSD] += copy.reads == 0
        copy.reads += 1

    def read_ended(self, copy: SsdCopy) -> None:
        assert copy.reads > 0
        copy.reads -= 1
        self.pinned_counts[Tier.SSD] -= copy.reads == 0
        if copy.reads == 0 and copy.is_gone:
            self.free_ssd_slot(copy.size_class, copy.ssd_slot)

    # --- accounts -------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that copies have their slots, and that policies and directory know what is here."""
        for block_hash, entry in self._entries.items():
            assert entry.host is not None or entry.ssd is not None
            assert block_hash == entry.facts.block_hash
            if entry.host is not None:
                assert not entry.host.is_gone
                assert entry.host in entry.size_class.host_blocks
            assert entry.ssd is None or not entry.ssd.is_gone
        for size_class in self.size_classes.values():
            size_class.arena.check()
            size_class.ssd.check()
            slots = [copy.slot for copy in size_class.host_blocks]
            assert len(slots) == len(set(slots))
            assert size_class.arena.held_slots().issuperset(slots)
            assert all(copy.pins > 0 for copy in size_class.host_blocks if copy.is_gone)
        entries = self._entries.values()
        assert self.block_counts[Tier.HOST] == sum(1 for entry in entries if entry.host is not None)
        assert self.block_counts[Tier.SSD] == sum(1 for entry in entries if entry.ssd is not None)
        copies = [copy for size_class in self.size_classes.values() for copy in size_class.host_blocks]
        assert self.pinned_counts[Tier.HOST] == sum(1 for copy in copies if copy.pins)
        assert self.resident_bytes <= self._context.config.host_bytes
        held = sum(s.arena.held_count * s.slot_bytes for s in self.size_classes.values())
        assert sum(self.host_tenants.values()) == held
        assert sum(self.ssd_tenants.values()) == self.ssd_bytes

    # --- parts ----------------------------------------------------------------------------------

    def _entry(self, size_class: SizeClass, facts: BlockFacts) -> BlockEntry:
        entry = self._entries.get(facts.block_hash)
        if entry is None:
            entry = BlockEntry(size_class, facts, self._context.now_s)
            self._entries[facts.block_hash] = entry
        assert entry.size_class is size_class
        return entry

    def _report(self, entry: BlockEntry) -> None:
        block_hash = entry.facts.block_hash
        if entry.host is None and entry.ssd is None:
            del self._entries[block_hash]
        if entry.host is not None and not entry.host.is_transient:
            self._publisher.block_is(block_hash, Tier.HOST)
        else:
            self._publisher.block_is(block_hash, None if entry.ssd is None else Tier.SSD)

    def _free_if_over(self, copy: HostCopy) -> None:
        if copy.is_gone and copy.pins == 0:
            copy.size_class.host_blocks.remove(copy)
            self.free_slot(copy.size_class, copy.slot)


def _take_off(counter: Counter[str], key: str, amount: int) -> None:
    counter[key] -= amount
    if counter[key] == 0:
        del counter[key]
