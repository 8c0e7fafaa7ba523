"""The ranks that hold each expert: a new map, near the one there is.

Shapes: L layers, E experts, R ranks, S slots, N nodes, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from control_plane.experts.balancing import WORK_MAX, Goals, balance
from control_plane.experts.groups import GroupRows, groups_to_nodes
from control_plane.experts.packing import Packing
from control_plane.experts.replicas import LARGE_REPLICA, Counts, reference_load, replica_counts
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
AS_GOOD_AS_NEW = 0.006
"""A rank may have so much more than the busiest would have if everything were placed anew."""
TOO_BUSY = 0.002
"""A row whose busiest rank has so much more than its goal is tried again with smaller replicas."""
MOVED_MAX = 0.35
"""Part of a row's slots that may get another expert in one decision before a balance that a placement from
nothing would have will do: what is left to gain can be had at the next."""
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
    capacity = np.array([rank.slots for rank in ready])
    held = _held(current, ready, layer_count=len(loads), most=int(capacity.max()))
    is_on_two = len(known) > 1 and slot_count >= COPIES_FOR_SAFETY * expert_count
    copies = COPIES_FOR_SAFETY if is_on_two else 1
    rows = GroupRows.of(nodes, capacity, expert_count, group_count, copies) if group_count > 1 else None
    if rows is None:
        slots = _pack(loads, held, np.broadcast_to(capacity, held.shape[:2]).copy(), nodes, least=copies)
        reason = f"over all ranks of {len(known)} nodes"
    else:
        slots = _pack_groups(loads, held, rows)
        reason = f"groups on {len(known)} nodes"
    found = ExpertMap(0, expert_count, tuple(rank.rank_id for rank in ready), read_only(slots))
    return ExpertPlacement(found, balance_of(loads, slots), copies, rows is not None, reason)


def balance_of(loads: Loads, slots: Slots) -> npt.NDArray[np.float64]:
    """The mean load of the ranks over the busiest rank's, as [L], with each expert's load divided evenly
    among its replicas. `slots` is [L, R, S]."""
    layers = np.arange(len(loads))[:, None, None]
    counts = np.zeros((len(loads), loads.shape[1] + 1), dtype=np.int64)
    np.add.at(counts, (layers, slots), 1)
    sizes = np.zeros(counts.shape)
    sizes[:, :EMPTY] = loads / np.maximum(counts[:, :EMPTY], 1)
    rank_loads = sizes[layers, slots].sum(axis=2)
    busiest = rank_loads.max(axis=1)
    return np.where(busiest > 0, rank_loads.mean(axis=1) / np.where(busiest > 0, busiest, 1.0), 1.0)


def _held(current: ExpertMap | None, ready: Sequence[ExpertRank], *, layer_count: int, most: int) -> Slots:
    """What the ready ranks hold now, as [L, R, most], as far as they have slots for it."""
    held = np.full((layer_count, len(ready), most), EMPTY, dtype=np.int32)
    if current is None:
        return held
    index = {rank: number for number, rank in enumerate(current.ranks)}
    assert current.layer_count == layer_count
    for number, rank in enumerate(ready):
        if (at := index.get(rank.rank_id)) is not None:
            experts = -np.sort(-current.slots[:, at], axis=1)[:, : rank.slots]
            held[:, number, : experts.shape[1]] = experts
    return held


def _pack(loads: Loads, slots: Slots, capacity: Counts, nodes: npt.NDArray[np.intp], *, least: int) -> Slots:
    """Pack rows: `loads` [B, E], `slots` [B, R, S], `capacity` [B, R], `nodes` [R]."""
    ready = (capacity > 0).sum(axis=1)
    most = int(ready.min())
    least = min(least, most)
    anew = reference_load(loads, capacity, most=most, least=least)
    packing = Packing(loads, slots, capacity, nodes)
    is_new = ~packing.used.any(axis=1)
    moved_max = np.where(is_new, np.inf, capacity.sum(axis=1) * MOVED_MAX)
    as_if_new = _baseline_load(loads, capacity, anew, most=most, least=least)
    rows, work = np.arange(len(loads)), 0
    for large in LARGE_REPLICA:
        before = packing.placed[:, :EMPTY]
        counts = before.copy()
        counts[rows] = replica_counts(
            loads[rows],
            before[rows],
            capacity[rows].sum(axis=1),
            most=most,
            least=least,
            enough=anew[rows] * large,
        )
        if large != LARGE_REPLICA[0] and (counts == before).all():
            continue
        packing.fill(counts)
        mean = packing.rank_loads.sum(axis=1) / ready
        best = np.maximum(mean, packing.sizes.max(axis=1))
        load = np.maximum(best * (1 + BALANCED), anew * (1 + AS_GOOD_AS_NEW))
        acceptable = np.maximum(load, as_if_new * (1 + AS_GOOD_AS_NEW))
        goals = Goals(load, acceptable, moved_max)
        packing.spread()
        work += balance(packing, goals, work_max=WORK_MAX - work)
        if packing.spread():
            work += balance(packing, goals, work_max=WORK_MAX - work, at_once=False)
        rows = np.nonzero(packing.rank_loads.max(axis=1) > acceptable * (1 + TOO_BUSY))[0]
        if not len(rows):
            break
    return packing.slots


def _baseline_load(loads: Loads, capacity: Counts, anew: Loads, *, most: int, least: int) -> Loads:
    """The busiest rank's load as [B] if everything were placed anew, and an expert might be on a rank several
    times. It differs from `anew` where an expert has more load than a replica on every rank can divide
    well."""
    found = anew.copy()
    total = loads.sum(axis=1)
    rows = np.nonzero(loads.max(axis=1) * capacity.sum(axis=1) > total * most)[0]
    if len(rows):
        slots = int(capacity.sum(axis=1).max())
        found[rows] = reference_load(loads[rows], capacity[rows], most=slots, least=least)
    return np.maximum(found, anew)


def _pack_groups(loads: Loads, held: Slots, rows: GroupRows) -> Slots:
    """Give groups to nodes, then pack what each node has on its ranks."""
    node_groups = groups_to_nodes(loads, held, rows)
    row_loads, row_slots, experts = rows.split(loads, held, node_groups)
    capacity = np.tile(rows.capacity, (len(loads), 1))
    inside = np.zeros(capacity.shape[1], dtype=np.intp)
    packed = _pack(row_loads, row_slots, capacity, inside, least=1)
    return rows.join(packed, experts, len(loads))
