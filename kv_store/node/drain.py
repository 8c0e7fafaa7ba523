"""A node that leaves hands its most valuable blocks to those that stay."""

from collections import deque

from baton.core.ids import BlockHash, NodeId
from baton.core.store import BlockLocation, NodeRef, TakeOver, Tier
from kv_store.node.context import HASHES_MAX, Context
from kv_store.node.events import ToPeer
from kv_store.node.index import Index
from kv_store.node.leases import Leases
from kv_store.node.lookups import Lookups
from kv_store.node.peers import FETCH_BLOCKS_MAX, PeerFetches
from kv_store.node.promotion import Promoter, PromotionRequest
from kv_store.node.quotas import Holder, Quotas
from kv_store.node.size_classes import BlockEntry, SizeClass

QUIET_S = 1.0
"""A draining node is done after this long without a lease."""
DRAIN_S = 60.0
"""The time after which a draining node is done in any case."""
NAME = "takeover"


class Drainer:
    """The leaving side: decides who should take what, and waits while they read."""

    def __init__(self, context: Context, index: Index, lookups: Lookups, leases: Leases) -> None:
        self._context = context
        self._index = index
        self._lookups = lookups
        self._leases = leases
        self._began_s: float | None = None
        self._has_offered = False

    @property
    def is_draining(self) -> bool:
        return self._began_s is not None

    @property
    def is_drained(self) -> bool:
        """Peers have read what they want, or had time enough."""
        if self._began_s is None:
            return False
        now_s = self._context.now_s
        if now_s >= self._began_s + DRAIN_S:
            return True
        if self._leases.count:
            return False
        return not self._has_offered or now_s >= max(self._began_s, self._leases.last_s) + QUIET_S

    def drain(self, budget_bytes: int) -> None:
        """Offer blocks of `budget_bytes` to the peers. Whole chains go to the same peer, so that they are
        found together."""
        if self._began_s is not None:
            return
        now_s = self._context.now_s
        self._began_s = now_s
        self._context.at(now_s + DRAIN_S, lambda: None)
        peers = sorted(self._lookups.peers.values(), key=lambda peer: peer.node_id)
        if not peers:
            return
        for (node_id, block_bytes), hashes in self._chosen(peers, budget_bytes).items():
            peer = self._lookups.peers[node_id]
            for first in range(0, len(hashes), HASHES_MAX):
                message = TakeOver(tuple(hashes[first : first + HASHES_MAX]))
                self._context.emit(ToPeer(block_bytes, peer, message))
                self._has_offered = True
        self._watch()

    def _chosen(self, peers: list[NodeRef], budget_bytes: int) -> dict[tuple[NodeId, int], list[BlockHash]]:
        """Choose blocks: those used often before those used once, late before early, a prefix before what
        follows it."""
        entries = [e for e in self._index if e.host is None or not e.host.is_transient]
        entries.sort(key=lambda e: (-min(e.use_count, 2), -e.used_s, e.facts.depth))
        chosen: dict[tuple[NodeId, int], list[BlockHash]] = {}
        for entry in entries:
            budget_bytes -= entry.size_class.block_bytes
            if budget_bytes < 0:
                break
            peer = peers[int.from_bytes(self._top(entry)[:8], "little") % len(peers)]
            key = (peer.node_id, entry.size_class.block_bytes)
            chosen.setdefault(key, []).append(entry.facts.block_hash)
        return chosen

    def _top(self, entry: BlockEntry) -> BlockHash:
        """The first block of the chain that is here, searched for over a bounded distance."""
        for _ in range(HASHES_MAX):
            parent = self._index.get(entry.facts.parent, entry.size_class)
            if parent is None or parent is entry:
                break
            entry = parent
        return entry.facts.block_hash

    def _watch(self) -> None:
        """Set a timer, so that somebody looks when `is_drained` may have come true."""
        if not self.is_drained:
            self._context.at(self._context.now_s + QUIET_S, self._watch)


class Takeovers:
    """The staying side: fetches what a leaving peer offers, a part at a time, at the rate of copies."""

    def __init__(
        self,
        context: Context,
        index: Index,
        quotas: Quotas,
        promoter: Promoter,
        lookups: Lookups,
        peers: PeerFetches,
    ) -> None:
        self._context = context
        self._index = index
        self._quotas = quotas
        self._promoter = promoter
        self._lookups = lookups
        self._peers = peers
        self._offered: deque[tuple[SizeClass, NodeRef, BlockHash]] = deque()
        self._demand: PromotionRequest | None = None
        self._holder: Holder | None = None
        self._is_over = False
        self._wakes_s: float | None = None

    @property
    def is_busy(self) -> bool:
        return self._demand is not None or bool(self._offered)

    def offered(self, size_class: SizeClass, peer: NodeRef, offer: TakeOver) -> None:
        room = 4 * HASHES_MAX - len(self._offered)
        for block_hash in offer.hashes[:room]:
            self._offered.append((size_class, peer, block_hash))

    def pump(self) -> None:
        while True:
            self._end_if_over()
            if self._demand is not None or not self._offered or not self._has_budget():
                return
            self._begin()

    # --- parts ----------------------------------------------------------------------------------

    def _has_budget(self) -> bool:
        size_class = self._offered[0][0]
        wait_s = self._peers.replication.ready_s(size_class.slot_bytes * FETCH_BLOCKS_MAX // 4)
        if wait_s is None:
            self._offered.clear()
            return False
        now_s = self._context.now_s
        if wait_s > 0 and (self._wakes_s is None or self._wakes_s <= now_s):
            self._wakes_s = now_s + wait_s
            self._context.at(self._wakes_s, lambda: None)
        return wait_s <= 0

    def _begin(self) -> None:
        size_class, peer, _ = self._offered[0]
        hashes: dict[BlockHash, None] = {}
        while self._offered and len(hashes) < FETCH_BLOCKS_MAX // 4:
            other_space, other_peer, block_hash = self._offered[0]
            if other_space is not size_class or other_peer.node_id != peer.node_id:
                break
            self._offered.popleft()
            entry = self._index.get(block_hash, size_class)
            is_new = entry is None and self._promoter.promotion(block_hash) is None
            if is_new and self._index.may_be_of(block_hash, size_class):
                hashes[block_hash] = None
                self._lookups.remember(block_hash, (BlockLocation(peer, Tier.HOST),))
                self._lookups.wanted(block_hash)
        if not hashes:
            return
        self._holder = self._quotas.join(NAME)
        self._is_over = False
        self._demand = PromotionRequest(
            size_class=size_class,
            hashes=tuple(hashes),
            holder=self._holder,
            deadline_s=self._context.now_s + self._context.config.load_timeout_s,
            report_ready=lambda request, first, copies, tiers: self._check_over(request),
            report_failed=lambda first, message: self._set_over(),
        )
        self._promoter.open(self._demand)

    def _check_over(self, request: PromotionRequest) -> None:
        if request.reported == len(request.hashes):
            self._set_over()

    def _set_over(self) -> None:
        self._is_over = True
        self._index.was_freed = True  # `pump` will end it soon

    def _end_if_over(self) -> None:
        if self._demand is not None and self._is_over:
            self._promoter.end(self._demand)
            self._demand = None
            assert self._holder is not None
            self._quotas.leave(self._holder)
            self._holder = None
