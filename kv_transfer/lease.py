"""A lease on granted blocks, as both sides count it. Pure: callers have the clock.

Durations cross the wire, instants do not. The owner counts a lease from each grant. The reader counts the
same lease from when it *sent* the request that the grant answers, which is earlier: so the reader stops
first, whatever clocks and network do. Every request is answered by a grant, every grant starts the lease of
all blocks under the same key anew, and a reader asks again well before its lease ends.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

RENEWALS_PER_LEASE = 3

KeyT = TypeVar("KeyT", bound=Hashable)
ReaderT = TypeVar("ReaderT", bound=Hashable)


class ReaderLease:
    """The reader's side."""

    __slots__ = ("_every_s", "_lease_s", "_sent_s", "end_s", "is_granted", "number", "renew_s")

    def __init__(self, *, lease_s: float, patience_end_s: float) -> None:
        """`lease_s`: what this side takes a lease to be until the owner says less. `patience_end_s`: how long
        to wait for the first grant."""
        self._lease_s, self._every_s = lease_s, lease_s / RENEWALS_PER_LEASE
        self._sent_s: dict[int, float] = {}
        """Number of each request that may still be answered -> when it was sent."""
        self.number = -1
        """Number of the latest request."""
        self.end_s = patience_end_s
        """No read may begin, or count as good, from then on."""
        self.renew_s = patience_end_s
        """When the next request is due."""
        self.is_granted = False

    def request(self, *, now_s: float) -> int:
        """A request is sent now. Returns its number."""
        self.number += 1
        self._sent_s[self.number] = now_s
        self.renew_s = now_s + self._every_s
        return self.number

    def wait_until(self, patience_end_s: float) -> None:
        """Wait longer for the first grant."""
        if not self.is_granted:
            self.end_s = max(self.end_s, patience_end_s)

    def was_sent(self, number: int) -> bool:
        """Whether request `number` may be answered: it was sent, and no later one has been answered."""
        return number in self._sent_s

    def granted(self, number: int, *, lease_s: float, slack_s: float) -> None:
        """A grant of `lease_s` answers request `number`. The reader stops `slack_s` before the lease ends,
        since clocks run differently."""
        sent_s = self._sent_s.get(number)
        if sent_s is None:
            return  # overtaken by a later answer, whose lease ends later
        for older in [n for n in self._sent_s if n < number]:
            del self._sent_s[older]
        end_s = sent_s + lease_s - slack_s
        self.end_s = max(self.end_s, end_s) if self.is_granted else end_s
        self._every_s = min(self._lease_s, lease_s) / RENEWALS_PER_LEASE
        self.renew_s = min(self.renew_s, self._sent_s[self.number] + self._every_s)
        self.is_granted = True


@dataclass(slots=True, eq=False)
class OwnerLease(Generic[KeyT, ReaderT]):
    """The owner's side: what was granted under `key` stays as it is until `end_s`."""

    key: KeyT
    reader: ReaderT | None = None
    """None: nobody has requested the blocks yet."""
    number: int = 0
    """Number of the latest request; grants name it."""
    end_s: float | None = None
    """None: nothing is granted or held."""


class LeaseBook(Generic[KeyT, ReaderT]):
    """The book of which reader may read under which key, and until when.

    A one-sided read cannot be seen by the owner, so a lease lasts until its reader releases it or its time is
    over. What is held for a lease is the caller's: references to blocks of a pool, pins in an arena.
    """

    def __init__(self, *, lease_s: float) -> None:
        self.lease_s = lease_s
        self.expired_count = 0
        """Leases that ended without a release, since the start."""
        self._leases: dict[KeyT, OwnerLease[KeyT, ReaderT]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[OwnerLease[KeyT, ReaderT]]:
        return iter(self._leases.values())

    def __contains__(self, key: KeyT) -> bool:
        return key in self._leases

    @property
    def next_end_s(self) -> float | None:
        return min((lease.end_s for lease in self if lease.end_s is not None), default=None)

    def get(self, key: KeyT) -> OwnerLease[KeyT, ReaderT] | None:
        return self._leases.get(key)

    def count_of(self, reader: ReaderT) -> int:
        return sum(lease.reader == reader for lease in self)

    # --- a lease's life -------------------------------------------------------------------------

    def open(self, key: KeyT) -> OwnerLease[KeyT, ReaderT]:
        assert key not in self._leases
        lease = self._leases[key] = OwnerLease[KeyT, ReaderT](key)
        return lease

    def request(self, key: KeyT, reader: ReaderT, number: int) -> bool:
        """A request of `reader`, whose first one makes the lease its own. False: it is another's."""
        lease = self._leases[key]
        if lease.reader is None:
            lease.reader, lease.number = reader, number
        elif lease.reader != reader:
            return False
        lease.number = max(lease.number, number)
        return True

    def renew(self, key: KeyT, *, now_s: float, longer_s: float = 0.0) -> None:
        """Blocks are granted, or held ready, under this key: the lease of all of them starts anew. `longer_s`
        is for what no reader has asked for yet."""
        self._leases[key].end_s = now_s + self.lease_s + longer_s

    def vacate(self, key: KeyT) -> None:
        """The reader is gone and nothing is held for it: the next reader may begin."""
        lease = self._leases[key]
        lease.reader, lease.end_s = None, None

    def is_of(self, key: KeyT, reader: ReaderT) -> bool:
        lease = self._leases.get(key)
        return lease is not None and lease.reader == reader

    def close(self, key: KeyT) -> None:
        del self._leases[key]

    def expire(self, *, now_s: float, lapse: Callable[[KeyT], None]) -> None:
        """Call `lapse` for every lease whose time is over; it closes or vacates the lease."""
        for lease in list(self._leases.values()):
            if lease.end_s is not None and lease.end_s <= now_s:
                self.expired_count += 1
                lapse(lease.key)

    def check(self) -> None:
        for key, lease in self._leases.items():
            assert lease.key == key
            assert lease.end_s is None or lease.end_s > 0
