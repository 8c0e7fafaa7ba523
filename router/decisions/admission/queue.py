"""The admission queue: its order, its bounds, and the guarantee that no sequence starves. Pure.

The order:

1. Sequences that were placed before and lost their worker, by arrival: their clients are being served. They
   count against no bound.
2. Those that can still meet their objectives. Between tenants, whoever had least service for its weight
   (`router.decisions.admission.fair_shares`); within one, by priority, then earliest deadline, then arrival.
3. Late ones, between tenants alike, within one by arrival.

Nobody starves: of every `OLDEST_EVERY` sequences placed at least one is the oldest that waits, whatever its
tenant, priority or deadline. A sequence whose turn came and that finds no place does not stop those behind
it (it may need more blocks than a smaller one); but once `OVERTAKEN_MAX` others went before it after its
turn, nothing does any more: room is left to build up until it is placed, or its own wait is over. So a
sequence that finds m older ones waits for at most (m + 1) · (OLDEST_EVERY + OVERTAKEN_MAX) placings.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from baton.core.ids import SequenceId
from router.decisions.admission.fair_shares import FairShares

SCAN_MISSES_MAX = 16
"""A scan of the queue stops after it has passed this many sequences that find no room."""
OLDEST_EVERY = 64
OVERTAKEN_MAX = 64


class Waiter(msgspec.Struct, frozen=True):
    seq_id: SequenceId
    arrival: int
    """A number that rises with every submitted sequence."""
    tokens: int
    due_s: float
    """When the first token is due. Without a TTFT objective it is when the wait ends."""
    tenant: str = ""
    weight: float = 1.0
    slo_class: str = ""
    priority: int = 0
    """A lower priority goes first."""
    is_new: bool = True
    """False if the sequence was placed before and lost its worker."""
    is_promised: bool = False
    """True if its client was refused, and came back at the time that it was given. It makes room for itself,
    keeps its place, and is never late."""

    @property
    def key(self) -> "Key":
        return (self.priority, self.due_s, self.arrival, self.seq_id)


Key = tuple[int, float, int, SequenceId]


@dataclass(slots=True)
class _Queue:
    """The waiting sequences of one tenant."""

    weight: float
    timely: list[Key] = field(default_factory=list[Key])
    late: list[tuple[int, SequenceId]] = field(default_factory=list[tuple[int, SequenceId]])
    tokens: int = 0

    def __len__(self) -> int:
        return len(self.timely) + len(self.late)


class Full(msgspec.Struct, frozen=True):
    reason: str


class AdmissionQueue:
    def __init__(self, *, new_max: int, class_max: dict[str, int] | None = None, tenant_max: int = 0) -> None:
        """`new_max` bounds those that were never placed; `class_max` and `tenant_max` (0: none) those of each
        class and tenant among them."""
        self._new_max, self._class_max, self._tenant_max = new_max, class_max or {}, tenant_max
        self.shares = FairShares()
        self._waiters: dict[SequenceId, Waiter] = {}
        self._served: list[tuple[int, SequenceId]] = []
        self._queues: dict[str, _Queue] = {}
        self._by_arrival: list[tuple[int, SequenceId]] = []
        """New ones."""
        self._late: set[SequenceId] = set()
        self._due: list[tuple[float, SequenceId]] = []
        """A heap; entries of those that left, or were promised a place, are skipped."""
        self._classes: Counter[str] = Counter()
        self._since_oldest = 0
        self._overtaken: dict[SequenceId, int] = {}
        """Placings since its turn came and it found no place."""

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._waiters

    def __getitem__(self, seq_id: SequenceId) -> Waiter:
        return self._waiters[seq_id]

    @property
    def new_count(self) -> int:
        return len(self._by_arrival)

    def is_late(self, seq_id: SequenceId) -> bool:
        return seq_id in self._late

    # --- joining and leaving ----------------------------------------------------------------------

    def room_for(self, waiter: Waiter) -> SequenceId | Full | None:
        """Return None if there is room, a sequence that has to leave first, or Full if there is none. Ask
        again after a sequence has left.

        The tenant with the most waiting sequences for its weight gives up its last place, if it has more than
        the newcomer's tenant would have (longest queue drop). Otherwise a late sequence of the same tenant
        makes room. A promised sequence always finds one that makes room, unless all that wait are promised.
        """
        if not waiter.is_new:
            return None
        most = self._class_max.get(waiter.slo_class, 0)
        if most and self._classes[waiter.slo_class] >= most:
            return self._last_for(waiter, slo_class=waiter.slo_class) or Full(
                f"the admission queue holds {most} requests of class {waiter.slo_class}, which is its limit"
            )
        own = self._queues.get(waiter.tenant)
        own_count = 0 if own is None else len(own)
        if self._tenant_max and own_count >= self._tenant_max:
            return self._last_for(waiter, tenant=waiter.tenant) or Full(
                f"the admission queue holds {own_count} requests of this tenant, which is its limit"
            )
        if self.new_count < self._new_max:
            return None
        for tenant in self._longest():
            queue = self._queues[tenant]
            if len(queue) / queue.weight <= (own_count + 1) / waiter.weight:
                break
            if (last := self._last_of(tenant)) is not None:
                return last
        if own is not None and own.late:
            return own.late[-1][1]
        full = Full(f"the admission queue is full with {self.new_count} requests")
        return self._last_for(waiter) or full

    def _longest(self) -> Iterator[str]:
        """Yield the tenants that wait, the one with the most sequences for its weight first."""

        def length(tenant: str) -> tuple[float, str]:
            queue = self._queues[tenant]
            return (len(queue) / queue.weight, tenant)

        if self._queues:
            first = max(self._queues, key=length)
            yield first  # It nearly always is the only one that is asked for.
            yield from (t for t in sorted(self._queues, key=length, reverse=True) if t != first)

    def _last_for(
        self, waiter: Waiter, *, tenant: str | None = None, slo_class: str | None = None
    ) -> SequenceId | None:
        """Return the last sequence that gives its place to a promised one, one of its own tenant first; None
        if there is none, or the waiter is not promised. `tenant` and `slo_class`: only of these."""
        if not waiter.is_promised:
            return None
        if waiter.tenant in self._queues and (last := self._last_of(waiter.tenant, slo_class)) is not None:
            return last
        others = () if tenant is not None else self._longest()
        return next((last for t in others if (last := self._last_of(t, slo_class)) is not None), None)

    def _last_of(self, tenant: str, slo_class: str | None = None) -> SequenceId | None:
        """Return the tenant's last sequence that is not promised."""
        queue = self._queues[tenant]
        late, timely = (one[1] for one in reversed(queue.late)), (key[-1] for key in reversed(queue.timely))
        for seq_id in chain(late, timely):
            waiter = self._waiters[seq_id]
            if not waiter.is_promised and slo_class in (None, waiter.slo_class):
                return seq_id
        return None

    def add(self, waiter: Waiter, *, is_late: bool = False, credit_tokens: float = 0.0) -> None:
        """Add a sequence. A new one needs `room_for` first. `credit_tokens`: see `FairShares.came`."""
        seq_id = waiter.seq_id
        assert seq_id not in self._waiters
        assert not (is_late and waiter.is_promised)
        self._waiters[seq_id] = waiter
        if not waiter.is_new:
            insort(self._served, (waiter.arrival, seq_id))
            return
        assert self.new_count < self._new_max
        queue = self._queues.get(waiter.tenant)
        if queue is None:
            queue = self._queues[waiter.tenant] = _Queue(waiter.weight)
            self.shares.came(waiter.tenant, waiter.weight, credit_tokens)
        queue.weight = waiter.weight
        queue.tokens += waiter.tokens
        self._classes[waiter.slo_class] += 1
        insort(self._by_arrival, (waiter.arrival, seq_id))
        if is_late:
            self._late.add(seq_id)
            insort(queue.late, (waiter.arrival, seq_id))
        else:
            insort(queue.timely, waiter.key)
        heapq.heappush(self._due, (waiter.due_s, seq_id))

    def remove(self, seq_id: SequenceId) -> None:
        """Remove a sequence. Nothing happens if it is not queued."""
        waiter = self._waiters.pop(seq_id, None)
        if waiter is None:
            return
        self._overtaken.pop(seq_id, None)
        by_arrival = (waiter.arrival, seq_id)
        if not waiter.is_new:
            del self._served[bisect_left(self._served, by_arrival)]
            return
        del self._by_arrival[bisect_left(self._by_arrival, by_arrival)]
        queue = self._queues[waiter.tenant]
        queue.tokens -= waiter.tokens
        self._classes[waiter.slo_class] -= 1
        if seq_id in self._late:
            self._late.discard(seq_id)
            del queue.late[bisect_left(queue.late, by_arrival)]
        else:
            del queue.timely[bisect_left(queue.timely, waiter.key)]
        self._sweep_due()
        if not len(queue):
            del self._queues[waiter.tenant]
            self.shares.left(waiter.tenant)
        if not self._classes[waiter.slo_class]:
            del self._classes[waiter.slo_class]

    def make_late(self, seq_id: SequenceId) -> None:
        """Move the sequence behind those that can still meet their objectives."""
        waiter = self._waiters[seq_id]
        if seq_id in self._late or not waiter.is_new or waiter.is_promised:
            return
        queue = self._queues[waiter.tenant]
        del queue.timely[bisect_left(queue.timely, waiter.key)]
        self._late.add(seq_id)
        self._overtaken.pop(seq_id, None)
        insort(queue.late, (waiter.arrival, seq_id))
        self._sweep_due()

    # --- deadlines --------------------------------------------------------------------------------

    @property
    def next_due_s(self) -> float | None:
        while self._due and not self._is_bound(self._due[0][1]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def take_overdue(self, now_s: float) -> list[SequenceId]:
        """Return the new sequences whose first token became due since the last call. They are late from here
        on, if they were not already."""
        found: list[SequenceId] = []
        while (due_s := self.next_due_s) is not None and due_s <= now_s:
            seq_id = heapq.heappop(self._due)[1]
            self.make_late(seq_id)
            found.append(seq_id)
        return found

    def _is_bound(self, seq_id: SequenceId) -> bool:
        """Whether the sequence waits, and the instant at which its first token is due means anything."""
        waiter = self._waiters.get(seq_id)
        return waiter is not None and waiter.is_new and not waiter.is_promised

    def _sweep_due(self) -> None:
        if len(self._due) > 2 * len(self._waiters) + 64:
            self._due = [entry for entry in self._due if self._is_bound(entry[1])]
            heapq.heapify(self._due)

    # --- order ------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[SequenceId]:
        """Yield the queued sequences in order, each at most once.

        The caller may place or remove a sequence between two of them. None may join or become late meanwhile.
        """
        for _, seq_id in list(self._served):
            yield seq_id
        first = None
        if self._since_oldest >= OLDEST_EVERY - 1 and self._by_arrival:
            first = self._by_arrival[0][1]
            yield first
        starving = [s for s in self._overtaken if self.is_starving(s)]
        for seq_id in sorted(starving, key=lambda s: self._waiters[s].arrival):
            if seq_id != first and seq_id in self._waiters:
                yield seq_id
        yield from self._by_turn(first, late=False)
        yield from self._by_turn(first, late=True)

    def _by_turn(self, first: SequenceId | None, *, late: bool) -> Iterator[SequenceId]:
        """Tenants take turns where nothing fits, so that large sequences of one do not hide those of
        another."""
        turns = [
            (0, self.shares.level(tenant), tenant)
            for tenant, queue in self._queues.items()
            if (queue.late if late else queue.timely)
        ]
        heapq.heapify(turns)
        passed: Counter[str] = Counter()
        while turns:
            misses, _, tenant = heapq.heappop(turns)
            queue = self._queues.get(tenant)
            waiting = [] if queue is None else queue.late if late else queue.timely
            at = passed[tenant]
            if at >= len(waiting):
                continue
            seq_id = waiting[at][-1]
            if seq_id == first or self.is_starving(seq_id):
                passed[tenant] += 1  # it was tried already
                heapq.heappush(turns, (misses, self.shares.level(tenant), tenant))
                continue
            yield seq_id
            if self._is_at(tenant, at, seq_id, late=late):
                passed[tenant] += 1
                misses += 1
            heapq.heappush(turns, (misses, self.shares.level(tenant), tenant))

    def _is_at(self, tenant: str, at: int, seq_id: SequenceId, *, late: bool) -> bool:
        queue = self._queues.get(tenant)
        waiting = [] if queue is None else queue.late if late else queue.timely
        return at < len(waiting) and waiting[at][-1] == seq_id

    def missed(self, seq_id: SequenceId) -> None:
        """Note that the sequence had its turn and found no room. From here on it is counted who overtakes it.

        A late sequence has a turn only as the oldest one. Otherwise lasting overload would serve all by
        arrival.
        """
        if seq_id in self._late and not self.has_right(seq_id):
            return
        self._overtaken.setdefault(seq_id, 0)

    def has_right(self, seq_id: SequenceId) -> bool:
        """Whether it is the turn of the oldest and the sequence is it, or the sequence starves."""
        is_oldest = bool(self._by_arrival) and self._by_arrival[0][1] == seq_id
        return (is_oldest and self._since_oldest >= OLDEST_EVERY - 1) or self.is_starving(seq_id)

    def is_behind_all(self, tenant: str, others: Iterable[str]) -> bool:
        """Whether all `others` wait, and each had more service for its weight than `tenant`."""
        mine = self.shares.level(tenant)
        return all(other in self._queues and self.shares.level(other) > mine for other in others)

    def is_starving(self, seq_id: SequenceId) -> bool:
        """Whether no other sequence may go before it any more."""
        return self._overtaken.get(seq_id, 0) >= OVERTAKEN_MAX

    def placed(self, waiter: Waiter, computed_tokens: int) -> None:
        """Note a placed sequence, queued or not. `computed_tokens` of its prompt are not cached."""
        self.remove(waiter.seq_id)
        self.shares.charge(waiter.tenant, computed_tokens, waiter.weight)
        if waiter.is_new and self._by_arrival and self._by_arrival[0][0] < waiter.arrival:
            self._since_oldest += 1
        else:
            self._since_oldest = 0
        for seq_id in self._overtaken:
            self._overtaken[seq_id] += 1

    def may_be_passed(self, *, is_short_of_room: bool) -> bool:
        """Whether a sequence that arrives now may be tried though others wait."""
        if is_short_of_room and len(self._waiters) >= SCAN_MISSES_MAX:
            return False
        return not any(map(self.is_starving, self._overtaken))

    def tokens_before(self, waiter: Waiter, *, goes_first: bool = False) -> float:
        """Tokens that are likely to be placed before it, if it joins: its own tenant's in its order, and as
        many of the others' as they have a share to meanwhile, unless its tenant goes first."""
        everyone = sum(queue.tokens for queue in self._queues.values())
        own = self._queues.get(waiter.tenant)
        if own is None:
            before = 0
        else:
            ahead = own.timely[: bisect_left(own.timely, waiter.key)]
            before = sum(self._waiters[key[-1]].tokens for key in ahead)
        if goes_first:
            return before
        part = self.shares.part_of(waiter.tenant, waiter.weight)
        others = everyone - (0 if own is None else own.tokens)
        return before + min(others, (before + waiter.tokens) * (1.0 - part) / part)

    def counts(self) -> dict[tuple[str, str], int]:
        """(class, tenant) -> new sequences that wait."""
        return Counter((self._waiters[s].slo_class, self._waiters[s].tenant) for _, s in self._by_arrival)

    def check(self) -> None:
        assert self.new_count <= self._new_max
        new = {s for s, w in self._waiters.items() if w.is_new}
        assert {s for _, s in self._by_arrival} == new
        assert self._by_arrival == sorted(self._by_arrival)
        assert {s for _, s in self._served} == self._waiters.keys() - new
        assert sum(len(q) for q in self._queues.values()) == len(new)
        for tenant, queue in self._queues.items():
            assert queue.timely == sorted(queue.timely)
            assert queue.late == sorted(queue.late)
            assert {s for _, s in queue.late} <= self._late
            waiters = [self._waiters[k[-1]] for k in (*queue.timely, *queue.late)]
            assert {w.tenant for w in waiters} == {tenant}
            assert queue.tokens == sum(w.tokens for w in waiters)
        assert self._late <= new
        assert self._overtaken.keys() <= self._waiters.keys()
        assert +self._classes == Counter(self._waiters[s].slo_class for s in new)
        self.shares.check()
