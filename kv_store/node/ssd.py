"""The SSD tier: what is read from it, what is written to it, and when it is left alone."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts, DropReason, Tier
from kv_store.node.context import Context
from kv_store.node.counts import PathMeter
from kv_store.node.events import ForgetSsd, IoDone, ReadSsd, Recovered, SizeClassOpened, WriteSsd
from kv_store.node.host_tier import HostTier, OverQuota, TierFull
from kv_store.node.index import Index
from kv_store.node.promotion import Promoter, Promotion
from kv_store.node.size_classes import BlockEntry, HostCopy, SizeClass

ERRORS_IN_A_ROW_MAX = 5
"""After so many errors in a row nothing is written for a while."""
OFF_S = 60.0
BACKLOG_MAX = 65_536
"""Blocks in the backlog, at most."""
FULL_SHARE = 0.9
FULL_PAUSE_S = 5.0
"""The pause after the device was found full."""
REGROW_S = 60.0
"""The time after which the tier tries to be as large as configured again."""


@dataclass(slots=True, eq=False)
class _SsdRead:
    promotion: Promotion
    slot: int
    started_s: float


@dataclass(slots=True, eq=False)
class _SsdWrite:
    copy: HostCopy
    ssd_slot: int
    started_s: float


class SsdTier:
    """The SSD tier. Reads go first, in the order of need. Writes wait in a bounded queue, each with its block
    pinned."""

    def __init__(self, context: Context, index: Index, promoter: Promoter) -> None:
        config = context.config
        self._context = context
        self._index = index
        self._promoter = promoter
        self._host: HostTier | None = None
        self.limit_bytes = config.ssd_bytes if config.ssd_dir else 0
        self._configured_bytes = self.limit_bytes
        self._quota_bytes = int(self.limit_bytes * config.tenant_share_max)
        self._reads: deque[Promotion] = deque()
        self._writes: deque[HostCopy] = deque()
        self._backlog: OrderedDict[BlockHash, SizeClass] = OrderedDict()
        """Blocks to write as soon as little else waits. If there are too many, the oldest are left out."""
        self._in_flight: dict[int, _SsdRead | _SsdWrite] = {}
        self._read_count = 0
        self._writes_max = config.ssd_threads * 8
        self._errors_in_a_row = 0
        self._paused_until_s = float("-inf")
        self.note = ""
        self.read_meter = PathMeter(second_per_byte=1e-9, latency_s=0.001)
        self.write_meter = PathMeter(second_per_byte=1e-9, latency_s=0.001)

    def connect(self, host: HostTier) -> None:
        self._host = host

    @property
    def is_on(self) -> bool:
        return self._configured_bytes > 0

    @property
    def is_busy(self) -> bool:
        """No block that leaves can be written first: they leave without."""
        return len(self._writes) >= self._writes_max

    def is_writing_of(self, tenant: str) -> bool:
        """Whether blocks of this tenant cannot leave only because they are being written."""
        return any(copy.facts.tenant == tenant for copy in self.write_pins())

    @property
    def io_count(self) -> int:
        return len(self._in_flight)

    @property
    def queued_count(self) -> int:
        return len(self._reads) + len(self._writes)

    def predict(self, size_class: SizeClass) -> tuple[float, float]:
        """Predict (seconds until the first block asked for now is begun, seconds per block)."""
        per_byte_s, latency_s = self.read_meter.at(self._context.now_s)
        block_s = per_byte_s * size_class.slot_bytes
        queued = len(self._reads) + self._read_count
        return queued * block_s + max(0.0, latency_s - block_s), block_s

    # --- the file -------------------------------------------------------------------------------

    def opened(self, size_class: SizeClass, event: SizeClassOpened) -> None:
        """Take in what the file holds. The deepest blocks come first, so that among equals a prefix stays
        longest."""
        if event.error:
            self.note = f"blocks of {size_class.block_bytes} bytes: {event.error}"
            return
        if size_class.is_ssd_open:
            return
        size_class.is_ssd_open = True
        for found in sorted(event.recovered, key=lambda r: (-r.facts.depth, r.ssd_slot)):
            if found.ssd_slot not in size_class.ssd.held and not self._adopt(size_class, found):
                self._context.emit(ForgetSsd(size_class.block_bytes, found.ssd_slot))

    def _adopt(self, size_class: SizeClass, found: Recovered) -> bool:
        facts = found.facts
        if not self._index.may_be_of(facts.block_hash, size_class):
            return False
        entry = self._index.get(facts.block_hash, size_class)
        if entry is not None and entry.ssd is not None:
            return False
        try:
            self._make_room(size_class, facts.tenant)
        except TierFull:
            return False
        if not self._index.adopt_ssd_slot(size_class, found.ssd_slot, facts.tenant):
            return False
        self._index.add_ssd(size_class, facts, found.ssd_slot)
        return True

    # --- writes ---------------------------------------------------------------------------------

    def write_down(self, copy: HostCopy, *, is_leaving: bool = True) -> bool:
        """Write the block if it has earned that and the queue has room. Returns whether it is being written
        now (again, or for the first time)."""
        block_hash = copy.facts.block_hash
        entry = self._index.get(block_hash, copy.size_class)
        size_class = copy.size_class
        if not self._can_write(size_class) or copy.is_transient or entry is None or entry.ssd is not None:
            return False
        if copy.is_writing:
            return False
        if not size_class.host_policy.earns_next(block_hash) and not self._has_room_to_spare(size_class):
            return False
        if len(self._writes) >= (self._writes_max if is_leaving else self._writes_max // 2):
            return False
        copy.is_writing, copy.is_leaving = True, is_leaving
        self._index.pin(copy)
        self._writes.append(copy)
        return True

    def came(self, copy: HostCopy) -> None:
        """Note a block that is new in host memory."""
        if self._has_room_to_spare(copy.size_class):
            self._remember(copy)

    def hit(self, entries: Sequence[BlockEntry]) -> None:
        """Note a use. Blocks that are used again are written ahead of their leaving, while little waits."""
        for entry in entries:
            if entry.host is None or entry.ssd is not None or self.write_down(entry.host, is_leaving=False):
                continue
            if not entry.host.is_writing:
                self._remember(entry.host)

    def _remember(self, copy: HostCopy) -> None:
        if not self._can_write(copy.size_class):
            return
        self._backlog[copy.facts.block_hash] = copy.size_class
        if len(self._backlog) > BACKLOG_MAX:
            self._backlog.popitem(last=False)

    def _has_room_to_spare(self, size_class: SizeClass) -> bool:
        """Whether every block is written: nothing has to leave for it, and what was used once may be found
        after a restart. A device that is nearly full takes blocks that have earned it by being used again."""
        return self._index.ssd_bytes + size_class.ssd_slot_bytes <= self.limit_bytes * FULL_SHARE

    def _write_backlog(self) -> None:
        while self._backlog and len(self._writes) < self._writes_max // 2:
            block_hash, size_class = self._backlog.popitem(last=False)
            entry = self._index.get(block_hash, size_class)
            if entry is not None and entry.host is not None and entry.ssd is None:
                self.write_down(entry.host, is_leaving=False)

    def _can_write(self, size_class: SizeClass) -> bool:
        return size_class.is_ssd_open and self._context.now_s >= self._paused_until_s

    def _start_write(self, copy: HostCopy) -> None:
        size_class, facts = copy.size_class, copy.facts
        entry = self._index.get(facts.block_hash, size_class)
        if copy.is_gone or entry is None or entry.ssd is not None or not self._can_write(size_class):
            return self._end_write(copy)
        try:
            self._make_room(size_class, facts.tenant)
        except TierFull:
            return self._end_write(copy)
        ssd_slot = self._index.hold_ssd_slot(size_class, facts.tenant)
        if ssd_slot is None:
            return self._end_write(copy)
        op_id = self._context.new_id()
        self._in_flight[op_id] = _SsdWrite(copy, ssd_slot, self._context.now_s)
        self._context.emit(WriteSsd(op_id, size_class.block_bytes, ssd_slot, copy.slot, facts, copy.checksum))
        return None

    def _end_write(self, copy: HostCopy) -> None:
        """End a write's pin. The block leaves, unless somebody used it meanwhile."""
        copy.is_writing = False
        self._index.unpin(copy)
        if copy.is_leaving and copy.pins == 0 and not copy.is_gone:
            entry = self._index.get(copy.facts.block_hash, copy.size_class)
            assert entry is not None
            self._index.drop_host(entry, DropReason.EVICTED)
        copy.is_leaving = False

    def _write_done(self, write: _SsdWrite, done: IoDone) -> None:
        copy = write.copy
        size_class, facts = copy.size_class, copy.facts
        if done.error or done.is_full or copy.is_gone:
            self._index.free_ssd_slot(size_class, write.ssd_slot)
            self._write_failed(done)
        else:
            self._errors_in_a_row, self.note = 0, ""
            self._index.add_ssd(size_class, facts, write.ssd_slot)
            byte_count = size_class.ssd_slot_bytes
            self.write_meter.done(
                byte_count, block_count=1, started_s=write.started_s, now_s=self._context.now_s
            )
        self._end_write(copy)

    def _write_failed(self, done: IoDone) -> None:
        now_s = self._context.now_s
        if done.is_full:
            self._context.counts.ssd_full += 1
            self.limit_bytes = min(self.limit_bytes, self._index.ssd_bytes)
            self._paused_until_s = now_s + FULL_PAUSE_S
            self.note = "no space left on the device of the SSD tier"
            self._context.at(now_s + REGROW_S, self._regrow)
        elif done.error:
            self._context.counts.ssd_write_errors += 1
            self._count_error(done.error)

    def _regrow(self) -> None:
        self.limit_bytes = self._configured_bytes

    def _count_error(self, message: str) -> None:
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= ERRORS_IN_A_ROW_MAX:
            self._paused_until_s = self._context.now_s + OFF_S
            self.note = f"nothing is written to SSD for {OFF_S:g} s after repeated errors: {message}"

    # --- room -----------------------------------------------------------------------------------

    def _make_room(self, size_class: SizeClass, tenant: str) -> None:
        """Make room for one more block. Raises TierFull."""
        if self._context.config.tenant_share_max < 1:
            while self._index.ssd_tenants[tenant] + size_class.ssd_slot_bytes > self._quota_bytes:
                self._evict(size_class, DropReason.QUOTA, tenant)
        while self._index.ssd_bytes + size_class.ssd_slot_bytes > self.limit_bytes:
            self._evict(size_class, DropReason.EVICTED, None)

    def _evict(self, size_class: SizeClass, reason: DropReason, tenant: str | None) -> None:
        chosen: BlockEntry | None = None
        for other in self._index.size_classes.values():
            entry = self._victim(other, tenant)
            if entry is not None and (chosen is None or entry.used_s < chosen.used_s):
                chosen = entry
        if chosen is None:
            raise TierFull("all of the SSD tier is in use")
        if reason is DropReason.EVICTED and chosen.size_class is not size_class:
            reason = DropReason.REPLACED
        self._index.drop_ssd(chosen, reason)

    def _victim(self, size_class: SizeClass, tenant: str | None) -> BlockEntry | None:
        def may_go(block_hash: BlockHash) -> bool:
            entry = self._index.get(block_hash, size_class)
            if entry is None or entry.ssd is None or entry.ssd.reads:
                return False
            return tenant is None or entry.ssd.facts.tenant == tenant

        block_hash = size_class.ssd_policy.victim(may_go)
        return None if block_hash is None else self._index.get(block_hash, size_class)

    # --- reads ----------------------------------------------------------------------------------

    def request(self, promotions: Sequence[Promotion]) -> None:
        for promotion in promotions:
            assert promotion.source is not None
            self._index.read_begins(promotion.source)
            self._reads.append(promotion)

    def cancel(self, promotion: Promotion) -> None:
        """Call a promotion off. One that waits in the queue is skipped when its turn comes, unless somebody
        joins it until then. A read under way that was too slow for everybody is worth nothing: the block is
        dropped."""
        if promotion.is_reading and promotion.is_late:
            assert promotion.source is not None
            self._promoter.forget(promotion)
            entry = self._index.get(promotion.block_hash, promotion.size_class)
            if entry is not None and entry.ssd is promotion.source:
                self._index.drop_ssd(entry, DropReason.IO_ERROR)

    def pump(self) -> None:
        """Begin what may begin."""
        threads = self._context.config.ssd_threads
        while self._reads and self._read_count < threads * 2:
            promotion = self._reads[0]
            if promotion.waiters and not self._start_read(promotion):
                break
            self._reads.popleft()
            if not promotion.is_reading:
                self._skip(promotion)
        write_count = len(self._in_flight) - self._read_count
        self._write_backlog()
        while self._writes and write_count < threads:
            copy = self._writes.popleft()
            before = len(self._in_flight)
            self._start_write(copy)
            write_count += len(self._in_flight) - before
            self._write_backlog()

    def _start_read(self, promotion: Promotion) -> bool:
        """Start a read. False means that there is no slot just now."""
        source = promotion.source
        assert source is not None
        if source.is_gone:
            self._promoter.failed(promotion, "it left the SSD tier")
            return True
        assert self._host is not None
        try:
            slot = self._host.take_slot(promotion.size_class, source.facts.tenant)
        except OverQuota as e:
            self._promoter.failed(promotion, str(e))
            return True
        except TierFull:
            return False
        op_id = self._context.new_id()
        promotion.is_reading = True
        self._read_count += 1
        self._in_flight[op_id] = _SsdRead(promotion, slot, self._context.now_s)
        block_bytes = promotion.size_class.block_bytes
        self._context.emit(ReadSsd(op_id, block_bytes, source.ssd_slot, slot, promotion.block_hash))
        return True

    def _skip(self, promotion: Promotion) -> None:
        self._promoter.forget(promotion)
        assert promotion.source is not None
        self._index.read_ended(promotion.source)

    def _read_done(self, read: _SsdRead, done: IoDone) -> None:
        promotion, source = read.promotion, read.promotion.source
        assert source is not None
        self._read_count -= 1
        entry = self._index.get(promotion.block_hash, promotion.size_class)
        is_ours = entry is not None and entry.ssd is source
        if done.error or done.is_corrupt:
            self._count_bad_read(done)
            if entry is not None and is_ours:
                self._index.drop_ssd(entry, DropReason.CORRUPT if done.is_corrupt else DropReason.IO_ERROR)
        else:
            slot_bytes, now_s = promotion.size_class.slot_bytes, self._context.now_s
            self.read_meter.done(slot_bytes, block_count=1, started_s=read.started_s, now_s=now_s)
        if done.error or done.is_corrupt or not is_ours:
            self._index.free_slot(promotion.size_class, read.slot)
            self._promoter.failed(promotion, done.error or "the block was dropped while it was read")
        else:
            assert entry is not None
            self._arrive(promotion, entry, source.facts, read.slot, done.checksum)
        self._index.read_ended(source)

    def _arrive(
        self, promotion: Promotion, entry: BlockEntry, facts: BlockFacts, slot: int, checksum: int
    ) -> None:
        """Take in a block that was read. A worker may have written the same block in the meantime. The slot
        is held for the tenant of `facts`, which need not be the one who had the block first."""
        if entry.host is not None:
            self._index.free_slot(promotion.size_class, slot)
            copy = entry.host
        else:
            copy = self._index.add_host(promotion.size_class, facts, slot, checksum)
        self._promoter.arrived(promotion, copy)

    def _count_bad_read(self, done: IoDone) -> None:
        if done.is_corrupt:
            self._context.counts.corrupt[Tier.SSD] += 1
        else:
            self._context.counts.ssd_read_errors += 1
            self._count_error(done.error)

    def io_done(self, done: IoDone) -> None:
        """Take in the end of an operation. One that we did not start is ignored."""
        operation = self._in_flight.pop(done.op_id, None)
        if isinstance(operation, _SsdRead):
            self._read_done(operation, done)
        elif operation is not None:
            self._write_done(operation, done)

    def write_pins(self) -> list[HostCopy]:
        in_flight = [op.copy for op in self._in_flight.values() if isinstance(op, _SsdWrite)]
        return [*self._writes, *in_flight]

    def read_slots(self) -> list[tuple[SizeClass, int]]:
        reads = [op for op in self._in_flight.values() if isinstance(op, _SsdRead)]
        return [(read.promotion.size_class, read.slot) for read in reads]

    def check(self) -> None:
        reads = sum(1 for op in self._in_flight.values() if isinstance(op, _SsdRead))
        assert reads == self._read_count <= self._context.config.ssd_threads * 2
        assert len(self._in_flight) - reads <= self._context.config.ssd_threads
        assert len(self._writes) <= self._writes_max
        assert all(copy.is_writing and copy.pins > 0 for copy in self.write_pins())
        assert self._index.ssd_bytes <= self._configured_bytes
