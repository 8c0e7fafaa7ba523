"""What the reconciler hears and what it says. Pure values."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from baton.core.ids import WorkerId
from baton.core.messages import Member, Role
from baton.core.operate import FIRST_VERSION, Pool, Version

# --- events ---------------------------------------------------------------------------------------


class SetDesired(msgspec.Struct, frozen=True):
    """All pools; a model that is left out has no replicas. Nothing is kept or started on nodes of `avoid`."""

    pools: tuple[Pool, ...]
    avoid: frozenset[str] = frozenset()
    roles: Mapping[str, Role] = {}
    """Replicas that shall have these roles, in case several could make the pools what they shall be."""
    leaving: frozenset[WorkerId] = frozenset()
    """In the same way, workers that shall go."""


class Adopted(msgspec.Struct, frozen=True):
    """A worker of an earlier control plane was found alive. Before the first SetDesired."""

    worker_id: WorkerId
    model: str
    role: Role
    version: str
    age_s: float = 0.0
    """Since it was started."""


class ReplicaExited(msgspec.Struct, frozen=True):
    """The process is dead, or could not be started. An id that is not the current life: no effect."""

    worker_id: WorkerId
    reason: str


class LeaseLapsed(msgspec.Struct, frozen=True):
    """The directory has not heard from it for a lease."""

    worker_id: WorkerId


class MemberSilent(msgspec.Struct, frozen=True):
    """The directory missed heartbeats of it, and heard others meanwhile."""

    worker_id: WorkerId


class MemberSeen(msgspec.Struct, frozen=True):
    """The directory heard from it, and what it says of itself is new, or it was silent: it serves."""

    member: Member


class DrainWanted(msgspec.Struct, frozen=True):
    """By order: another life follows. A worker that does not serve: no effect."""

    worker_id: WorkerId
    reason: str


class ReconcileTick(msgspec.Struct, frozen=True):
    """The time `next_tick_s` named has come (or an earlier one: harmless)."""


ReconcileEvent = (
    SetDesired
    | Adopted
    | ReplicaExited
    | LeaseLapsed
    | MemberSilent
    | MemberSeen
    | DrainWanted
    | ReconcileTick
)

# --- actions --------------------------------------------------------------------------------------


class StartReplica(msgspec.Struct, frozen=True):
    """Answered by MemberSeen or ReplicaExited; after `start_timeout_s` of neither it is killed."""

    worker_id: WorkerId
    role: Role
    reason: str
    model: str = ""
    version: Version = FIRST_VERSION
    avoid: tuple[str, ...] = ()
    """Nodes."""


class SwitchReplicaRole(msgspec.Struct, frozen=True):
    """Let it finish what it holds, take this role, and serve again. Answered by MemberSeen; killed after
    `drain_timeout_s` and a little. Sent again with another role, the last one counts."""

    worker_id: WorkerId
    role: Role
    reason: str


class DrainReplica(msgspec.Struct, frozen=True):
    """Let it finish what it holds, then end. Killed after `drain_timeout_s`."""

    worker_id: WorkerId
    reason: str


class KillReplica(msgspec.Struct, frozen=True):
    """At once and hard: it may be hanging. Answered by ReplicaExited; repeated until then."""

    worker_id: WorkerId
    reason: str


ReconcileAction = StartReplica | SwitchReplicaRole | DrainReplica | KillReplica


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Seconds. A life that served for `stable_s` ends the row of deaths."""

    backoff_s: float
    backoff_max_s: float
    start_timeout_s: float
    drain_timeout_s: float
    stable_s: float

    def delay_s(self, deaths_in_a_row: int) -> float:
        """Before the start that follows the n-th death in a row (from 1)."""
        doublings = min(deaths_in_a_row - 1, 60)  # 2**60 is beyond any bound, and a float still
        return min(self.backoff_s * 2.0**doublings, self.backoff_max_s)
