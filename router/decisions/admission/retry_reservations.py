"""Retry reservations: when a refused client should come back, so that it is admitted then. Pure.

Under overload new arrivals take every place that comes free, so a client that waits for as long as the queue
takes would find it as long as before. Each refused request therefore gets a reservation. The next refused
client gets a later time, new arrivals wait behind reserved work, and a client that comes back in time with
the same request is admitted. Not all clients come back, so reserved work counts by the fraction that did
lately.
"""

from collections import deque
from typing import NamedTuple

RESERVATIONS_MAX = 4096
GRACE_S = 5.0
"""A client may come back this much later, since Retry-After is in whole seconds and clients add jitter."""
EARLY_S = 0.5
RETURN_FIRST, RETURN_WEIGHT = 0.3, 0.05


class RetryReservation(NamedTuple):
    due_s: float
    work_s: float
    """Seconds of the queue's drain rate that the request takes."""


class _TenantReservations:
    """The reservations of one tenant."""

    def __init__(self) -> None:
        self.by_key: dict[str, RetryReservation] = {}
        self.in_order: deque[tuple[float, str]] = deque()
        """(due, key), as booked: the due times never fall."""
        self.until_s = 0.0


class RetryReservations:
    """The reservations of all tenants. Those of one do not delay another; fair shares decide between
    tenants."""

    def __init__(self) -> None:
        self._books: dict[str, _TenantReservations] = {}
        self._count = 0
        self.returned_share = RETURN_FIRST
        """The fraction of clients due lately that came back."""

    def __len__(self) -> int:
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
            reservation = book.by_key.get(key)
            if reservation is not None and reservation.due_s == due_s:
                work_s += reservation.work_s
        return self.returned_share * work_s

    def book(
        self, tenant: str, key: str, *, wait_s: float, work_s: float, now_s: float, most_s: float
    ) -> float:
        """Reserve a place; return the seconds until the client should come back.

        That is not before `wait_s`, and after earlier reservations. Nothing is reserved beyond `most_s`, nor
        with an empty key, because such a request cannot be recognised.
        """
        self._expire(tenant, now_s)
        book = self._books.get(tenant) or _TenantReservations()
        held = book.by_key.get(key)
        if held is not None and held.due_s > now_s:  # it came too early
            return held.due_s - now_s
        due_s = max(now_s + wait_s, book.until_s)
        if due_s - now_s > most_s:
            return most_s
        if key and held is None and self._count < RESERVATIONS_MAX:
            self._books[tenant] = book
            book.by_key[key] = RetryReservation(due_s, work_s)
            book.in_order.append((due_s, key))
            book.until_s = due_s + self.returned_share * work_s
            self._count += 1
        return due_s - now_s

    def take(self, tenant: str, key: str, now_s: float) -> bool:
        """Use up the reservation of a request that came back in time; return whether there was one."""
        self._expire(tenant, now_s)
        book = self._books.get(tenant)
        reservation = None if book is None else book.by_key.get(key)
        if book is None or reservation is None or reservation.due_s - EARLY_S > now_s:
            return False
        del book.by_key[key]
        self._count -= 1
        self._learn(1.0)
        return True

    def expire(self, now_s: float) -> None:
        for tenant in list(self._books):
            self._expire(tenant, now_s)

    def _expire(self, tenant: str, now_s: float) -> None:
        book = self._books.get(tenant)
        if book is None:
            return
        while book.in_order and book.in_order[0][0] + GRACE_S < now_s:
            due_s, key = book.in_order.popleft()
            reservation = book.by_key.get(key)
            if reservation is not None and reservation.due_s == due_s:
                del book.by_key[key]
                self._count -= 1
                self._learn(0.0)
        if not book.in_order:
            del self._books[tenant]

    def _learn(self, came: float) -> None:
        self.returned_share += RETURN_WEIGHT * (came - self.returned_share)

    def check(self) -> None:
        for book in self._books.values():
            due_s = [due for due, _ in book.in_order]
            assert due_s == sorted(due_s)
            assert book.by_key.keys() <= {key for _, key in book.in_order}
        assert self._count == sum(len(book.by_key) for book in self._books.values()) <= RESERVATIONS_MAX
        assert 0.0 <= self.returned_share <= 1.0
