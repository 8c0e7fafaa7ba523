"""Room in host memory: who gets a slot, and who leaves for it."""

from collections.abc import Callable
from typing import Protocol

from baton.core.ids import BlockHash
from baton.core.store import DropReason
from kv_store.node.context import Context
from kv_store.node.events import ForgetHost
from kv_store.node.index import Index
from kv_store.node.size_classes import HostCopy, SizeClass

FREE_SHARE = 0.02
"""The share of the host memory that is kept free or clean ahead of need, so that nothing waits for a
write."""


class TierFull(Exception):
    """Nothing can leave just now: all blocks are pinned, or are being written to SSD first. A later try may
    succeed."""


class OverQuota(TierFull):
    """The tenant has used up its quota, and none of its blocks can leave."""


class TierBelow(Protocol):
    def write_down(self, copy: HostCopy) -> bool:
        """Start to write the block first if it has earned that, and return whether it did. The block is
        pinned then, and leaves when the write is done."""
        ...

    @property
    def is_busy(self) -> bool:
        """The tier takes nothing just now that it should."""
        ...

    def is_writing_of(self, tenant: str) -> bool:
        """Whether blocks of this tenant cannot leave only because they are being written."""
        ...


class HostTier:
    """Gives out slots of host memory."""

    def __init__(self, context: Context, index: Index, below: TierBelow) -> None:
        self._context = context
        self._index = index
        self._below = below
        self._quota_bytes = int(context.config.host_bytes * context.config.tenant_share_max)

    def take_slot(self, size_class: SizeClass, tenant: str) -> int:
        """Take a slot for new content. Raises TierFull or OverQuota."""
        self._make_tenant_room(size_class, tenant)
        while not self._has_room(size_class):
            self._make_room(size_class)
        return self._index.hold_slot(size_class, tenant)

    def clean_ahead(self) -> None:
        """Begin to write blocks that leave soon and have earned a place on SSD, while there is room."""
        config = self._context.config
        free_bytes = config.host_bytes - sum(
            s.arena.held_count * s.slot_bytes for s in self._index.size_classes.values()
        )
        while free_bytes < FREE_SHARE * config.host_bytes and not self._below.is_busy:
            copy = self._next_to_leave(lambda _: True)
            if copy is None or not self._below.write_down(copy):
                return
            free_bytes += copy.size_class.slot_bytes

    # --- parts ----------------------------------------------------------------------------------

    def _has_room(self, size_class: SizeClass) -> bool:
        room_bytes = self._context.config.host_bytes - self._index.resident_bytes
        return size_class.arena.warm_count > 0 or room_bytes >= size_class.slot_bytes

    def _make_room(self, size_class: SizeClass) -> None:
        """Take one step towards room for a slot of this size class."""
        for other in self._index.size_classes.values():
            if other is not size_class and other.arena.warm_count:
                self._context.emit(ForgetHost(other.block_bytes, other.arena.forget_one()))
                return
        copy = self._next_to_leave(lambda _: True)
        if copy is None:
            raise TierFull("all of the host memory is in use")
        self._leave(copy, DropReason.EVICTED if copy.size_class is size_class else DropReason.REPLACED)

    def _make_tenant_room(self, size_class: SizeClass, tenant: str) -> None:
        if self._context.config.tenant_share_max >= 1:
            return
        while self._index.host_tenants[tenant] + size_class.slot_bytes > self._quota_bytes:
            copy = self._next_to_leave(lambda copy: copy.facts.tenant == tenant)
            if copy is None and self._below.is_writing_of(tenant):
                raise TierFull(f"blocks of tenant {tenant!r} are being written to SSD")
            if copy is None:
                raise OverQuota(f"tenant {tenant!r} fills its share of the host memory")
            self._leave(copy, DropReason.QUOTA)

    def _next_to_leave(self, may_go: Callable[[HostCopy], bool]) -> HostCopy | None:
        """Choose the next block to leave. Each size class names its own victim, and the one used longest ago
        leaves."""
        chosen: HostCopy | None = None
        oldest_s = float("inf")
        for size_class in self._index.size_classes.values():
            block_hash = size_class.host_policy.victim(self._can_leave(may_go))
            if block_hash is None:
                continue
            entry = self._index.get(block_hash, size_class)
            assert entry is not None
            assert entry.host is not None
            if entry.used_s < oldest_s:
                chosen, oldest_s = entry.host, entry.used_s
        return chosen

    def _can_leave(self, may_go: Callable[[HostCopy], bool]) -> Callable[[BlockHash], bool]:
        def can_leave(block_hash: BlockHash) -> bool:
            copy = self._index.host_copy(block_hash)
            return copy is not None and copy.pins == 0 and may_go(copy)

        return can_leave

    def _leave(self, copy: HostCopy, reason: DropReason) -> None:
        """Let a block leave, at once or after it was written to SSD."""
        if self._below.write_down(copy):
            return
        self._context.counts.ssd_skipped += self._below.is_busy
        entry = self._index.get(copy.facts.block_hash, copy.size_class)
        assert entry is not None
        assert entry.host is copy
        self._index.drop_host(entry, reason)
