"""Blocks are fetched from the store nodes of other hosts."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockHash, NodeId, ReadId, WorkerId
from baton.core.store import (
    BlockLocation,
    BlocksGrant,
    BlocksRefused,
    BlocksReleased,
    BlocksRequest,
    NodeRef,
    Tier,
)
from kv_store.node.context import Context
from kv_store.node.counts import PathMeter
from kv_store.node.events import ToPeer
from kv_store.node.fetches import Fetch, GrantedBlock, PeerRead
from kv_store.node.host_tier import HostTier, OverQuota, TierFull
from kv_store.node.index import Index
from kv_store.node.lookups import Lookups
from kv_store.node.promotion import NO_HOLDER, Promoter, Promotion
from kv_store.node.replication import Replication
from kv_store.node.size_classes import SizeClass
from kv_transfer.lease import ReaderLease
from kv_transfer.read import BlockRead, ReadDone
from kv_transfer.session import BadGrant, OpenReads

FETCHES_MAX = 64
FETCH_BLOCKS_MAX = 128
READS_MAX = 8
READ_BYTES_MAX = 64 * 2**20
"""Bytes of one read, so that what it fetched is reported early."""
STUCK_SHARE_MAX = 0.125
"""The share of the host memory that reads which have not settled may keep aside before nothing is fetched any
more."""
AVOID_S = 10.0
"""A holder that failed us is avoided for this long, unless nobody else has the block."""


@dataclass(slots=True, eq=False)
class _PeerState:
    meter: PathMeter
    avoid_until_s: float = float("-inf")
    fetch_count: int = 0


class PeerFetches:
    """Fetches blocks of peers. A promotion waits until a holder is known and a fetch may begin; a holder that
    fails is left for another."""

    def __init__(
        self, context: Context, index: Index, promoter: Promoter, lookups: Lookups, host: HostTier
    ) -> None:
        self._context = context
        self._index = index
        self._promoter = promoter
        self._lookups = lookups
        self._host = host
        self.replication = Replication(context)
        self._pending: deque[Promotion] = deque()
        self._fetches: dict[int, Fetch] = {}
        self._fetch_of: dict[Promotion, Fetch] = {}
        """The fetch of each promotion, unless it is over."""
        self._reads: OpenReads[Fetch, list[GrantedBlock]] = OpenReads()
        self._peers: dict[NodeId, _PeerState] = {}
        self._stuck_bytes: Counter[NodeId] = Counter()
        """Bytes of slots that reads of a peer keep aside, as bytes may yet land there."""
        self.meter = PathMeter(second_per_byte=1e-9, latency_s=0.005)

    @property
    def fetch_count(self) -> int:
        return len(self._fetches)

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    def read_slots(self) -> list[tuple[SizeClass, int]]:
        return [(read.session.size_class, slot) for read in self._reads for slot in read.quarantined]

    def predict(self, size_class: SizeClass) -> tuple[float, float]:
        """Predict (seconds until the first block asked for now is begun, seconds per block)."""
        per_byte_s, latency_s = self.meter.at(self._context.now_s)
        block_s = per_byte_s * size_class.slot_bytes
        unread = sum(
            fetch.wanted_end - fetch.granted_end + len(fetch.queue) for fetch in self._fetches.values()
        )
        reading = self._reads.quarantined_count
        queued = len(self._pending) + unread + reading
        return queued * block_s + max(0.0, latency_s - block_s), block_s

    def has_holder(self, block_hash: BlockHash) -> bool:
        """Whether somebody has the block who has not failed us just now."""
        return any(
            self._is_usable(location) and self._is_trusted(location)
            for location in self._lookups.holders(block_hash)
        )

    # --- as a path into host memory -------------------------------------------------------------

    def request(self, promotions: Sequence[Promotion]) -> None:
        unknown: list[Promotion] = []
        for promotion in promotions:
            promotion.locations = self._lookups.holders(promotion.block_hash)
            (self._pending if promotion.locations else unknown).append(promotion)
        if not unknown:
            return
        hashes = [promotion.block_hash for promotion in unknown]
        if not self._lookups.look_up(hashes, lambda: self._looked_up(unknown)):
            self._looked_up(unknown)

    def cancel(self, promotion: Promotion) -> None:
        """Call a promotion off. A pending one is skipped when its turn comes; one that is being read arrives,
        for whoever is next."""
        if promotion.is_reading:
            return
        self._promoter.forget(promotion)
        fetch = self._fetch_of.get(promotion)
        if fetch is not None and not fetch.is_waited_for:
            if promotion.is_late and not fetch.lease.is_granted:
                self._avoid(fetch.peer.node_id)
            if not self._is_reading(fetch):
                self._over(fetch)

    def _looked_up(self, promotions: list[Promotion]) -> None:
        for promotion in promotions:
            promotion.locations = self._lookups.holders(promotion.block_hash)
            if not promotion.waiters:
                self._promoter.forget(promotion)
            elif promotion.locations:
                self._pending.append(promotion)
            else:
                self._promoter.failed(promotion, NO_HOLDER)

    # --- peers ----------------------------------------------------------------------------------

    def peers_changed(self, peers: Sequence[NodeRef]) -> None:
        self._lookups.peers_are(peers)
        used = {fetch.peer.node_id for fetch in self._fetches.values()}
        known = self._lookups.peers.keys() | used
        self._peers = {node_id: peer for node_id, peer in self._peers.items() if node_id in known}

    def peer_lost(self, size_class: int, node_id: NodeId, message: str) -> None:
        """Note that a peer's session is gone. Reads under way end by themselves."""
        lost = [
            fetch
            for fetch in self._fetches.values()
            if fetch.peer.node_id == node_id and fetch.size_class.block_bytes == size_class
        ]
        for fetch in lost:
            fetch.owner_lost()
        for fetch in lost:
            self._fail(fetch, f"{node_id}: {message}")

    def granted(self, node_id: NodeId, grant: BlocksGrant) -> None:
        fetch = self._fetch_from(node_id, grant.fetch_id)
        if fetch is None:
            return
        renew_s = fetch.lease.renew_s
        try:
            fetch.take_in(grant)
        except BadGrant as error:
            self._fail(fetch, f"{node_id} answers with {error}")
            return
        if fetch.lease.renew_s < renew_s:  # its leases are shorter than ours
            self._context.at(fetch.lease.renew_s, lambda: self._renew(fetch))
        self._over_if_done(fetch)

    def refused(self, node_id: NodeId, refusal: BlocksRefused) -> None:
        """Take a peer's refusal. It is no fault of the peer's: it does not have the blocks any more, or has
        no room."""
        fetch, first = self._fetch_from(node_id, refusal.fetch_id), refusal.first_block
        if fetch is None or not fetch.granted_end <= first < fetch.wanted_end:
            return
        gone = fetch.promotions[first : fetch.wanted_end]
        fetch.wanted_end = first
        for promotion in gone:
            del self._fetch_of[promotion]
        for promotion in gone:
            self._try_elsewhere(promotion, node_id, refusal.message)
        self._over_if_done(fetch)

    # --- fetches --------------------------------------------------------------------------------

    def pump(self) -> None:
        """Begin what may begin."""
        while self._pending and self._open_count() < FETCHES_MAX:
            promotion = self._pending.popleft()
            if not promotion.waiters:
                self._promoter.forget(promotion)
                continue
            holder = self._choose(promotion)
            if holder is None:
                self._promoter.failed(promotion, NO_HOLDER)
            else:
                self._begin(holder.node, [promotion, *self._also_from(holder.node, promotion)])
        for fetch in list(self._fetches.values()):
            while fetch.queue and not fetch.is_over and self._reading_count() < READS_MAX:
                if not self._read_next(fetch):
                    break

    def _begin(self, peer: NodeRef, promotions: list[Promotion]) -> None:
        deadline_s = max(promotion.deadline_s for promotion in promotions)
        fetch = Fetch(
            lease=ReaderLease(lease_s=self._context.config.lease_s, patience_end_s=deadline_s),
            block_count=len(promotions),
            fetch_id=self._context.new_id(),
            size_class=promotions[0].size_class,
            peer=peer,
            promotions=promotions,
            first_deadline_s=deadline_s,
        )
        self._fetches[fetch.fetch_id] = fetch
        self._fetch_of.update(dict.fromkeys(promotions, fetch))
        self._peer(peer.node_id).fetch_count += 1
        self._request(fetch)

    def _request(self, fetch: Fetch) -> None:
        """Request the blocks, or renew the lease."""
        now_s = self._context.now_s
        number = fetch.lease.request(now_s=now_s)
        hashes = tuple(promotion.block_hash for promotion in fetch.promotions)
        time_left_s = max(0.001, fetch.deadline_s - now_s)
        message = BlocksRequest(fetch.fetch_id, hashes, time_left_s, number)
        self._context.emit(ToPeer(fetch.size_class.block_bytes, fetch.peer, message))
        self._context.at(fetch.lease.renew_s, lambda: self._renew(fetch))

    def _renew(self, fetch: Fetch) -> None:
        now_s = self._context.now_s
        if fetch.is_over or now_s < fetch.lease.renew_s:
            return
        fetch.lease.wait_until(fetch.deadline_s)
        if now_s >= fetch.deadline_s:
            self._fail(fetch, f"{fetch.peer.node_id} was too slow")
        elif now_s >= fetch.lease.end_s:
            self._fail(fetch, f"the lease of {fetch.peer.node_id} is over")
        else:
            self._request(fetch)

    def _read_next(self, fetch: Fetch) -> bool:
        """Start a read. False means that there is no slot just now."""
        now_s = self._context.now_s
        left_s = min(fetch.lease.end_s, now_s + self._context.config.load_timeout_s) - now_s
        if left_s <= 0:
            self._fail(fetch, f"the lease of {fetch.peer.node_id} is over")
            return True
        blocks, slots, refused = self._take_slots(fetch)
        if slots:
            self._start_read(fetch, blocks, slots, left_s)
        for promotion, reason in refused:  # now that the fetch has its read, and is not over by these
            self._promoter.failed(promotion, reason)
        self._over_if_done(fetch)
        return bool(slots or refused)

    def _start_read(self, fetch: Fetch, blocks: list[GrantedBlock], slots: list[int], left_s: float) -> None:
        read = BlockRead(
            read_id=ReadId(self._context.new_id()),
            owner=WorkerId(fetch.peer.node_id),
            source_blocks=tuple(block.slot for block in blocks),
            local_blocks=tuple(slots),
            generations=tuple(block.generation for block in blocks),
            timeout_s=left_s,
            block_bytes=fetch.size_class.block_bytes,
            checksums=tuple(block.checksum for block in blocks),
        )
        opened = self._reads.start(read, fetch, blocks, now_s=self._context.now_s)
        opened.quarantined = slots
        for block in blocks:
            block.promotion.is_reading = True
        self._context.emit(read)

    def _take_slots(self, fetch: Fetch) -> tuple[list[GrantedBlock], list[int], list[tuple[Promotion, str]]]:
        """Take slots, and return (what to read, where to, what may have no slot). Blocks that nobody waits
        for are left out."""
        blocks: list[GrantedBlock] = []
        slots: list[int] = []
        refused: list[tuple[Promotion, str]] = []
        most = max(1, READ_BYTES_MAX // fetch.size_class.slot_bytes)
        while fetch.queue and len(slots) < most:
            block = fetch.queue.popleft()
            if not block.promotion.waiters:
                continue
            try:
                slots.append(self._host.take_slot(fetch.size_class, block.facts.tenant))
            except OverQuota as e:
                refused.append((block.promotion, str(e)))
            except TierFull:
                fetch.queue.appendleft(block)
                break
            else:
                blocks.append(block)
        return blocks, slots, refused

    # --- reads ----------------------------------------------------------------------------------

    def read_done(self, done: ReadDone) -> None:
        now_s = self._context.now_s
        ended = self._reads.done(done, now_s=now_s)
        if ended is None:
            return
        read, verdict = ended
        fetch, peer = read.session, read.session.peer.node_id
        if verdict.fault:
            # The peer is left for another holder, which is likelier to answer than the same one again.
            for block in read.part:
                block.promotion.is_reading = False
                self._try_elsewhere(block.promotion, peer, verdict.fault)
            self._fail(fetch, f"{peer}: {verdict.fault}")
        else:
            self._measure(read)
            self._accept(read, set(done.corrupt))
            self._over_if_done(fetch)
        self._stuck_bytes[peer] += len(read.quarantined) * fetch.size_class.slot_bytes
        if done.is_settled:
            self.read_settled(done.read_id)

    def read_settled(self, read_id: ReadId) -> None:
        """Free the slots that were set aside: nothing can land any more."""
        read = self._reads.settled(read_id)
        if read is None:
            return
        fetch, peer = read.session, read.session.peer.node_id
        self._stuck_bytes[peer] -= len(read.quarantined) * fetch.size_class.slot_bytes
        if not self._stuck_bytes[peer]:
            del self._stuck_bytes[peer]  # nodes come and go
        for slot in read.quarantined:
            self._index.free_slot(fetch.size_class, slot)
        self._close_if_settled(fetch)

    def _accept(self, read: PeerRead, corrupt: set[int]) -> None:
        """Take in a good read. The slots of good blocks become theirs; the others stay with the read, to be
        freed with it."""
        left: list[int] = []
        for i, (block, slot) in enumerate(zip(read.part, read.quarantined, strict=True)):
            block.promotion.is_reading = False
            if i in corrupt:
                self._context.counts.corrupt[Tier.PEER] += 1
                read.session.corrupt.append(block.promotion.block_hash)
                self._try_elsewhere(block.promotion, read.session.peer.node_id, "its checksum did not hold")
                left.append(slot)
            elif not self._arrive(block, slot):
                left.append(slot)
        read.quarantined = left

    def _arrive(self, block: GrantedBlock, slot: int) -> bool:
        """Take in a block, and return whether the slot is its own from now on."""
        promotion = block.promotion
        size_class, counts = promotion.size_class, self._context.counts
        counts.fetched_bytes += size_class.block_bytes
        here = self._index.host_copy(promotion.block_hash)
        if not self._index.may_be_of(promotion.block_hash, size_class):
            self._promoter.failed(promotion, "a block of another size has this hash")
            return False
        if here is not None:
            self._promoter.arrived(promotion, here)
            return False
        seen = self._lookups.times_seen(promotion.block_hash)
        is_kept = self.replication.may_keep(size_class.slot_bytes, times_seen=seen)
        if not is_kept and not promotion.waiters:
            self._promoter.forget(promotion)
            return False
        counts.replicated_bytes += size_class.block_bytes * is_kept
        copy = self._index.add_host(size_class, block.facts, slot, block.checksum, is_transient=not is_kept)
        self._promoter.arrived(promotion, copy)
        return True

    def _measure(self, read: PeerRead) -> None:
        byte_count = read.read.byte_count
        now_s = self._context.now_s
        for meter in (self.meter, self._peer(read.session.peer.node_id).meter):
            meter.done(byte_count, block_count=len(read.part), started_s=read.started_s, now_s=now_s)

    # --- ends -----------------------------------------------------------------------------------

    def _fail(self, fetch: Fetch, reason: str) -> None:
        """End a fetch by the peer's fault: the peer is avoided for a while."""
        if fetch.is_over:
            return
        self._context.counts.fetches_failed += 1
        self._avoid(fetch.peer.node_id)
        unread = [
            *(block.promotion for block in fetch.queue),
            *fetch.promotions[fetch.granted_end : fetch.wanted_end],
        ]
        self._over(fetch)
        for promotion in unread:
            self._try_elsewhere(promotion, fetch.peer.node_id, reason)

    def _try_elsewhere(self, promotion: Promotion, node_id: NodeId, reason: str) -> None:
        """Fetch from another holder. This one does not count any more for this block."""
        self._lookups.forget_holder(promotion.block_hash, node_id)
        promotion.locations = tuple(h for h in promotion.locations if h.node.node_id != node_id)
        if promotion.waiters and promotion.locations and self._context.now_s < promotion.deadline_s:
            self._pending.append(promotion)
        else:
            self._promoter.failed(promotion, reason)

    def _over_if_done(self, fetch: Fetch) -> None:
        is_read = not fetch.queue and fetch.granted_end >= fetch.wanted_end and not self._is_reading(fetch)
        if not fetch.is_over and (is_read or not (fetch.is_waited_for or self._is_reading(fetch))):
            self._over(fetch)

    def _is_reading(self, fetch: Fetch) -> bool:
        return any(not read.is_done for read in self._reads.of(fetch))

    def _over(self, fetch: Fetch) -> None:
        fetch.end(tell_owner=True)
        for promotion in fetch.promotions:
            if self._fetch_of.get(promotion) is fetch:
                del self._fetch_of[promotion]
        fetch.queue.clear()
        fetch.wanted_end = min(fetch.wanted_end, fetch.granted_end)
        self._close_if_settled(fetch)

    def _close_if_settled(self, fetch: Fetch) -> None:
        """Release the peer's blocks when nothing of ours can read them any more."""
        if not fetch.is_over or fetch.reads_open or self._fetches.pop(fetch.fetch_id, None) is None:
            return
        self._peer(fetch.peer.node_id).fetch_count -= 1
        if fetch.take_release():
            message = BlocksReleased(fetch.fetch_id, tuple(fetch.corrupt))
            self._context.emit(ToPeer(fetch.size_class.block_bytes, fetch.peer, message))

    # --- parts ----------------------------------------------------------------------------------

    def _peer(self, node_id: NodeId) -> _PeerState:
        return self._peers.setdefault(node_id, _PeerState(PathMeter(second_per_byte=1e-9, latency_s=0.005)))

    def _fetch_from(self, node_id: NodeId, fetch_id: int) -> Fetch | None:
        fetch = self._fetches.get(fetch_id)
        return fetch if fetch is not None and fetch.peer.node_id == node_id and not fetch.is_over else None

    def _avoid(self, node_id: NodeId) -> None:
        self._peer(node_id).avoid_until_s = self._context.now_s + AVOID_S

    def _is_trusted(self, location: BlockLocation) -> bool:
        peer = self._peers.get(location.node.node_id)
        return peer is None or self._context.now_s >= peer.avoid_until_s

    def _is_usable(self, location: BlockLocation) -> bool:
        """Whether to fetch from the holder. A frozen peer gets no more slots of ours than it has already."""
        if self._stuck_bytes[location.node.node_id] > 0:
            return False
        return self._stuck_bytes.total() <= STUCK_SHARE_MAX * self._context.config.host_bytes

    def _choose(self, promotion: Promotion) -> BlockLocation | None:
        """Choose a holder: host memory before SSD, then the one with least under way, then the fastest."""

        def cost(location: BlockLocation) -> tuple[bool, bool, int, float, str]:
            peer = self._peer(location.node.node_id)
            is_slow = location.tier is not Tier.HOST
            per_byte_s, _ = peer.meter.at(self._context.now_s)
            return (
                not self._is_trusted(location),
                is_slow,
                peer.fetch_count,
                per_byte_s,
                location.node.node_id,
            )

        return min((h for h in promotion.locations if self._is_usable(h)), key=cost, default=None)

    def _also_from(self, node: NodeRef, first: Promotion) -> list[Promotion]:
        """The blocks that follow in the queue, as long as this peer has them too."""
        promotions: list[Promotion] = []
        while self._pending and len(promotions) < FETCH_BLOCKS_MAX - 1:
            promotion = self._pending[0]
            is_there = any(h.node.node_id == node.node_id for h in promotion.locations)
            if promotion.size_class is not first.size_class or not is_there:
                break
            self._pending.popleft()
            if promotion.waiters:
                promotions.append(promotion)
            else:
                self._promoter.forget(promotion)
        return promotions

    def _open_count(self) -> int:
        return sum(1 for fetch in self._fetches.values() if not fetch.is_over)

    def _reading_count(self) -> int:
        return self._reads.in_flight_count

    def check(self) -> None:
        self._reads.check()
        reading = {read.session.fetch_id for read in self._reads}
        assert reading <= self._fetches.keys()
        for fetch in self._fetches.values():
            assert bool(fetch.reads_open) == (fetch.fetch_id in reading)
            assert not fetch.is_over or fetch.reads_open
            assert fetch.wanted_end <= len(fetch.promotions)
        assert self._open_count() <= FETCHES_MAX
        assert self._stuck_bytes.total() == sum(
            len(read.quarantined) * read.session.size_class.slot_bytes for read in self._reads if read.is_done
        )
        assert self._reading_count() <= READS_MAX
