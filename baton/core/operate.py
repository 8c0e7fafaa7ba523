"""What operators, the autoscaler and the dashboard say to the control plane, and what it answers.

Three things are told apart everywhere: what is *desired* (`Pool`), what is *actual* (`ReplicaStatus`,
`NodeState`), and what somebody *ordered* (`Order`), which changes the desired and is kept as a `Decision`.
Durations cross the wire and instants do not, except `Decision.at_s`, which is for people.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum, auto
from hashlib import blake2b

import msgspec

from baton.core.experts import ExpertGroupState
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role
from baton.core.wire_types import SInt64, UInt64

# --- desired --------------------------------------------------------------------------------------


class Version(msgspec.Struct, frozen=True):
    """What a worker is started with beyond the cluster's configuration. Workers of one version are equal."""

    name: str
    sets: tuple[str, ...] = ()
    """Settings on top of the configuration, each as SECTION.FIELD=VALUE like the arguments of `--set`."""


FIRST_VERSION = Version("1")


class Pool(msgspec.Struct, frozen=True):
    """The workers that are wanted for one model."""

    model: str
    """The name that clients use."""
    counts: dict[Role, SInt64]
    """Replicas per role; a role left out has none."""
    version: Version = FIRST_VERSION
    surge_max: SInt64 = 1
    """The most processes beyond `counts` per role while versions are exchanged."""
    unavailable_max: SInt64 = 0
    """The most replicas per role that may be missing meanwhile. It and `surge_max` are not both 0."""

    def count(self, role: Role) -> int:
        return self.counts.get(role, 0)


# --- actual ---------------------------------------------------------------------------------------


class ReplicaState(StrEnum):
    WAITING = auto()
    """There is no process, and one will be started: after a backoff, or when a node has room."""
    STARTING = auto()
    RUNNING = auto()
    SUSPECT = auto()
    """It missed heartbeats, so nothing new is placed there. It runs again, or its lease lapses."""
    SWITCHING = auto()
    """It finishes what it holds, then takes another role. Weights stay loaded."""
    DRAINING = auto()
    """It finishes what it holds, then ends."""
    KILLING = auto()


class ReplicaStatus(msgspec.Struct, frozen=True):
    name: str
    """The name stays over restarts. It says the role of the first start, not the present one."""
    model: str
    role: Role
    """The role that it has or is started in; while it changes its role, the one that it will have."""
    state: ReplicaState
    for_s: float
    """The time in this state."""
    version: str
    worker_id: WorkerId | None = None
    """The worker id of the process; None: there is no process."""
    node: str = ""
    """The node where it runs; empty: not known yet."""
    deaths_in_a_row: int = 0
    """Ends of its process that nobody ordered, since it last served for `cluster.restart_stable_s`. Each one
    doubles the wait before the next start."""
    last_exit: str = ""
    reason: str = ""
    """The cause of the last change of state."""
    address: str = ""
    """The address of its gRPC server."""
    metrics_address: str = ""
    shape: str = ""
    """The arrangement of its process's ranks, see `baton.core.shape`; empty: not known yet."""
    memory: str = ""
    """Where the memory of its process went at its start, in words; empty: not told."""


class NodeState(msgspec.Struct, frozen=True):
    node: str
    """Ray's id of the node."""
    host: str
    is_alive: bool = True
    is_drained: bool = False
    """An order keeps everything new away from the node."""
    cpus: float = 0.0
    gpus: float = 0.0


# --- orders ---------------------------------------------------------------------------------------


class Scale(msgspec.Struct, frozen=True, tag=True):
    """There shall be this many replicas of a role.

    Where another role of the model shrinks at the same time, running workers change roles before any is
    stopped or started.
    """

    role: Role
    count: SInt64
    model: str = ""
    """Empty: the only one."""


class Resize(msgspec.Struct, frozen=True, tag=True):
    """Several roles at once, so that a role that shrinks gives its workers to one that grows.

    Roles that are left out stay as they are.
    """

    counts: dict[Role, SInt64]
    model: str = ""


class SwitchRole(msgspec.Struct, frozen=True, tag=True):
    """This worker shall have this role.

    One replica fewer is wanted in its old role, and one more in the new role.
    """

    worker: str
    """Worker id, or replica name."""
    role: Role


class DrainWorker(msgspec.Struct, frozen=True, tag=True):
    """This worker gets nothing new, finishes or hands over what it has, and ends."""

    worker: str
    """Worker id, or replica name."""
    is_replaced: bool = True
    """Another worker takes its place; False: its pool is one smaller from now on."""


class DrainNode(msgspec.Struct, frozen=True, tag=True):
    """All workers of this node are drained and started elsewhere; nothing is placed there any more."""

    node: str
    """A node's id, or the beginning of one that only one node has, or a host's name."""
    is_undone: bool = False
    """The order before is taken back: the node may be used again."""


class RollOut(msgspec.Struct, frozen=True, tag=True):
    """Exchange the workers of a model for ones of this version, a few at a time.

    An order for the version before takes it back.
    """

    version: Version
    model: str = ""
    surge_max: SInt64 = 1
    unavailable_max: SInt64 = 0


class RebalanceExperts(msgspec.Struct, frozen=True, tag=True):
    """Place the experts of a group anew now, however small the gain."""

    group: str = ""
    """The group's name; empty: the only one."""


class DrainExpertRank(msgspec.Struct, frozen=True, tag=True):
    """Other ranks take over what this expert rank holds, then its process ends. Another one is started,
    unless it is not to be replaced."""

    rank: str
    """The rank's id, or its name without the incarnation."""
    is_replaced: bool = True


class ScaleExperts(msgspec.Struct, frozen=True, tag=True):
    """A group of expert ranks of their own has so many."""

    count: SInt64
    group: str = ""
    """The group's name; empty: the only one."""


Action = (
    Scale
    | Resize
    | SwitchRole
    | DrainWorker
    | DrainNode
    | RollOut
    | RebalanceExperts
    | DrainExpertRank
    | ScaleExperts
)


class Order(msgspec.Struct, frozen=True):
    """An action, and who wants it."""

    action: Action
    who: str
    """The one who orders: "operator NAME", "autoscaler" or "dashboard NAME"."""
    reason: str = ""
    is_advice: bool = False
    """Say what would happen, and change nothing."""


class Outcome(StrEnum):
    ACCEPTED = auto()
    """It is desired from now on; DONE or FAILED follows for what can be finished."""
    REFUSED = auto()
    ADVISED = auto()
    DONE = auto()
    FAILED = auto()


class Decision(msgspec.Struct, frozen=True):
    """One entry of the log of orders. Its outcome and text change while it is under way; its number stays."""

    number: UInt64
    """The number rises by one, also over restarts of the control plane if it finds its record."""
    at_s: float
    """The Unix time of the order."""
    who: str
    reason: str
    action: Action
    outcome: Outcome
    text: str
    """What was refused and what to do, or what happened, for people to read."""
    done_after_s: float | None = None
    """The time from the order to DONE or FAILED."""


class RoleOutlook(msgspec.Struct, frozen=True):
    """The autoscaler's view of one role."""

    role: Role
    demand: float
    forecast: float
    """The upper end of the demand at the time when a replica started now would serve."""
    unit: str
    """The unit of demand and forecast."""
    correction: float
    """A factor on the forecast, learnt from missed objectives."""
    needed: int
    wanted: int
    """The replicas that are wanted after hysteresis, bounds and budgets."""


class AutoscaleState(msgspec.Struct, frozen=True):
    """The autoscaler's view of one model."""

    mode: str
    """on or advise."""
    text: str = ""
    """The reason why nothing is decided; empty: something is."""
    roles: tuple[RoleOutlook, ...] = ()
    start_s: float = 0.0
    """The time that a start takes: as learnt, or as configured before any was seen, like the next two."""
    drain_s: float = 0.0
    switch_s: float = 0.0
    model: str = ""


class RouterState(msgspec.Struct, frozen=True):
    """A router that follows the directory."""

    router_id: RouterId
    address: str
    """The address of its gRPC server, for other routers and for operators who ask about requests."""
    metrics_address: str
    host: str = ""


class ClusterState(msgspec.Struct, frozen=True):
    """The whole cluster at one moment."""

    life: str
    """The life of the control plane: another one means that it was started anew."""
    pools: tuple[Pool, ...]
    replicas: tuple[ReplicaStatus, ...]
    nodes: tuple[NodeState, ...] = ()
    decisions: tuple[Decision, ...] = ()
    """The latest decisions, oldest first."""
    is_settled: bool = False
    """The cluster has what is desired, and nothing else."""
    autoscale: tuple[AutoscaleState, ...] = ()
    """The autoscaler's view of each model; empty: only operators scale the cluster."""
    routers: tuple[RouterState, ...] = ()
    experts: tuple[ExpertGroupState, ...] = ()
    """The groups of expert ranks; empty: every worker holds all experts of its model."""

    def pool(self, model: str) -> Pool | None:
        """The pool of this model, or the only one."""
        return pool_of(self.pools, model)

    def replica(self, worker: str, *, model: str = "") -> ReplicaStatus | None:
        """The replica with this worker id or name.

        Within a model, the name may lack the model's part.
        """
        mine = [r for r in self.replicas if model in ("", r.model)]
        prefix = replica_prefix(model, (pool.model for pool in self.pools))
        names = (worker, prefix + worker) if model else (worker,)
        return next((r for r in mine if r.worker_id in names or r.name in names), None)


def pool_of(pools: Sequence[Pool], model: str) -> Pool | None:
    """The pool of this model, or the only one."""
    if not model and len(pools) == 1:
        return pools[0]
    return next((pool for pool in pools if pool.model == model), None)


def replica_prefix(model: str, models: Iterable[str]) -> str:
    """The beginning of the names of a model's replicas, where there are several models.

    Signs become dashes. Where names of `models` differ in signs only, those that lost some get a digest too.
    """
    plain = _dashed(model)
    is_alone = plain == model or all(_dashed(other) != plain for other in models if other != model)
    return plain + ("-" if is_alone else f"-{blake2b(model.encode(), digest_size=3).hexdigest()}-")


def has_ambiguous_names(models: Collection[str]) -> bool:
    """Some of them can hardly be told apart by the names of their replicas."""
    return len({_dashed(model) for model in models}) < len(models)


def _dashed(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-")
