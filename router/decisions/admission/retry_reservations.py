"""When a refused client should come back, and that it finds room then. Pure.

Under overload whoever arrives takes the next place, so a client sent away for as long as the line takes
would find it as long as before. Each refused request is therefore booked: the next one is told a later
time, those that arrive meanwhile wait behind what is booked, and a client that comes back in time with the
same request is let in. Clients need not come back: what is booked counts by the share of those that did,
lately.
"""

from collections import deque
from typing import NamedTuple

RESERVATIONS_MAX = 4096
GRACE_S = 5.0
"""Coming back so much later still counts: Retry-After is in whole seconds, and clients add some of their
own."""
EARLY_S = 0.5
RETURN_FIRST, RETURN_WEIGHT = 0.3, 0.05


class RetryReservation(NamedTuple):
    due_s: float
    work_s: float
    """What the request takes of the line."""


class _TenantReservations:
    """The reservations of one tenant."""

    def __init__(self) -> None:
        self.by_key: dict[str, RetryReservation] = {}
        self.in_order: deque[tuple[float, str]] = deque()
        """(due, key), as booked: the due times never fall."""
        self.until_s = 0.0


class RetryReservations:
    """One tenant's do not hold up another's: between them their shares decide."""

    def __init__(self) -> None:
        self._books: dict[str, _TenantReservations] = {}
        self._count = 0
        self.returned_share = RETURN_FIRST
        """The share of those due lately that came."""

    def __len__(self) -> int:
        return self._count

    def expected_s(self, tenant: str, until_s: float) -> float:
        """Work that the tenant's bookings until then will bring: what one of its that arrives now waits
        behind."""
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
        """Seconds until the client should come back: not before `wait_s`, and after those booked before.
        Beyond `most_s` nothing is promised. Key "": it cannot be recognised, so nothing is booked."""
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
        """Whether the request comes back when it was told to."""
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
