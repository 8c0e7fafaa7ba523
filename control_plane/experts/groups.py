"""Groups of experts on nodes, where a model's router chooses experts of few groups: a token's rows then go to
few nodes.

Shapes: L layers, E experts, G groups, N nodes, R ranks, M ranks of the node that has most, S slots, K groups
of a node.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from control_plane.experts.balancing import Goals, balance
from control_plane.experts.packing import Packing
from control_plane.experts.replicas import Counts, reference_load
from control_plane.experts.values import EMPTY, Loads, Slots

GROUP_BALANCED = 0.004
"""A node may have so much more than the busiest would have if groups were placed anew, or than the mean."""

Groups = npt.NDArray[np.int32]
"""[L, N, K]: the groups of each node."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupRows:
    """One row for each node of each layer, over the experts and the ranks of that node."""

    ranks: npt.NDArray[np.intp]
    """[N, M]: the ranks of each node; the number of all ranks where a node has fewer."""
    capacity: Counts
    """[N, M]: their slots; 0 where a node has fewer ranks."""
    speeds: Loads
    """[N, M]: their speeds."""
    rank_count: int
    group_count: int
    group_size: int
    groups_of_node: int
    copies: int
    """Nodes that hold each group."""

    @staticmethod
    def of(
        nodes: npt.NDArray[np.intp],
        capacity: Counts,
        speeds: Loads,
        expert_count: int,
        group_count: int,
        copies: int,
    ) -> "GroupRows | None":
        """None if groups cannot be divided evenly among the nodes, or a node has too few slots for its
        share."""
        node_count = int(nodes.max(initial=0)) + 1
        if node_count == 1 or expert_count % group_count or (copies * group_count) % node_count:
            return None
        most = int(np.bincount(nodes).max())
        ranks = np.full((node_count, most), len(nodes), dtype=np.intp)
        for node in range(node_count):
            of_node = np.nonzero(nodes == node)[0]
            ranks[node, : len(of_node)] = of_node
        sizes = np.append(capacity, 0)[ranks]
        group_size, groups_of_node = expert_count // group_count, copies * group_count // node_count
        if int(sizes.sum(axis=1).min()) < groups_of_node * group_size:
            return None
        of_ranks = np.append(speeds, 0.0)[ranks]
        return GroupRows(ranks, sizes, of_ranks, len(nodes), group_count, group_size, groups_of_node, copies)

    def split(self, loads: Loads, held: Slots, groups: Groups) -> tuple[Loads, Slots, Slots]:
        """The loads [L·N, K·E/G] and slots [L·N, M, S] of all rows, in which experts are numbered within
        their row, and the experts of these numbers as [L·N, K·E/G]."""
        layers, node_count = len(loads), len(self.ranks)
        experts = groups[:, :, :, None] * self.group_size + np.arange(self.group_size, dtype=np.int32)
        experts = experts.reshape(layers, node_count, -1)
        row_loads = loads[np.arange(layers)[:, None, None], experts] / self.copies
        number = np.full((layers, node_count, loads.shape[1] + 1), EMPTY, dtype=np.int32)
        index = np.arange(experts.shape[2], dtype=np.int32)
        np.put_along_axis(number, experts.astype(np.intp), np.broadcast_to(index, experts.shape), axis=2)
        padded = np.concatenate([held, np.full_like(held[:, :1], EMPTY)], axis=1)
        at = np.arange(layers)[:, None, None, None], np.arange(node_count)[None, :, None, None]
        slots = number[(*at, padded[:, self.ranks])]
        rows = layers * node_count
        return (
            row_loads.reshape(rows, -1),
            slots.reshape(rows, *slots.shape[2:]),
            experts.reshape(rows, -1),
        )

    def join(self, packed: Slots, experts: Slots, layers: int) -> Slots:
        """The slots [L, R, S] of packed rows [L·N, M, S]."""
        names = np.concatenate([experts, np.full_like(experts[:, :1], EMPTY)], axis=1)
        named = names[np.arange(len(packed))[:, None, None], packed]
        found = np.full((layers, self.rank_count + 1, packed.shape[2]), EMPTY, dtype=np.int32)
        found[:, self.ranks] = named.reshape(layers, *self.ranks.shape, packed.shape[2])
        return found[:, :-1].copy()


def groups_to_nodes(loads: Loads, held: Slots, rows: GroupRows) -> Groups:
    """Give each node as many groups, near the groups that it holds most experts of, so that nodes have like
    loads."""
    layers, node_count = len(loads), len(rows.ranks)
    group_loads = loads.reshape(layers, rows.group_count, rows.group_size).sum(axis=2)
    slots = _groups_held(held, rows)
    capacity = np.full((layers, node_count), rows.groups_of_node, dtype=np.int64)
    counts = np.full((layers, rows.group_count), rows.copies, dtype=np.int64)
    speeds = rows.speeds.sum(axis=1)
    per_load = np.tile(speeds.mean() / speeds, (layers, 1))
    packing = Packing(group_loads, slots, capacity, np.zeros(node_count, dtype=np.intp), per_load)
    packing.fill(counts)
    mean = group_loads.sum(axis=1) / node_count
    copies = np.full((layers, 1), rows.copies)
    largest = group_loads.max(axis=1) / rows.copies
    anew = reference_load(group_loads, capacity, per_load, largest, most=copies, least=rows.copies)
    load = np.maximum(mean, anew) * (1 + GROUP_BALANCED)
    balance(packing, Goals(load, load, np.full(layers, np.inf)))
    return packing.slots


def _groups_held(held: Slots, rows: GroupRows) -> Groups:
    """The groups that nodes hold more than half of, at most as many as they shall have."""
    layers, node_count = len(held), len(rows.ranks)
    padded = np.concatenate([held, np.full_like(held[:, :1], EMPTY)], axis=1)
    experts = padded[:, rows.ranks].reshape(layers, node_count, -1)
    is_held = np.zeros((layers, node_count, rows.group_count * rows.group_size + 1), dtype=np.bool_)
    np.put_along_axis(is_held, np.where(experts == EMPTY, is_held.shape[2] - 1, experts), True, axis=2)
    parts = is_held[:, :, :-1].reshape(layers, node_count, rows.group_count, rows.group_size).mean(axis=3)
    order = np.argsort(-parts, axis=2, kind="stable")[:, :, : rows.groups_of_node]
    found = np.where(np.take_along_axis(parts, order, axis=2) > 0.5, order, EMPTY)
    return _at_most(found.astype(np.int32), rows)


def _at_most(groups: Groups, rows: GroupRows) -> Groups:
    """Leave every group on as many nodes as it shall be on, the first ones."""
    seen = np.zeros((len(groups), rows.group_count + 1), dtype=np.int64)
    layers = np.arange(len(groups))
    for node in range(groups.shape[1]):
        for place in range(groups.shape[2]):
            group = groups[:, node, place]
            seen[layers, group] += group != EMPTY
            groups[:, node, place] = np.where(seen[layers, group] <= rows.copies, group, EMPTY)
    return groups
