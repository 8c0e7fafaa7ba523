"""What expert ranks, the workers that use them, and the control plane say to each other.

An expert rank is a process that holds routed experts of a model and computes the rows that workers send it.
The ranks of one pool of one model are a *group*, which has one placement map with an epoch. Ranks and callers
(the processes of workers that send rows) each keep a stream to the control plane open. Rows never pass
through it.

An expert is named by one number, `layer * expert_count + expert`, with layers counted from 0 among those of
the model that have experts.
"""

from enum import StrEnum, auto

import msgspec

from baton.core.ids import ExpertRankId, WorkerId
from baton.core.wire_types import UInt64


def group_name(model: str, role: str) -> str:
    """The group of the expert ranks that the workers of a pool use: "decode of MODEL"."""
    return f"{role} of {model}"


def lone_rank_text(group: str, parallel: str) -> str:
    """What a group of one rank means, and what to do. `parallel`: see `experts.parallel`; empty: unknown."""
    more = "add workers to the pool, or " if parallel == "workers" else ""
    return (
        f"all experts of {group} are on one rank, and if it is lost its workers are parked until a successor "
        f"has started: {more}use --experts 2 or more with experts.replicas=2"
    )


class ExpertRankRef(msgspec.Struct, frozen=True):
    """An expert rank as those must know it who connect to it."""

    rank_id: ExpertRankId
    host: str
    """The host's name."""
    socket: str
    """Name of an abstract Unix socket, for those of the same host."""
    address: str
    """HOST:PORT, for the others."""
    secret: str
    """What callers show, so that no other process of the network sends rows."""


# --- expert rank -> control plane -----------------------------------------------------------------


class ExpertRankHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a rank, and again whenever it connects anew."""

    ref: ExpertRankRef
    group: str
    node: str
    """Id of the node where it runs."""
    pid: int
    layer_count: int
    expert_count: int
    expert_bytes: UInt64
    """Size of one expert of one layer in memory."""
    slots: int
    """Experts of each layer that the rank has memory for, without the memory in which it loads new ones."""
    held: tuple[int, ...] = ()
    """Experts that it holds."""
    group_count: int = 1
    """Groups of experts that the model's router is limited by; 1: it is not."""
    slots_max: int = 0
    """Experts of each layer that its memory holds at most, as after the loss of other ranks; 0: all."""


class ExpertLoaded(msgspec.Struct, frozen=True, tag=True):
    load_id: UInt64
    expert: int
    is_copied: bool = False
    """It came from another rank's memory, and not from the model's files."""


class ExpertLoadFailed(msgspec.Struct, frozen=True, tag=True):
    load_id: UInt64
    expert: int
    reason: str
    is_full: bool = False
    """The rank has no memory for it, and is well otherwise."""


class ExpertRankBeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, ten times a second."""

    rows: UInt64
    """Rows computed since the rank started; a row that goes to two experts counts twice."""
    busy_s: float
    """Time spent computing since the rank started."""


ExpertRankReport = ExpertRankHello | ExpertLoaded | ExpertLoadFailed | ExpertRankBeat

# --- control plane -> expert rank -----------------------------------------------------------------


class ExpertLoadOrder(msgspec.Struct, frozen=True, tag=True):
    """Load an expert beside the work. ExpertLoaded or ExpertLoadFailed answers it."""

    load_id: UInt64
    expert: int
    source: ExpertRankRef | None = None
    """A rank to copy it from; None: the model's files."""


class ExpertDropOrder(msgspec.Struct, frozen=True, tag=True):
    """Give up the memory of an expert, loaded or being loaded. No caller sends rows for it any more."""

    expert: int


class ExpertRankRetired(msgspec.Struct, frozen=True, tag=True):
    """The rank is in no map any more, and its process shall end."""

    reason: str


ExpertRankOrder = ExpertLoadOrder | ExpertDropOrder | ExpertRankRetired

# --- caller -> control plane ----------------------------------------------------------------------


class ExpertCallerHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a caller, and again whenever it connects anew."""

    caller: str
    """Worker id and rank: "decode-0.1f3a/0"."""
    worker_id: WorkerId
    group: str
    epoch: UInt64
    """Epoch of the map that it uses; 0: none."""


class ExpertEpochUsed(msgspec.Struct, frozen=True, tag=True):
    """The caller sends and waits for no rows by maps of earlier epochs any more."""

    epoch: UInt64


class ExpertCountsReport(msgspec.Struct, frozen=True, tag=True):
    """Tokens that were sent to each expert since the last report, by expert number."""

    layer_count: int
    expert_count: int
    counts: tuple[UInt64, ...]


class ExpertRankSuspected(msgspec.Struct, frozen=True, tag=True):
    """A rank did not answer this caller, which sends it no rows until a new map names it again."""

    rank_id: ExpertRankId
    is_gone: bool
    """Its process closed the connection, rather than being silent."""
    reason: str


ExpertCallerReport = ExpertCallerHello | ExpertEpochUsed | ExpertCountsReport | ExpertRankSuspected

# --- control plane -> caller ----------------------------------------------------------------------


class ExpertMapRank(msgspec.Struct, frozen=True):
    """A rank, and the experts that callers may send it rows for."""

    ref: ExpertRankRef
    experts: tuple[int, ...]


class ExpertMapUpdate(msgspec.Struct, frozen=True, tag=True):
    """The map that callers shall use from now on. A map that names no rank for an expert is announced too:
    callers wait for the next one where they need it."""

    epoch: UInt64
    layer_count: int
    expert_count: int
    ranks: tuple[ExpertMapRank, ...]


ExpertCallerOrder = ExpertMapUpdate

# --- for operators --------------------------------------------------------------------------------


class ExpertRankPhase(StrEnum):
    STARTING = auto()
    READY = auto()
    DRAINING = auto()
    """Other ranks take over what it holds."""
    LOST = auto()
    """It did not answer, or its process ended. Its successor starts."""


class ExpertRankStatus(msgspec.Struct, frozen=True):
    name: str
    """The name stays over restarts."""
    rank_id: ExpertRankId
    phase: ExpertRankPhase
    node: str
    host: str
    slots: int
    """Experts of each layer that it has memory for."""
    held: int
    """Experts that it holds, over all layers."""
    loading: int
    """Experts that it was ordered to load."""
    load: float
    """Its part of the tokens that the group's experts get now, by the map and the decayed counts; 1 / ranks
    would be even."""
    rows: UInt64
    """Rows computed since it started."""
    busy_s: float
    """Time spent computing since it started."""
    for_s: float
    """The time in this phase."""
    slots_max: int = 0
    """Experts of each layer that its memory holds at most; 0: all."""


class ExpertGroupState(msgspec.Struct, frozen=True):
    """One pool's expert ranks at one moment."""

    group: str
    model: str
    role: str
    epoch: UInt64
    layer_count: int
    expert_count: int
    ranks: tuple[ExpertRankStatus, ...]
    wanted_ranks: int
    replicas_min: int
    """Ranks that hold the expert which fewest hold; 0: rows for some expert wait."""
    replicas_mean: float
    missing: int
    """Experts of all layers that no rank holds."""
    single: int
    """Experts of all layers that one rank holds alone."""
    balance: float
    """The mean load of ranks over the busiest rank's, as the mean over layers; 1 if there was no load."""
    balance_worst: float
    """The same of the layer that has the least."""
    balance_worst_layer: int
    expert_replicas: tuple[int, ...] = ()
    """Replicas by expert number, where layers and experts are at most 4,096 together; else empty."""
    expert_loads: tuple[float, ...] = ()
    """Decayed counts by expert number, likewise."""
    loads_running: int = 0
    """Experts that ranks load now."""
    migrations: UInt64 = 0
    """Experts loaded since the control plane started, beyond each group's first placement."""
    migrated_bytes: UInt64 = 0
    copied: UInt64 = 0
    """Experts that ranks copied from other ranks' memory since the control plane started."""
    losses: UInt64 = 0
    """Ranks lost since the control plane started."""
    rebalances: UInt64 = 0
    """Placements decided since the control plane started."""
    callers: int = 0
    """Processes of workers that use the group."""
    is_ready: bool = False
    """Every expert has a replica."""
    lacks_memory: bool = False
    """The ranks that are there cannot hold all experts. The rest is loaded when another one has come."""
