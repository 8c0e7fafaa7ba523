"""Blocks are promoted into host memory and pinned there, for whoever asked."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.ids import BlockHash
from baton.core.store import DropReason, Holding, Tier
from kv_store.node.context import LOADS_WAITING_MAX, Context
from kv_store.node.index import Index
from kv_store.node.quotas import Holder, Shares
from kv_store.node.size_classes import HostCopy, Space, SsdCopy

LATE = "not there in time"
NOT_HERE = "it is not here"
OVER_SHARE = "more than one may hold of the host memory"
CROWDED = "too many loads wait for room"
NO_HOLDER = "no peer has it"
REASONS = frozenset({LATE, NOT_HERE, OVER_SHARE, CROWDED, NO_HOLDER})
"""Why a request fails, where this node itself gives the reason: these are counted apart."""


@dataclass(slots=True, eq=False)
class Demand:
    """A request for these blocks, in this order, in host memory, pinned until `Promoter.end`."""

    space: Space
    hashes: tuple[BlockHash, ...]
    holder: Holder
    deadline_s: float
    tell_ready: "Callable[[Demand, int, list[HostCopy], list[Tier]], None]"
    """The callback for blocks first, first + 1, …, with their copies and the tier that each came from."""
    tell_failed: Callable[[int, str], None]
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
    told: int = 0
    """Blocks before this were reported ready."""
    copies: list[HostCopy | None] = field(init=False)
    tiers: list[Tier] = field(init=False)

    def __post_init__(self) -> None:
        self.end = len(self.hashes)
        self.copies = [None] * self.end
        self.tiers = [Tier.HOST] * self.end


@dataclass(slots=True, eq=False)
class Fill:
    """A block on its way into host memory. All requests that want it wait for the same promotion."""

    space: Space
    block_hash: BlockHash
    tier: Tier
    waiters: dict[Demand, int] = field(default_factory=dict[Demand, int])
    """The position of the block in each request that waits."""
    source: SsdCopy | None = None
    """SSD: the copy that is read."""
    is_requested: bool = False
    """Its source knows of it."""
    is_reading: bool = False
    is_late: bool = False
    """It was being read when the last deadline passed: what arrives is not used."""
    holdings: tuple[Holding, ...] = ()
    """PEER: holdings whose node has not failed us."""

    @property
    def deadline_s(self) -> float:
        return max((demand.deadline_s for demand in self.waiters), default=float("-inf"))


class Source(Protocol):
    """A path into host memory."""

    def request(self, fills: Sequence[Fill]) -> None:
        """Start promotions. Each ends by `Promoter.arrived` or `Promoter.failed`, once."""
        ...

    def cancel(self, fill: Fill) -> None:
        """Call a promotion off, as nobody waits any more. One that has not begun need not begin: then
        `Promoter.forget` ends it."""
        ...


class Bringer:
    """Serves requests for blocks. A request waits until its holder's quota has room for all of it. Then each
    block comes by its fastest path, and blocks are reported as their prefix grows."""

    def __init__(self, context: Context, index: Index, shares: Shares) -> None:
        self._context = context
        self._index = index
        self._shares = shares
        self._sources: dict[Tier, Source] = {}
        self._waiting: deque[Demand] = deque()
        self._demands: set[Demand] = set()
        """Requests that are admitted and not ended."""
        self._fills: dict[BlockHash, Fill] = {}
        self._changed: dict[Demand, None] = {}

    def connect(self, tier: Tier, source: Source) -> None:
        self._sources[tier] = source

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def demand_count(self) -> int:
        return len(self._demands) + len(self._waiting)

    @property
    def fill_count(self) -> int:
        return len(self._fills)

    def fill(self, block_hash: BlockHash) -> Fill | None:
        return self._fills.get(block_hash)

    # --- demands --------------------------------------------------------------------------------

    def open(self, demand: Demand) -> None:
        """Open a request. Its hashes differ from each other. Blocks that are here are reported when this
        event has been handled."""
        assert demand.deadline_s > self._context.now_s
        if not self._admit(demand):
            if len(self._waiting) >= LOADS_WAITING_MAX:
                self._cut(demand, 0, CROWDED)
                self._changed[demand] = None
                return
            self._waiting.append(demand)
        self._context.at(demand.deadline_s, lambda: self._overdue(demand))

    def end(self, demand: Demand) -> None:
        """End a request. Its pins end, and what is still on its way to nobody else is called off. A second
        call changes nothing."""
        if demand.is_ended:
            return
        demand.is_ended = True
        demand.is_over = True
        self._changed.pop(demand, None)
        if not demand.is_admitted:
            if demand in self._waiting:
                self._waiting.remove(demand)
            return
        self._demands.remove(demand)
        self._release(demand, 0, demand.end)
        demand.end = 0
        self._index.was_freed = True

    def admit_waiting(self) -> None:
        """Admit waiting requests after something came free: the first of each holder, in order of arrival, as
        far as they fit."""
        blocked: set[Holder] = set()
        for demand in list(self._waiting):
            if demand.holder in blocked:
                continue
            if self._admit(demand):
                self._waiting.remove(demand)
            else:
                blocked.add(demand.holder)

    def tell(self) -> None:
        """Report what changed for each request, in one message as far as possible."""
        while self._changed:
            changed, self._changed = self._changed, {}
            for demand in changed:
                self._tell(demand)

    def found_corrupt(self, demand: Demand, block_hash: BlockHash) -> None:
        """Drop a block that its reader found corrupt in host memory. It must be one that the request was
        given: nobody can drop what it has not got."""
        for copy in demand.copies[: demand.told]:
            if copy is not None and copy.facts.block_hash == block_hash and not copy.is_gone:
                self._context.counts.corrupt[Tier.HOST] += 1
                entry = self._index.get(block_hash, demand.space)
                assert entry is not None
                self._index.drop(entry, DropReason.CORRUPT)

    # --- fills ----------------------------------------------------------------------------------

    def arrived(self, fill: Fill, copy: HostCopy) -> None:
        """Take in a block. It is pinned for everybody who waited, before anything else can happen to it."""
        self.forget(fill)
        for demand, position in fill.waiters.items():
            self._give(demand, position, copy, fill.tier)

    def failed(self, fill: Fill, message: str) -> None:
        self.forget(fill)
        for demand, position in list(fill.waiters.items()):
            self._fail(demand, position, message)

    def forget(self, fill: Fill) -> None:
        """Forget a promotion that is under way no more: the same block can be asked for afresh."""
        if self._fills.get(fill.block_hash) is fill:
            del self._fills[fill.block_hash]

    def check(self) -> None:
        for demand in self._demands:
            assert not demand.is_ended
            for position, copy in enumerate(demand.copies[: demand.end]):
                fill = self._fills.get(demand.hashes[position])
                is_waiting = fill is not None and fill.waiters.get(demand) == position
                assert (copy is not None) != is_waiting
                assert copy is None or copy.pins > 0
            assert all(copy is None for copy in demand.copies[demand.end :])
        for fill in self._fills.values():
            assert not fill.waiters.keys() - self._demands

    def pins(self) -> dict[HostCopy, int]:
        """The pins of all requests, to be compared with the copies' own."""
        counted: dict[HostCopy, int] = {}
        for demand in self._demands:
            for copy in demand.copies:
                if copy is not None:
                    counted[copy] = counted.get(copy, 0) + 1
        return counted

    # --- parts ----------------------------------------------------------------------------------

    def _admit(self, demand: Demand) -> bool:
        slot_bytes = demand.space.slot_bytes
        most = self._shares.most_bytes // slot_bytes
        if demand.end > most:
            self._cut(demand, most, OVER_SHARE)
        wanted = demand.hashes[: demand.end]
        own_bytes, total_bytes = self._shares.need(demand.holder, wanted, slot_bytes)
        if not self._shares.fits(demand.holder, own_bytes, total_bytes):
            return False
        self._shares.reserve(demand.holder, wanted, slot_bytes)
        demand.is_admitted = True
        self._demands.add(demand)
        self._begin(demand)
        return True

    def _begin(self, demand: Demand) -> None:
        self._changed[demand] = None
        asked: dict[Tier, list[Fill]] = {}
        for position in range(demand.end):
            block_hash = demand.hashes[position]
            entry = self._index.get(block_hash, demand.space)
            fill = self._fills.get(block_hash)
            if entry is not None and entry.host is not None:
                self._give(demand, position, entry.host, Tier.HOST)
            elif fill is not None and fill.space is demand.space:
                fill.waiters[demand] = position
            elif entry is not None and entry.ssd is not None:
                asked.setdefault(Tier.SSD, []).append(self._new_fill(demand, position, entry.ssd))
            elif demand.may_fetch and fill is None and self._index.may_be_of(block_hash, demand.space):
                asked.setdefault(Tier.PEER, []).append(self._new_fill(demand, position, None))
            else:
                self._fail(demand, position, NOT_HERE)
                break
        for tier, fills in asked.items():  # a promotion that fails at once may end the need for the others
            wanted = [fill for fill in fills if fill.waiters]
            for fill in wanted:
                fill.is_requested = True
            self._sources[tier].request(wanted)

    def _new_fill(self, demand: Demand, position: int, source: SsdCopy | None) -> Fill:
        block_hash = demand.hashes[position]
        tier = Tier.PEER if source is None else Tier.SSD
        fill = Fill(demand.space, block_hash, tier, {demand: position}, source)
        self._fills[block_hash] = fill
        return fill

    def _give(self, demand: Demand, position: int, copy: HostCopy, tier: Tier) -> None:
        self._index.pin(copy)
        demand.copies[position] = copy
        demand.tiers[position] = tier
        self._changed[demand] = None

    def _fail(self, demand: Demand, position: int, message: str) -> None:
        if not demand.is_over and position < demand.end:
            self._cut(demand, position, message)
            self._changed[demand] = None

    def _cut(self, demand: Demand, position: int, message: str) -> None:
        """Cut a request: its blocks from here on will not come."""
        if demand.is_admitted:
            self._release(demand, position, demand.end)
        demand.end = position
        demand.reason = message

    def _release(self, demand: Demand, first: int, end: int) -> None:
        for position in reversed(range(first, end)):  # the tail becomes evictable first
            copy, block_hash = demand.copies[position], demand.hashes[position]
            if copy is not None:
                demand.copies[position] = None
                self._index.unpin(copy)
            else:
                self._no_more(demand, block_hash)
        self._shares.release(demand.holder, demand.hashes[first:end], demand.space.slot_bytes)
        self._index.was_freed = True

    def _no_more(self, demand: Demand, block_hash: BlockHash) -> None:
        fill = self._fills.get(block_hash)
        if fill is None or demand not in fill.waiters:
            return
        del fill.waiters[demand]
        if not fill.is_requested and not fill.waiters:
            self.forget(fill)
        elif not fill.waiters:
            fill.is_late = self._context.now_s >= demand.deadline_s
            self._sources[fill.tier].cancel(fill)

    def _overdue(self, demand: Demand) -> None:
        if demand.is_over:
            return
        if not demand.is_admitted:
            self._waiting.remove(demand)
        ready = demand.told
        while ready < demand.end and demand.copies[ready] is not None:
            ready += 1
        if ready < demand.end:
            self._cut(demand, ready, LATE)
        self._changed[demand] = None

    def _tell(self, demand: Demand) -> None:
        if demand.is_over:
            return
        first = demand.told
        ready: list[HostCopy] = []
        while first + len(ready) < demand.end:
            copy = demand.copies[first + len(ready)]
            if copy is None:
                break
            ready.append(copy)
        if ready:
            demand.told += len(ready)
            demand.tell_ready(demand, first, ready, demand.tiers[first : demand.told])
        if demand.told == demand.end and not demand.is_over:
            demand.is_over = True
            if demand.end < len(demand.hashes):
                demand.tell_failed(demand.end, demand.reason)
