"""Blocks are promoted into host memory and pinned there, for whoever asked."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.ids import BlockHash
from baton.core.store import BlockLocation, DropReason, Tier
from kv_store.node.context import LOADS_WAITING_MAX, Context
from kv_store.node.index import Index
from kv_store.node.quotas import Holder, Quotas
from kv_store.node.size_classes import HostCopy, SizeClass, SsdCopy

LATE = "not there in time"
NOT_HERE = "it is not here"
OVER_QUOTA = "more than one may hold of the host memory"
CROWDED = "too many loads wait for room"
NO_HOLDER = "no peer has it"
REASONS = frozenset({LATE, NOT_HERE, OVER_QUOTA, CROWDED, NO_HOLDER})
"""Why a request fails, where this node itself gives the reason: these are counted apart."""


@dataclass(slots=True, eq=False)
class PromotionRequest:
    """A request for these blocks, in this order, in host memory, pinned until `Promoter.end`."""

    size_class: SizeClass
    hashes: tuple[BlockHash, ...]
    holder: Holder
    deadline_s: float
    report_ready: "Callable[[PromotionRequest, int, list[HostCopy], list[Tier]], None]"
    """The callback for blocks first, first + 1, …, with their copies and the tier that each came from."""
    report_failed: Callable[[int, str], None]
    """The callback for blocks from here on that will not come. It is called last, after all that is ready was
    reported."""
    may_fetch: bool = True
    """Whether blocks may be fetched from peers."""
    is_admitted: bool = False
    is_over: bool = False
    """All was reported; pins stay until the end."""
    is_ended: bool = False
    end: int = field(init=False)
    """Blocks from here on will not come."""
    reason: str = ""
    reported: int = 0
    """Blocks before this were reported ready."""
    copies: list[HostCopy | None] = field(init=False)
    tiers: list[Tier] = field(init=False)

    def __post_init__(self) -> None:
        self.end = len(self.hashes)
        self.copies = [None] * self.end
        self.tiers = [Tier.HOST] * self.end


@dataclass(slots=True, eq=False)
class Promotion:
    """A block on its way into host memory. All requests that want it wait for the same promotion."""

    size_class: SizeClass
    block_hash: BlockHash
    tier: Tier
    waiters: dict[PromotionRequest, int] = field(default_factory=dict[PromotionRequest, int])
    """The position of the block in each request that waits."""
    source: SsdCopy | None = None
    """SSD: the copy that is read."""
    is_requested: bool = False
    """Its source knows of it."""
    is_reading: bool = False
    is_late: bool = False
    """It was being read when the last deadline passed: what arrives is not used."""
    locations: tuple[BlockLocation, ...] = ()
    """PEER: locations whose node has not failed us."""

    @property
    def deadline_s(self) -> float:
        return max((request.deadline_s for request in self.waiters), default=float("-inf"))


class PromotionSource(Protocol):
    """A path into host memory."""

    def request(self, promotions: Sequence[Promotion]) -> None:
        """Start promotions. Each ends by `Promoter.arrived` or `Promoter.failed`, once."""
        ...

    def cancel(self, promotion: Promotion) -> None:
        """Call a promotion off, as nobody waits any more. One that has not begun need not begin: then
        `Promoter.forget` ends it."""
        ...


class Promoter:
    """Serves requests for blocks. A request waits until its holder's quota has room for all of it. Then each
    block comes by its fastest path, and blocks are reported as their prefix grows."""

    def __init__(self, context: Context, index: Index, quotas: Quotas) -> None:
        self._context = context
        self._index = index
        self._quotas = quotas
        self._sources: dict[Tier, PromotionSource] = {}
        self._waiting: deque[PromotionRequest] = deque()
        self._requests: set[PromotionRequest] = set()
        """Requests that are admitted and not ended."""
        self._promotions: dict[BlockHash, Promotion] = {}
        self._changed: dict[PromotionRequest, None] = {}

    def connect(self, tier: Tier, source: PromotionSource) -> None:
        self._sources[tier] = source

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def request_count(self) -> int:
        return len(self._requests) + len(self._waiting)

    @property
    def promotion_count(self) -> int:
        return len(self._promotions)

    def promotion(self, block_hash: BlockHash) -> Promotion | None:
        return self._promotions.get(block_hash)

    # --- demands --------------------------------------------------------------------------------

    def open(self, request: PromotionRequest) -> None:
        """Open a request. Its hashes differ from each other. Blocks that are here are reported when this
        event has been handled."""
        assert request.deadline_s > self._context.now_s
        if not self._admit(request):
            if len(self._waiting) >= LOADS_WAITING_MAX:
                self._cut(request, 0, CROWDED)
                self._changed[request] = None
                return
            self._waiting.append(request)
        self._context.at(request.deadline_s, lambda: self._overdue(request))

    def extend(self, request: PromotionRequest, deadline_s: float) -> None:
        """Somebody with more patience waits for the blocks of the request as well."""
        if deadline_s > request.deadline_s and not request.is_over:
            request.deadline_s = deadline_s
            self._context.at(deadline_s, lambda: self._overdue(request))

    def end(self, request: PromotionRequest) -> None:
        """End a request. Its pins end, and what is still on its way to nobody else is called off. A second
        call changes nothing."""
        if request.is_ended:
            return
        request.is_ended = True
        request.is_over = True
        self._changed.pop(request, None)
        if not request.is_admitted:
            if request in self._waiting:
                self._waiting.remove(request)
            return
        self._requests.remove(request)
        self._release(request, 0, request.end)
        request.end = 0
        self._index.was_freed = True

    def admit_waiting(self) -> None:
        """Admit waiting requests after something came free: the first of each holder, in order of arrival, as
        far as they fit."""
        blocked: set[Holder] = set()
        for request in list(self._waiting):
            if request.holder in blocked:
                continue
            if self._admit(request):
                self._waiting.remove(request)
            else:
                blocked.add(request.holder)

    def report(self) -> None:
        """Report what changed for each request, in one message as far as possible."""
        while self._changed:
            changed, self._changed = self._changed, {}
            for request in changed:
                self._report(request)

    def found_corrupt(self, request: PromotionRequest, block_hash: BlockHash) -> None:
        """Drop a block that its reader found corrupt in host memory. It must be one that the request was
        given: nobody can drop what it has not got."""
        for copy in request.copies[: request.reported]:
            if copy is not None and copy.facts.block_hash == block_hash and not copy.is_gone:
                self._context.counts.corrupt[Tier.HOST] += 1
                entry = self._index.get(block_hash, request.size_class)
                assert entry is not None
                self._index.drop(entry, DropReason.CORRUPT)

    # --- fills ----------------------------------------------------------------------------------

    def arrived(self, promotion: Promotion, copy: HostCopy) -> None:
        """Take in a block. It is pinned for everybody who waited, before anything else can happen to it."""
        self.forget(promotion)
        for request, position in promotion.waiters.items():
            self._give(request, position, copy, promotion.tier)

    def failed(self, promotion: Promotion, message: str) -> None:
        self.forget(promotion)
        for request, position in list(promotion.waiters.items()):
            self._fail(request, position, message)

    def forget(self, promotion: Promotion) -> None:
        """Forget a promotion that is under way no more: the same block can be asked for afresh."""
        if self._promotions.get(promotion.block_hash) is promotion:
            del self._promotions[promotion.block_hash]

    def check(self) -> None:
        for request in self._requests:
            assert not request.is_ended
            for position, copy in enumerate(request.copies[: request.end]):
                promotion = self._promotions.get(request.hashes[position])
                is_waiting = promotion is not None and promotion.waiters.get(request) == position
                assert (copy is not None) != is_waiting
                assert copy is None or copy.pins > 0
            assert all(copy is None for copy in request.copies[request.end :])
        for promotion in self._promotions.values():
            assert not promotion.waiters.keys() - self._requests

    def pins(self) -> dict[HostCopy, int]:
        """The pins of all requests, to be compared with the copies' own."""
        counted: dict[HostCopy, int] = {}
        for request in self._requests:
            for copy in request.copies:
                if copy is not None:
                    counted[copy] = counted.get(copy, 0) + 1
        return counted

    # --- parts ----------------------------------------------------------------------------------

    def _admit(self, request: PromotionRequest) -> bool:
        slot_bytes = request.size_class.slot_bytes
        most = self._quotas.most_bytes // slot_bytes
        if request.end > most:
            self._cut(request, most, OVER_QUOTA)
        wanted = request.hashes[: request.end]
        own_bytes, total_bytes = self._quotas.need(request.holder, wanted, slot_bytes)
        if not self._quotas.fits(request.holder, own_bytes, total_bytes):
            return False
        self._quotas.reserve(request.holder, wanted, slot_bytes)
        request.is_admitted = True
        self._requests.add(request)
        self._begin(request)
        return True

    def _begin(self, request: PromotionRequest) -> None:
        self._changed[request] = None
        asked: dict[Tier, list[Promotion]] = {}
        for position in range(request.end):
            block_hash = request.hashes[position]
            entry = self._index.get(block_hash, request.size_class)
            promotion = self._promotions.get(block_hash)
            if entry is not None and entry.host is not None:
                self._give(request, position, entry.host, Tier.HOST)
            elif promotion is not None and promotion.size_class is request.size_class:
                promotion.waiters[request] = position
            elif entry is not None and entry.ssd is not None:
                asked.setdefault(Tier.SSD, []).append(self._new_promotion(request, position, entry.ssd))
            elif (
                request.may_fetch
                and promotion is None
                and self._index.may_be_of(block_hash, request.size_class)
            ):
                asked.setdefault(Tier.PEER, []).append(self._new_promotion(request, position, None))
            else:
                self._fail(request, position, NOT_HERE)
                break
        for tier, promotions in asked.items():  # one that fails at once may end the need for the others
            wanted = [promotion for promotion in promotions if promotion.waiters]
            for promotion in wanted:
                promotion.is_requested = True
            self._sources[tier].request(wanted)

    def _new_promotion(self, request: PromotionRequest, position: int, source: SsdCopy | None) -> Promotion:
        block_hash = request.hashes[position]
        tier = Tier.PEER if source is None else Tier.SSD
        promotion = Promotion(request.size_class, block_hash, tier, {request: position}, source)
        self._promotions[block_hash] = promotion
        return promotion

    def _give(self, request: PromotionRequest, position: int, copy: HostCopy, tier: Tier) -> None:
        self._index.pin(copy)
        request.copies[position] = copy
        request.tiers[position] = tier
        self._changed[request] = None

    def _fail(self, request: PromotionRequest, position: int, message: str) -> None:
        if not request.is_over and position < request.end:
            self._cut(request, position, message)
            self._changed[request] = None

    def _cut(self, request: PromotionRequest, position: int, message: str) -> None:
        """Cut a request: its blocks from here on will not come."""
        if request.is_admitted:
            self._release(request, position, request.end)
        request.end = position
        request.reason = message

    def _release(self, request: PromotionRequest, first: int, end: int) -> None:
        for position in reversed(range(first, end)):  # the tail becomes evictable first
            copy, block_hash = request.copies[position], request.hashes[position]
            if copy is not None:
                request.copies[position] = None
                self._index.unpin(copy)
            else:
                self._no_more(request, block_hash)
        self._quotas.release(request.holder, request.hashes[first:end], request.size_class.slot_bytes)
        self._index.was_freed = True

    def _no_more(self, request: PromotionRequest, block_hash: BlockHash) -> None:
        promotion = self._promotions.get(block_hash)
        if promotion is None or request not in promotion.waiters:
            return
        del promotion.waiters[request]
        if not promotion.is_requested and not promotion.waiters:
            self.forget(promotion)
        elif not promotion.waiters:
            promotion.is_late = self._context.now_s >= request.deadline_s
            self._sources[promotion.tier].cancel(promotion)

    def _overdue(self, request: PromotionRequest) -> None:
        if request.is_over or self._context.now_s < request.deadline_s:
            return
        if not request.is_admitted:
            self._waiting.remove(request)
        ready = request.reported
        while ready < request.end and request.copies[ready] is not None:
            ready += 1
        if ready < request.end:
            self._cut(request, ready, LATE)
        self._changed[request] = None

    def _report(self, request: PromotionRequest) -> None:
        if request.is_over:
            return
        first = request.reported
        ready: list[HostCopy] = []
        while first + len(ready) < request.end:
            copy = request.copies[first + len(ready)]
            if copy is None:
                break
            ready.append(copy)
        if ready:
            request.reported += len(ready)
            request.report_ready(request, first, ready, request.tiers[first : request.reported])
        if request.reported == request.end and not request.is_over:
            request.is_over = True
            if request.end < len(request.hashes):
                request.report_failed(request.end, request.reason)
