"""What operators, the autoscaler and the dashboard say to the control plane, and what it answers.

Three things are told apart everywhere: what is *desired* (`Pool`), what is *actual* (`ReplicaState`,
`NodeState`), and what somebody *ordered* (`Order`), which changes the desired and is kept as a `Decision`.
Durations cross the wire, instants do not, but for `Decision.at_s`, which is for people.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum, auto
from hashlib import blake2b

import msgspec

from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role
from baton.core.wire_types import SInt64, UInt64

# --- desired --------------------------------------------------------------------------------------


class Version(msgspec.Struct, frozen=True):
    """What a worker is started with, beyond the cluster's configuration. Workers of one name are equal."""

    name: str
    sets: tuple[str, ...] = ()
    """SECTION.FIELD=VALUE, as `--set` takes them; on top of the configuration."""


FIRST_VERSION = Version("1")


class Pool(msgspec.Struct, frozen=True):
    """What is wanted of one model."""

    model: str
    """The name that clients use."""
    counts: dict[Role, SInt64]
    """Replicas per role; a role left out has none."""
    version: Version = FIRST_VERSION
    surge_max: SInt64 = 1
    """Processes beyond `counts` per role while versions are exchanged."""
    unavailable_max: SInt64 = 0
    """Replicas per role that may be missing meanwhile. Not both 0."""

    def count(self, role: Role) -> int:
        return self.counts.get(role, 0)


# --- actual ---------------------------------------------------------------------------------------


class ReplicaPhase(StrEnum):
    WAITING = auto()
    """No process; one will be started (backoff after a death, or no node has room)."""
    STARTING = auto()
    RUNNING = auto()
    SUSPECT = auto()
    """It missed heartbeats: nothing new is placed there. It runs again, or its lease lapses."""
    FLIPPING = auto()
    """It finishes what it holds, then takes another role. Weights stay loaded."""
    DRAINING = auto()
    """It finishes what it holds, then ends."""
    KILLING = auto()


class ReplicaState(msgspec.Struct, frozen=True):
    name: str
    """Stable over restarts. Says the role it was first started in, not the one it has."""
    model: str
    role: Role
    """The one it has, or is started in; of a flipping one, the one that it will have."""
    phase: ReplicaPhase
    for_s: float
    """In this phase."""
    version: str
    worker_id: WorkerId | None = None
    """Of the process; None: there is none."""
    node: str = ""
    """Where it runs; empty: not known yet."""
    deaths_in_a_row: int = 0
    last_exit: str = ""
    why: str = ""
    """The cause of the last change of phase."""
    address: str = ""
    """gRPC."""
    metrics_address: str = ""


class NodeState(msgspec.Struct, frozen=True):
    node: str
    """Ray's id of it."""
    host: str
    is_alive: bool = True
    is_drained: bool = False
    """Nothing is placed there by order."""
    cpus: float = 0.0
    gpus: float = 0.0


# --- orders ---------------------------------------------------------------------------------------


class Scale(msgspec.Struct, frozen=True, tag=True):
    """There shall be so many replicas of a role. Where another role of the model shrinks at the same time,
    running workers change roles before any is stopped or started."""

    role: Role
    count: SInt64
    model: str = ""
    """Empty: the only one."""


class Resize(msgspec.Struct, frozen=True, tag=True):
    """Several roles at once, so that one that shrinks and one that grows become flips. Roles that are left
    out stay as they are."""

    counts: dict[Role, SInt64]
    model: str = ""


class Flip(msgspec.Struct, frozen=True, tag=True):
    """This worker shall have this role; one replica fewer is wanted of its old role, one more of the new."""

    worker: str
    """Worker id, or replica name."""
    role: Role


class Drain(msgspec.Struct, frozen=True, tag=True):
    """This worker gets nothing new, finishes or hands over what it has, and ends."""

    worker: str
    """Worker id, or replica name."""
    is_replaced: bool = True
    """False: its pool is one smaller from now on."""


class DrainNode(msgspec.Struct, frozen=True, tag=True):
    """All workers of this node are drained and started elsewhere, nothing is placed there any more."""

    node: str
    """Id, or the beginning of one that only one node has; or a host's name."""
    is_undone: bool = False
    """The node may be used again."""


class RollOut(msgspec.Struct, frozen=True, tag=True):
    """Exchange the workers of a model for ones of this version, a few at a time. The version before, ordered
    again, takes it back."""

    version: Version
    model: str = ""
    surge_max: SInt64 = 1
    unavailable_max: SInt64 = 0


Action = Scale | Resize | Flip | Drain | DrainNode | RollOut


class Order(msgspec.Struct, frozen=True):
    action: Action
    who: str
    """"operator NAME", "autoscaler", "dashboard NAME"."""
    why: str = ""
    is_advice: bool = False
    """Say what would happen, and change nothing."""


class Outcome(StrEnum):
    ACCEPTED = auto()
    """Desired from now on; `DONE` or `FAILED` follows for what can be finished."""
    REFUSED = auto()
    ADVISED = auto()
    DONE = auto()
    FAILED = auto()


class Decision(msgspec.Struct, frozen=True):
    """One entry of the log. Its outcome and text change while it is under way; its number does not."""

    number: UInt64
    """Rises by one; also over the control plane's restarts, if it finds its record."""
    at_s: float
    """Unix time."""
    who: str
    why: str
    action: Action
    outcome: Outcome
    text: str
    """For people: what was refused and what to do, or what happened."""
    done_after_s: float | None = None
    """From the order to DONE or FAILED."""


class RoleOutlook(msgspec.Struct, frozen=True):
    """What the autoscaler makes of one role."""

    role: Role
    demand: float
    forecast: float
    """When a replica started now would serve, at its upper end."""
    unit: str
    """Of both."""
    correction: float
    """Factor on the forecast, learnt from objectives missed."""
    needed: int
    wanted: int
    """Hysteresis, bounds and budgets applied."""


class AutoscaleState(msgspec.Struct, frozen=True):
    mode: str
    """on | advise"""
    text: str = ""
    """Why nothing is decided; empty: it is."""
    roles: tuple[RoleOutlook, ...] = ()
    start_s: float = 0.0
    """As learnt, or as configured before any was seen; so for the other two."""
    drain_s: float = 0.0
    flip_s: float = 0.0
    model: str = ""


class RouterState(msgspec.Struct, frozen=True):
    """A router that follows the directory."""

    router_id: RouterId
    address: str
    """gRPC: other routers, and who asks for the stories of requests."""
    metrics_address: str
    host: str = ""


class ClusterState(msgspec.Struct, frozen=True):
    """All of it, at one moment."""

    life: str
    """Of the control plane: another one means that it was started anew."""
    pools: tuple[Pool, ...]
    replicas: tuple[ReplicaState, ...]
    nodes: tuple[NodeState, ...] = ()
    decisions: tuple[Decision, ...] = ()
    """The latest, oldest first."""
    is_settled: bool = False
    """What is desired is there, and nothing else."""
    autoscale: tuple[AutoscaleState, ...] = ()
    """Of each model. Empty: nobody scales it but those who operate it."""
    routers: tuple[RouterState, ...] = ()

    def pool(self, model: str) -> Pool | None:
        """Of this model, or of the only one."""
        return pool_of(self.pools, model)

    def replica(self, worker: str, *, model: str = "") -> ReplicaState | None:
        """By worker id or replica name; of one model also without the model's part of the name."""
        mine = [r for r in self.replicas if model in ("", r.model)]
        prefix = replica_prefix(model, (pool.model for pool in self.pools))
        names = (worker, prefix + worker) if model else (worker,)
        return next((r for r in mine if r.worker_id in names or r.name in names), None)


def pool_of(pools: Sequence[Pool], model: str) -> Pool | None:
    """Of this model, or of the only one."""
    if not model and len(pools) == 1:
        return pools[0]
    return next((pool for pool in pools if pool.model == model), None)


def replica_prefix(model: str, models: Iterable[str]) -> str:
    """What names of a model's replicas begin with, where there are several models. Where names of `models`
    differ in signs only, which become dashes, those that lost some get a digest too."""
    plain = _dashed(model)
    is_alone = plain == model or all(_dashed(other) != plain for other in models if other != model)
    return plain + ("-" if is_alone else f"-{blake2b(model.encode(), digest_size=3).hexdigest()}-")


def has_likenesses(models: Collection[str]) -> bool:
    """Some of them can hardly be told apart by the names of their replicas."""
    return len({_dashed(model) for model in models}) < len(models)


def _dashed(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-")
