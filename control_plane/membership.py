"""The workers and routers that are in the cluster. Pure: events and the time in, changes out.

A worker is a member by lease (`baton.core.membership`). Its id names one process life, so an id that left is
gone for good. An id that lapsed may come back after a pause or a lost network; a caller who wants it dead has
to kill it. A suspect worker is listed as such and gets no new requests.

A router is listed while its watch lasts, since the control plane neither kills nor starts routers here.
"""

from dataclasses import dataclass, field
from math import inf
from typing import assert_never

import msgspec

from baton.core.ids import RouterId, WorkerId
from baton.core.membership import MembershipBook, Renewal
from baton.core.messages import Member, MembershipView
from baton.core.sharing import RouterMember

GONE_LEASES = 10
"""Number of leases for which a departed id is remembered; no message stays under way for that long."""


class LeaseRenewed(msgspec.Struct, frozen=True):
    """A worker renewed its lease. This is also how it becomes a member, and how its fields change."""

    member: Member


class WorkerLeft(msgspec.Struct, frozen=True):
    """The worker left, or its process is known to be dead."""

    worker_id: WorkerId


class RouterWatchStarted(msgspec.Struct, frozen=True):
    """A router began a watch. The number `watch` rises."""

    member: RouterMember
    watch: int


class RouterWatchEnded(msgspec.Struct, frozen=True):
    """The watch with this number has ended. A later one of the same router goes on."""

    router_id: RouterId
    watch: int


class MembershipTick(msgspec.Struct, frozen=True):
    """The time that `next_tick_s` named has come (an earlier one is harmless)."""


class DirectoryPaused(msgspec.Struct, frozen=True):
    """The directory itself could not receive anything for this long, so silence in that time does not
    count."""

    for_s: float


MembershipEvent = (
    LeaseRenewed | WorkerLeft | RouterWatchStarted | RouterWatchEnded | MembershipTick | DirectoryPaused
)


class Appeared(msgspec.Struct, frozen=True):
    """A worker that was no member became one."""

    member: Member


class Updated(msgspec.Struct, frozen=True):
    """The fields of a member changed, or it renewed its lease after it was suspect."""

    member: Member


class Suspected(msgspec.Struct, frozen=True):
    """A member missed heartbeats while others were received."""

    member: Member


class Lapsed(msgspec.Struct, frozen=True):
    """A member was silent for a whole lease."""

    member: Member


class ViewChanged(msgspec.Struct, frozen=True):
    """The view changed. An event yields at most one of these, and it comes last."""

    view: MembershipView


MembershipChange = Appeared | Updated | Suspected | Lapsed | ViewChanged


@dataclass(slots=True)
class ClusterMembership:
    """`directory_life` is unique per process life, so that a version of one life is never compared
    with a version of another."""

    directory_life: str
    lease_s: float
    suspect_s: float = inf
    """Silence after which a worker is suspect."""
    version: int = 0
    _workers: MembershipBook[WorkerId, Member] = field(init=False)
    _routers: dict[RouterId, RouterWatchStarted] = field(
        init=False, default_factory=dict[RouterId, RouterWatchStarted]
    )

    def __post_init__(self) -> None:
        self._workers = MembershipBook(self.lease_s, GONE_LEASES * self.lease_s, self.suspect_s)

    @property
    def next_tick_s(self) -> float | None:
        return self._workers.next_tick_s

    @property
    def view(self) -> MembershipView:
        members = tuple(self._member(worker_id) for worker_id in sorted(self._workers))
        routers = tuple(self._routers[router_id].member for router_id in sorted(self._routers))
        return MembershipView(self.directory_life, self.version, members, routers)

    def _member(self, worker_id: WorkerId) -> Member:
        member = self._workers[worker_id]
        if not self._workers.is_suspect(worker_id):
            return member
        return msgspec.structs.replace(member, is_suspect=True)

    def handle(self, event: MembershipEvent, *, now_s: float) -> list[MembershipChange]:
        match event:
            case LeaseRenewed(member):
                return self._renew(member, now_s)
            case WorkerLeft(worker_id):
                return self._changed() if self._workers.leave(worker_id, now_s=now_s) else []
            case RouterWatchStarted(member):
                before = self._routers.get(member.router_id)
                self._routers[member.router_id] = event
                return self._changed() if before is None or before.member != member else []
            case RouterWatchEnded(router_id, watch):
                known = self._routers.get(router_id)
                if known is None or known.watch != watch:
                    return []
                del self._routers[router_id]
                return self._changed()
            case MembershipTick():
                return self._tick(now_s)
            case DirectoryPaused(for_s):
                self._workers.paused(for_s)
                return []
            case _:
                assert_never(event)

    def _renew(self, member: Member, now_s: float) -> list[MembershipChange]:
        match self._workers.renew(member.worker_id, member, now_s=now_s):
            case Renewal.JOINED:
                return [Appeared(member), *self._changed()]
            case Renewal.CHANGED:
                return [Updated(member), *self._changed()]
            case Renewal.UNCHANGED | Renewal.LEFT_BEFORE:
                return []

    def _tick(self, now_s: float) -> list[MembershipChange]:
        silence = self._workers.tick(now_s)
        if not silence.lapsed and not silence.suspects:
            return []
        lapsed = [Lapsed(member) for member in silence.lapsed.values()]
        suspected = [Suspected(self._member(worker_id)) for worker_id in silence.suspects]
        return [*lapsed, *suspected, *self._changed()]

    def _changed(self) -> list[MembershipChange]:
        self.version += 1
        return [ViewChanged(self.view)]
