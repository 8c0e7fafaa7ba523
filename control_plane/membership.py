"""Who is in the cluster, by leases. Pure: events and the time in, changes out.

A worker is a member from its first renewal until it leaves or lets its lease lapse. A worker id names
one process life, so an id that *left* is gone for good and a late renewal of it changes nothing. An id
that *lapsed* may come back (a pause, a lost network): whoever wants it dead has to kill it. Before its
lease is over, a worker that missed heartbeats is *suspect*: it is listed as such and gets nothing new.

A router is listed while its watch lasts: there is nothing to kill or to start for it here.
"""

from dataclasses import dataclass, field
from math import inf
from typing import assert_never

import msgspec

from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Member, MembershipView
from baton.core.sharing import RouterMember

TOMBSTONE_LEASES = 10
"""A departed id is remembered this many leases; no message stays under way for that long."""


class Renewed(msgspec.Struct, frozen=True):
    """A worker says that it lives; also how it becomes a member and how its fields change."""

    member: Member


class Left(msgspec.Struct, frozen=True):
    """The worker said goodbye, or its process is known to be dead."""

    worker_id: WorkerId


class RouterCame(msgspec.Struct, frozen=True):
    """A router watches. `watch`: number of this watch, which rises."""

    member: RouterMember
    watch: int


class RouterWent(msgspec.Struct, frozen=True):
    """That watch has ended. A later one of the same router goes on."""

    router_id: RouterId
    watch: int


class Tick(msgspec.Struct, frozen=True):
    """The time `next_tick_s` named has come (or an earlier one: harmless)."""


class Paused(msgspec.Struct, frozen=True):
    """The directory itself could not listen for this long: no silence counts for that time."""

    for_s: float


MembershipEvent = Renewed | Left | RouterCame | RouterWent | Tick | Paused


class Appeared(msgspec.Struct, frozen=True):
    """A worker that was no member became one."""

    member: Member


class Updated(msgspec.Struct, frozen=True):
    """A member says something new of itself, or is heard again after it was suspect."""

    member: Member


class Suspected(msgspec.Struct, frozen=True):
    """A member missed heartbeats, while others were heard."""

    member: Member


class Lapsed(msgspec.Struct, frozen=True):
    """A member was silent for a whole lease."""

    member: Member


class ViewChanged(msgspec.Struct, frozen=True):
    """At most one per event, last."""

    view: MembershipView


MembershipChange = Appeared | Updated | Suspected | Lapsed | ViewChanged


@dataclass(slots=True)
class _Lease:
    member: Member
    ends_s: float
    heard_s: float
    suspect_at_s: float
    """When silence makes it suspect; inf: it is."""


@dataclass(slots=True)
class MembershipBook:
    """`directory_life` is unique per process life, so that a version of one life is never compared
    with a version of another."""

    directory_life: str
    lease_s: float
    suspect_s: float = inf
    """Of silence, after which a member is suspect."""
    version: int = 0
    _leases: dict[WorkerId, _Lease] = field(default_factory=dict[WorkerId, _Lease])
    _gone: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    _routers: dict[RouterId, RouterCame] = field(default_factory=dict[RouterId, RouterCame])

    @property
    def next_tick_s(self) -> float | None:
        ends_s = [min(lease.ends_s, lease.suspect_at_s) for lease in self._leases.values()]
        return min([*ends_s, *self._gone.values()], default=None)

    @property
    def view(self) -> MembershipView:
        members = tuple(self._leases[worker_id].member for worker_id in sorted(self._leases))
        routers = tuple(self._routers[router_id].member for router_id in sorted(self._routers))
        return MembershipView(self.directory_life, self.version, members, routers)

    def handle(self, event: MembershipEvent, *, now_s: float) -> list[MembershipChange]:
        match event:
            case Renewed(member):
                return self._renew(member, now_s)
            case Left(worker_id):
                self._gone[worker_id] = now_s + TOMBSTONE_LEASES * self.lease_s
                return self._changed() if self._leases.pop(worker_id, None) else []
            case RouterCame(member):
                before = self._routers.get(member.router_id)
                self._routers[member.router_id] = event
                return self._changed() if before is None or before.member != member else []
            case RouterWent(router_id, watch):
                known = self._routers.get(router_id)
                if known is None or known.watch != watch:
                    return []
                del self._routers[router_id]
                return self._changed()
            case Tick():
                return self._tick(now_s)
            case Paused(for_s):
                for lease in self._leases.values():
                    lease.ends_s += for_s
                    lease.heard_s += for_s
                    lease.suspect_at_s += for_s
                return []
            case _:
                assert_never(event)

    def _renew(self, member: Member, now_s: float) -> list[MembershipChange]:
        if member.worker_id in self._gone:
            return []
        known = self._leases.get(member.worker_id)
        suspect_at_s = now_s + self.suspect_s
        self._leases[member.worker_id] = _Lease(member, now_s + self.lease_s, now_s, suspect_at_s)
        if known is None:
            return [Appeared(member), *self._changed()]
        return [Updated(member), *self._changed()] if known.member != member else []

    def _tick(self, now_s: float) -> list[MembershipChange]:
        self._gone = {w: end_s for w, end_s in self._gone.items() if end_s > now_s}
        lapsed = [lease.member for lease in self._leases.values() if lease.ends_s <= now_s]
        for member in lapsed:
            del self._leases[member.worker_id]
        suspects = self._suspect(now_s)
        if not lapsed and not suspects:
            return []
        changes = [*map(Lapsed, lapsed), *map(Suspected, suspects)]
        return [*changes, *self._changed()]

    def _suspect(self, now_s: float) -> list[Member]:
        """Nobody, if nobody at all was heard: then it is rather this directory that is deaf."""
        due = [lease for lease in self._leases.values() if lease.suspect_at_s <= now_s]
        if due and all(now_s - lease.heard_s >= self.suspect_s for lease in self._leases.values()):
            for lease in due:
                lease.suspect_at_s = now_s + self.suspect_s
            return []
        for lease in due:
            lease.suspect_at_s = inf
            lease.member = msgspec.structs.replace(lease.member, is_suspect=True)
        return [lease.member for lease in due]

    def _changed(self) -> list[MembershipChange]:
        self.version += 1
        return [ViewChanged(self.view)]
