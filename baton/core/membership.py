"""Membership by leases: the one book for all that track members by what they last reported. Pure.

A member is there from its first renewal until it leaves or is silent for a whole lease. An id that *left* is
remembered for a while, and a late renewal of it changes nothing; an id that *lapsed* may come back. Before
its lease is over, a member that was silent for `suspect_s` is *suspect*.

The control plane tracks workers by it, the store's directory its nodes, and a router the other routers.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Generic, NamedTuple, TypeVar

Id = TypeVar("Id", bound=Hashable)
Info = TypeVar("Info")


class Renewal(Enum):
    """What a renewal changed."""

    JOINED = auto()
    """It was no member before."""
    CHANGED = auto()
    """It says something new of itself, or was suspect."""
    UNCHANGED = auto()
    LEFT_BEFORE = auto()
    """Its id left a short time ago, so it is no member."""


class Silence(NamedTuple, Generic[Id, Info]):
    """Members whose silence has consequences now."""

    lapsed: dict[Id, Info]
    """Silent for a whole lease: no members any more. With what each said last of itself."""
    suspects: list[Id]
    """Silent for `suspect_s`, while others were heard."""


@dataclass(slots=True)
class _Lease(Generic[Info]):
    info: Info
    ends_s: float
    renewed_s: float
    suspect_at_s: float
    """When silence makes it suspect; inf: it is suspect."""


@dataclass(slots=True)
class MembershipBook(Generic[Id, Info]):
    lease_s: float
    gone_s: float = 0.0
    """An id that left is remembered this long; no message of it may stay under way for longer."""
    suspect_s: float = inf
    """Silence after which a member is suspect."""
    _leases: dict[Id, _Lease[Info]] = field(init=False, default_factory=dict[Id, _Lease[Info]])
    _gone: dict[Id, float] = field(init=False, default_factory=dict[Id, float])

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Id]:
        """The members, in the order in which they joined."""
        return iter(self._leases)

    def __contains__(self, member_id: Id) -> bool:
        return member_id in self._leases

    def __getitem__(self, member_id: Id) -> Info:
        """What the member last said of itself."""
        return self._leases[member_id].info

    def get(self, member_id: Id) -> Info | None:
        lease = self._leases.get(member_id)
        return None if lease is None else lease.info

    def is_suspect(self, member_id: Id) -> bool:
        return self._leases[member_id].suspect_at_s == inf and self.suspect_s < inf

    @property
    def next_tick_s(self) -> float | None:
        """When to call `tick` next; None: not before something else happens."""
        ends_s = [min(lease.ends_s, lease.suspect_at_s) for lease in self._leases.values()]
        return min([*ends_s, *self._gone.values()], default=None)

    def renew(self, member_id: Id, info: Info, *, now_s: float, lease_s: float | None = None) -> Renewal:
        """The member says that it lives. `lease_s`: its own, instead of the book's."""
        if member_id in self._gone:
            return Renewal.LEFT_BEFORE
        known = self._leases.get(member_id)
        was_suspect = known is not None and self.is_suspect(member_id)
        ends_s = now_s + (self.lease_s if lease_s is None else lease_s)
        self._leases[member_id] = _Lease(info, ends_s, now_s, now_s + self.suspect_s)
        if known is None:
            return Renewal.JOINED
        return Renewal.CHANGED if was_suspect or known.info != info else Renewal.UNCHANGED

    def leave(self, member_id: Id, *, now_s: float) -> bool:
        """It said goodbye, or is known to be dead. Returns whether it was a member."""
        if self.gone_s > 0:
            self._gone[member_id] = now_s + self.gone_s
        return self._leases.pop(member_id, None) is not None

    def paused(self, for_s: float) -> None:
        """Whoever keeps this book could not listen for this long: no silence counts for that time."""
        for lease in self._leases.values():
            lease.ends_s += for_s
            lease.renewed_s += for_s
            lease.suspect_at_s += for_s

    def tick(self, now_s: float) -> Silence[Id, Info]:
        """End the leases that are over; nothing else does."""
        self._gone = {member_id: end_s for member_id, end_s in self._gone.items() if end_s > now_s}
        lapsed = {member_id: lease.info for member_id, lease in self._leases.items() if lease.ends_s <= now_s}
        for member_id in lapsed:
            del self._leases[member_id]
        return Silence(lapsed, self._suspect(now_s))

    def _suspect(self, now_s: float) -> list[Id]:
        """Nobody, if nobody at all was heard: then it is rather the keeper of this book that is deaf."""
        due = [member_id for member_id, lease in self._leases.items() if lease.suspect_at_s <= now_s]
        is_deaf = all(now_s - lease.renewed_s >= self.suspect_s for lease in self._leases.values())
        for member_id in due:
            self._leases[member_id].suspect_at_s = now_s + self.suspect_s if is_deaf else inf
        return [] if is_deaf else due

    def check(self) -> None:
        """Raises AssertionError if somebody is a member and has left."""
        assert self._leases.keys().isdisjoint(self._gone)
