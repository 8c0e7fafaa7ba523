"""Retry reservations: when a refused client should come back, so that it is admitted then. Pure.

Under overload new arrivals take every place that comes free, so a client that waits for as long as the queue
takes would find it as long as before. Each refused request therefore gets a reservation. The next refused
client gets a later time, new arrivals wait behind reserved work, and a client that comes back in time with
the same request is admitted, whatever the queue. Not all clients come back, so a reservation ends shortly
after its time, and reserved work counts by the fraction that came lately.

A reservation is kept in any case, so there are never more of them, those that came back and wait included,
than the admission queue has places. A tenant gets no more than there are left for all others, which leaves
room for tenants that are not refused yet. A client that is refused beyond that gets a time, and no
reservation.
"""

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

RESERVATIONS_MAX = 4096
GRACE_S = 5.0
"""A client may come back this much later, since Retry-After is in whole seconds and clients add jitter."""
EARLY_S = 0.5
CLIENTS_MAX = 8
"""Largest number of clients that share a reservation, because their requests cannot be told apart."""
RETURN_FIRST, RETURN_WEIGHT = 0.3, 0.05


@dataclass(slots=True)
class RetryReservation:
    due_s: float
    work_s: float
    """Seconds of the queue's drain rate that the request takes."""
    slo_class: str
    clients: set[str]
    """The refused requests that were given this time. Each may come back once."""
    has_returned: bool = False
    """True if a client came back."""


@dataclass(slots=True)
class _TenantReservations:
    """The reservations of one tenant."""

    by_key: dict[str, RetryReservation] = field(default_factory=dict[str, RetryReservation])
    in_order: deque[tuple[float, str]] = field(default_factory=deque[tuple[float, str]])
    """(due, key), as booked: the due times never fall."""
    until_s: float = 0.0

    def current(self, due_s: float, key: str) -> RetryReservation | None:
        """Return the reservation of an entry of `in_order`; None if it was used up."""
        reservation = self.by_key.get(key)
        return reservation if reservation is not None and reservation.due_s == due_s else None


class RetryReservations:
    """The reservations of all tenants. Those of one do not delay another; fair shares decide between
    tenants."""

    def __init__(
        self,
        *,
        places_max: int = RESERVATIONS_MAX,
        tenant_max: int = 0,
        class_max: Mapping[str, int] | None = None,
    ) -> None:
        """`places_max` are the places of the queue; `tenant_max` and `class_max` (0: none) those that each
        tenant and class may have of them."""
        self._places_max = min(places_max, RESERVATIONS_MAX)
        self._tenant_max, self._class_max = tenant_max, class_max or {}
        self._books: dict[str, _TenantReservations] = {}
        self._due: list[tuple[float, str]] = []
        """A heap of (due, tenant)."""
        self._returned: dict[str, tuple[str, str]] = {}
        """Tenant and class of the sequences that came back and are not placed yet."""
        self._count = 0
        self._by_tenant: Counter[str] = Counter()
        """Reserved places, and those of sequences that came back."""
        self._by_class: Counter[str] = Counter()
        self.returned_share = RETURN_FIRST
        """The fraction of clients due lately that came back."""

    def __len__(self) -> int:
        """Number of clients that may come back."""
        return self._count

    def expected_s(self, tenant: str, until_s: float) -> float:
        """Return the reserved work due until then, behind which a request of the tenant that arrives now
        waits."""
        book = self._books.get(tenant)
        if book is None:
            return 0.0
        work_s = 0.0
        for due_s, key in book.in_order:
            if due_s > until_s:
                break
            if (reservation := book.current(due_s, key)) is not None:
                work_s += reservation.work_s
        return self.returned_share * work_s

    def book(
        self,
        tenant: str,
        key: str,
        *,
        wait_s: float,
        work_s: float,
        now_s: float,
        most_s: float,
        slo_class: str = "",
        client: str = "",
    ) -> float:
        """Reserve a place; return the seconds until the client should come back.

        That is not before `wait_s`, and after earlier reservations. Nothing is reserved beyond `most_s`, nor
        with an empty key, because such a request cannot be recognised. `client` names the refused request.
        """
        self.expire(now_s)
        book = self._books.get(tenant) or _TenantReservations()
        held = book.by_key.get(key)
        if held is not None and held.due_s > now_s:  # it came too early, or is like another's request
            has_room = len(held.clients) < CLIENTS_MAX and self._has_room(tenant, slo_class)
            if client not in held.clients and has_room and held.slo_class == slo_class:
                self._reserve(tenant, held, client)
            return held.due_s - now_s
        due_s = max(now_s + wait_s, book.until_s)
        if due_s - now_s > most_s:
            return most_s
        if key and held is None and self._has_room(tenant, slo_class):
            self._books[tenant] = book
            book.by_key[key] = reservation = RetryReservation(due_s, work_s, slo_class, set())
            book.in_order.append((due_s, key))
            heapq.heappush(self._due, (due_s, tenant))
            book.until_s = due_s + self.returned_share * work_s
            self._reserve(tenant, reservation, client)
        return due_s - now_s

    def take(self, tenant: str, key: str, now_s: float, *, client: str = "") -> bool:
        """Use up the reservation of a request that came back in time; return whether there was one."""
        self.expire(now_s)
        book = self._books.get(tenant)
        reservation = None if book is None else book.by_key.get(key)
        if book is None or reservation is None or reservation.due_s - EARLY_S > now_s:
            return False
        reservation.clients.remove(client if client in reservation.clients else min(reservation.clients))
        reservation.has_returned = True
        self._release(tenant, reservation.slo_class, 1)
        if not reservation.clients:
            del book.by_key[key]
        self._learn(1.0)
        return True

    def returned(self, name: str, tenant: str, slo_class: str) -> None:
        """Keep a place in the queue for a sequence that came back, until it is `placed`."""
        self._returned[name] = tenant, slo_class
        self._by_tenant[tenant] += 1
        self._by_class[slo_class] += 1

    def placed(self, name: str) -> None:
        """Note that a sequence needs no place in the queue any more. It may never have been kept one."""
        known = self._returned.pop(name, None)
        if known is not None:
            self._uncount(*known, 1)

    def expire(self, now_s: float) -> None:
        """End the reservations of all tenants whose clients did not come back in time."""
        while self._due and self._due[0][0] + GRACE_S < now_s:
            _, tenant = heapq.heappop(self._due)
            self._expire(tenant, now_s)

    def _expire(self, tenant: str, now_s: float) -> None:
        book = self._books.get(tenant)
        if book is None:
            return
        while book.in_order and book.in_order[0][0] + GRACE_S < now_s:
            due_s, key = book.in_order.popleft()
            if (reservation := book.current(due_s, key)) is not None:
                del book.by_key[key]
                self._release(tenant, reservation.slo_class, len(reservation.clients))
                if not reservation.has_returned:
                    self._learn(0.0)
        if not book.in_order:
            del self._books[tenant]

    def _has_room(self, tenant: str, slo_class: str) -> bool:
        """Whether a further reservation can be kept, and is left to this tenant."""
        own, left = self._by_tenant[tenant], self._places_max - self._count - len(self._returned)
        most_of_class = self._class_max.get(slo_class, 0)
        return (
            own < left
            and (not self._tenant_max or own < self._tenant_max)
            and (not most_of_class or self._by_class[slo_class] < most_of_class)
        )

    def _reserve(self, tenant: str, reservation: RetryReservation, client: str) -> None:
        reservation.clients.add(client)
        self._count += 1
        self._by_tenant[tenant] += 1
        self._by_class[reservation.slo_class] += 1

    def _release(self, tenant: str, slo_class: str, count: int) -> None:
        self._count -= count
        self._uncount(tenant, slo_class, count)

    def _uncount(self, tenant: str, slo_class: str, count: int) -> None:
        for counter, name in ((self._by_tenant, tenant), (self._by_class, slo_class)):
            counter[name] -= count
            if not counter[name]:
                del counter[name]

    def _learn(self, came: float) -> None:
        self.returned_share += RETURN_WEIGHT * (came - self.returned_share)

    def check(self) -> None:
        tenants, classes = Counter[str](), Counter[str]()
        for tenant, book in self._books.items():
            due_s = [due for due, _ in book.in_order]
            assert due_s == sorted(due_s)
            assert book.by_key.keys() <= {key for _, key in book.in_order}
            for reservation in book.by_key.values():
                assert 0 < len(reservation.clients) <= CLIENTS_MAX
                tenants[tenant] += len(reservation.clients)
                classes[reservation.slo_class] += len(reservation.clients)
        assert self._count == tenants.total() <= self._places_max
        tenants.update(tenant for tenant, _ in self._returned.values())
        classes.update(slo_class for _, slo_class in self._returned.values())
        assert (self._by_tenant, self._by_class) == (tenants, classes)
        assert {tenant for _, tenant in self._due} >= self._books.keys()
        assert 0.0 <= self.returned_share <= 1.0
