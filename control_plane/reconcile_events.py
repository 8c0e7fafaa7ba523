"""Events and actions of the reconciler. Pure values."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from baton.core.ids import WorkerId
from baton.core.messages import Member, Role
from baton.core.operate import FIRST_VERSION, Pool, Version

# --- events ---------------------------------------------------------------------------------------


class SetDesired(msgspec.Struct, frozen=True):
    """All desired pools; a model that is left out has no replicas. Nothing is kept or started on nodes of
    `avoid`."""

    pools: tuple[Pool, ...]
    avoid: frozenset[str] = frozenset()
    roles: Mapping[str, Role] = {}
    """Replicas that shall have these roles, where several replicas could fill the pools."""
    leaving: frozenset[WorkerId] = frozenset()
    """Workers that shall go, where several workers could."""


class Adopted(msgspec.Struct, frozen=True):
    """A live worker of an earlier control plane was found. This comes before the first SetDesired."""

    worker_id: WorkerId
    model: str
    role: Role
    version: str
    age_s: float = 0.0
    """Seconds since it was started."""


class ReplicaExited(msgspec.Struct, frozen=True):
    """The process is dead, or could not be started. An id that is not the current life has no effect."""

    worker_id: WorkerId
    reason: str


class LeaseLapsed(msgspec.Struct, frozen=True):
    """The worker has not renewed its lease in the directory in time."""

    worker_id: WorkerId


class MemberSilent(msgspec.Struct, frozen=True):
    """The worker missed heartbeats while others were received."""

    worker_id: WorkerId


class MemberSeen(msgspec.Struct, frozen=True):
    """The worker serves: it renewed its lease with changed fields, or after a silence."""

    member: Member


class DrainWanted(msgspec.Struct, frozen=True):
    """An order to drain a worker; another life follows. It has no effect on a worker that does not serve."""

    worker_id: WorkerId
    reason: str


class ReconcileTick(msgspec.Struct, frozen=True):
    """The time that `next_tick_s` named has come (an earlier one is harmless)."""


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
    """Start a process. The answer is MemberSeen or ReplicaExited; after `start_timeout_s` of neither it is
    killed."""

    worker_id: WorkerId
    role: Role
    reason: str
    model: str = ""
    version: Version = FIRST_VERSION
    avoid: tuple[str, ...] = ()
    """Nodes on which it must not run."""


class SwitchReplicaRole(msgspec.Struct, frozen=True):
    """Let a worker finish what it holds, take this role, and serve again. The answer is MemberSeen; the
    worker is killed shortly after `drain_timeout_s`. A later action with another role replaces this one."""

    worker_id: WorkerId
    role: Role
    reason: str


class DrainReplica(msgspec.Struct, frozen=True):
    """Let a worker finish what it holds, then end. It is killed after `drain_timeout_s`."""

    worker_id: WorkerId
    reason: str


class KillReplica(msgspec.Struct, frozen=True):
    """Kill a process at once, since it may hang. The answer is ReplicaExited; the action is repeated until
    then."""

    worker_id: WorkerId
    reason: str


ReconcileAction = StartReplica | SwitchReplicaRole | DrainReplica | KillReplica


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Times in seconds. A life that served for `stable_s` ends the series of deaths."""

    backoff_s: float
    backoff_max_s: float
    start_timeout_s: float
    drain_timeout_s: float
    stable_s: float

    def delay_s(self, deaths_in_a_row: int) -> float:
        """Return the delay before the start that follows the n-th death in a row (from 1)."""
        doublings = min(deaths_in_a_row - 1, 60)  # 2**60 exceeds any bound and is still a float
        return min(self.backoff_s * 2.0**doublings, self.backoff_max_s)
