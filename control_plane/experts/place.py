"""The ranks that hold each expert: a new map, near the one there is.

Shapes: L layers, E experts, R ranks, S slots, N nodes, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from control_plane.experts.balancing import Goals, balance
from control_plane.experts.groups import GroupRows, groups_to_nodes
from control_plane.experts.packing import Packing
from control_plane.experts.replicas import (
    LARGE_REPLICA,
    Counts,
    Most,
    load_per_replica_min,
    reference_load,
    replica_counts,
)
from control_plane.experts.returns import bring_back
from control_plane.experts.speeds import slots_to_use, speeds_of
from control_plane.experts.values import (
    EMPTY,
    ExpertMap,
    ExpertRank,
    ExpertRankState,
    ExpertsDoNotFit,
    Loads,
    Slots,
    read_only,
)

BALANCED = 0.008
"""A rank may have so much more than the mean, or than the largest replica, before anything moves for
balance."""
AS_GOOD_AS_NEW = 0.007
"""A rank may have so much more than the busiest would have if everything were placed anew."""
TOO_BUSY = 0.002
"""A row whose busiest rank has so much more than its goal is tried again with smaller replicas."""
MOVED_MAX = 0.35
"""Part of a row's slots that may get another expert in one decision before a balance that a placement from
nothing would have will do: what is left to gain can be had at the next."""
ATTEMPT_WORK_MAX = 2_500_000, 3_500_000, 4_500_000
"""Work (`balancing.WORK_MAX`) until the end of each attempt, with ever smaller replicas."""
FEW_SLOTS, FEW_SLOTS_WORK_MAX = 3, 6_500_000
"""Ranks of so few experts have the most exchanges to make, and smaller replicas seldom help them: the first
attempt may take all of this work."""
COPIES_FOR_SAFETY = 2


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """A map that is to be reached."""

    map: ExpertMap
    """Its epoch is 0: epochs are given by whoever carries the placement out."""
    balance: npt.NDArray[np.float64]
    """[L]: the mean load of the ranks over that of the busiest; 1 for a layer without load."""
    copies: int
    """Replicas that every expert has at least. With two, they are on two nodes where that can be reached."""
    has_whole_groups: bool
    """Whether all experts of a group are on one node."""
    reason: str


def place(
    loads: Loads, ranks: Sequence[ExpertRank], *, current: ExpertMap | None = None, group_count: int = 1
) -> ExpertPlacement:
    """Place all experts on the ranks that are ready.

    `loads` is [L, E]. `group_count` is the number of groups that the model's router is limited by, 1 if it is
    not; the experts of a group follow one another. The same arguments give the same map. Raises
    ExpertsDoNotFit.
    """
    ready = [rank for rank in ranks if rank.state is ExpertRankState.READY]
    expert_count = loads.shape[1]
    slot_count = sum(rank.slots for rank in ready)
    if slot_count < expert_count:
        missing = expert_count - slot_count
        raise ExpertsDoNotFit(missing_slots=missing, expert_count=expert_count, rank_count=len(ready))
    known = sorted({rank.node_id for rank in ready})
    nodes = np.array([known.index(rank.node_id) for rank in ready])
    speeds = speeds_of(ready)
    is_on_two = len(ready) > 1 and slot_count >= COPIES_FOR_SAFETY * expert_count
    copies = COPIES_FOR_SAFETY if is_on_two else 1
    full = np.array([rank.slots for rank in ready])
    used = slots_to_use(full, speeds, needed=copies * expert_count)
    rows, capacity = None, used
    for tried in (used, full) if group_count > 1 else ():
        if rows := GroupRows.of(nodes, tried, speeds, expert_count, group_count, copies):
            capacity = tried
            break
    held = _held(current, ready, capacity, layer_count=len(loads))
    if rows is None:
        of_rows = np.tile(capacity, (len(loads), 1)), np.tile(speeds, (len(loads), 1))
        slots = _pack(loads, held, *of_rows, nodes, least=copies)
        reason = f"over all ranks of {len(known)} nodes"
    else:
        slots = _pack_groups(loads, held, rows)
        reason = f"groups on {len(known)} nodes"
    found = ExpertMap(0, expert_count, tuple(rank.rank_id for rank in ready), read_only(slots))
    return ExpertPlacement(found, balance_of(loads, slots, speeds), copies, rows is not None, reason)


def balance_of(loads: Loads, slots: Slots, speeds: Loads | None = None) -> npt.NDArray[np.float64]:
    """The least possible load of the busiest rank over its load, as [L], with each expert's load divided
    evenly among its replicas. A rank's load is what it has to compute over its speed. `slots` is [L, R, S],
    `speeds` [R]; all are alike if it is left out."""
    layers = np.arange(len(loads))[:, None, None]
    counts = np.zeros((len(loads), loads.shape[1] + 1), dtype=np.int64)
    np.add.at(counts, (layers, slots), 1)
    sizes = np.zeros(counts.shape)
    sizes[:, :EMPTY] = loads / np.maximum(counts[:, :EMPTY], 1)
    held = sizes[layers, slots].sum(axis=2)
    busiest = (held if speeds is None else held / (speeds / speeds.mean())).max(axis=1)
    return np.where(busiest > 0, held.mean(axis=1) / np.where(busiest > 0, busiest, 1.0), 1.0)


def _held(
    current: ExpertMap | None, ready: Sequence[ExpertRank], capacity: Counts, *, layer_count: int
) -> Slots:
    """What the ready ranks hold now, as [L, R, S], as far as they have slots for it."""
    held = np.full((layer_count, len(ready), int(capacity.max())), EMPTY, dtype=np.int32)
    if current is None:
        return held
    index = {rank: number for number, rank in enumerate(current.ranks)}
    assert current.layer_count == layer_count
    for number, rank in enumerate(ready):
        if (at := index.get(rank.rank_id)) is not None:
            experts = -np.sort(-current.slots[:, at], axis=1)[:, : capacity[number]]
            held[:, number, : experts.shape[1]] = experts
    return held


def _pack(
    loads: Loads,
    slots: Slots,
    capacity: Counts,
    speeds: Loads,
    nodes: npt.NDArray[np.intp],
    *,
    least: int,
    of_layer: int = 1,
) -> Slots:
    """Pack rows: `loads` [B, E], `slots` [B, R, S], `capacity` and `speeds` [B, R], `nodes` [R]. So many
    rows after one another are `of_layer`: none needs to be better than the one with the busiest rank."""
    ready = (capacity > 0).sum(axis=1)
    most = np.full((len(loads), 1), ready.min())
    least = min(least, int(ready.min()))
    of_ready = np.where(capacity > 0, speeds, 0.0)
    per_load = 1 / np.where(capacity > 0, speeds, 1.0)
    smallest = load_per_replica_min(loads, capacity.sum(axis=1), most=most, least=least)
    anew, as_if_new = _loads_anew(loads, capacity, per_load, smallest, most=most, least=least)
    anew, as_if_new = _busiest(anew, of_layer), _busiest(as_if_new, of_layer)
    held = slots.copy()
    packing = Packing(loads, slots, capacity, nodes, per_load)
    is_new = ~packing.used.any(axis=1)
    moved_max = np.where(is_new, np.inf, capacity.sum(axis=1) * MOVED_MAX)
    mean, fastest = loads.sum(axis=1) / of_ready.sum(axis=1), 1 / of_ready.max(axis=1)
    rows, work, acceptable = np.arange(len(loads)), 0, anew
    is_few = slots.shape[2] <= FEW_SLOTS
    limits = [FEW_SLOTS_WORK_MAX if is_few else work_max for work_max in ATTEMPT_WORK_MAX]
    for large, work_max in zip(LARGE_REPLICA, limits, strict=True):
        before = packing.placed[:, :EMPTY]
        counts = before.copy()
        counts[rows] = replica_counts(
            loads[rows],
            before[rows],
            capacity[rows].sum(axis=1),
            smallest[rows],
            most=most[rows],
            least=least,
            enough=anew[rows] * large,
        )
        packing.fill(counts)
        best = _busiest(np.maximum(mean, packing.sizes.max(axis=1) * fastest), of_layer)
        load = np.maximum(best * (1 + BALANCED), anew * (1 + AS_GOOD_AS_NEW))
        acceptable = np.maximum(load, as_if_new * (1 + AS_GOOD_AS_NEW))
        goals = Goals(load, acceptable, moved_max)
        packing.spread()
        work += balance(packing, goals, work_max=work_max - work)
        if packing.spread():
            work += balance(packing, goals, work_max=work_max - work, at_once=False)
        rows = np.nonzero(packing.rank_loads.max(axis=1) > acceptable * (1 + TOO_BUSY))[0]
        if not len(rows) or work >= limits[-1]:
            break
    bring_back(packing, held, np.nonzero(packing.moved > moved_max)[0], acceptable)
    return packing.slots


def _busiest(loads: Loads, of_layer: int) -> Loads:
    """The largest of the loads of a layer's rows, for each row: both [B]."""
    return loads.reshape(-1, of_layer).max(axis=1).repeat(of_layer)


def _loads_anew(
    loads: Loads, capacity: Counts, per_load: Loads, smallest: Loads, *, most: Most, least: int
) -> tuple[Loads, Loads]:
    """The busiest rank's load as [B] if everything were placed anew, and the same if an expert might be on a
    rank several times, as in the baseline. They differ where an expert has more load than a replica on every
    rank can divide well."""
    slots = capacity.sum(axis=1)
    rows = np.nonzero(loads.max(axis=1) * slots > loads.sum(axis=1) * most[:, 0])[0]
    both = np.concatenate([np.arange(len(loads)), rows])
    often = np.full((len(rows), 1), slots.max(initial=0))
    less = load_per_replica_min(loads[rows], slots[rows], most=often, least=least)
    smallest, most = np.concatenate([smallest, less]), np.concatenate([most, often])
    found = reference_load(loads[both], capacity[both], per_load[both], smallest, most=most, least=least)
    anew = found[: len(loads)]
    as_if_new = anew.copy()
    as_if_new[rows] = np.maximum(found[len(loads) :], anew[rows])
    return anew, as_if_new


def _pack_groups(loads: Loads, held: Slots, rows: GroupRows) -> Slots:
    """Give groups to nodes, then pack what each node has on its ranks."""
    node_groups = groups_to_nodes(loads, held, rows)
    row_loads, row_slots, experts = rows.split(loads, held, node_groups)
    capacity = np.tile(rows.capacity, (len(loads), 1))
    inside = np.zeros(capacity.shape[1], dtype=np.intp)
    speeds = np.tile(rows.speeds, (len(loads), 1))
    packed = _pack(row_loads, row_slots, capacity, speeds, inside, least=1, of_layer=len(rows.ranks))
    return rows.join(packed, experts, len(loads))
