"""The baseline: the Expert Parallelism Load Balancer, written from DeepSeek's public description.

Global: every expert has one replica, and one after the other the remaining slots go to the expert whose
replicas have most load; replicas are then packed, the largest first, each on the rank with the least load
that has a free slot. Hierarchical: groups of experts are packed on nodes the same way, then each node
replicates its experts and packs them on its ranks. It is hierarchical if the groups can be divided evenly
among the nodes. Nothing that is placed already plays a role.

The description asks for as many slots on every rank. Here ranks may differ by one slot, so that every
redundancy can be compared on every number of ranks.

Shapes: B rows, E experts, M slots of all ranks, P packs, R ranks, S slots of the rank that has most.
"""

import numpy as np
import numpy.typing as npt

from control_plane.experts.values import EMPTY, Loads, Slots

Integers = npt.NDArray[np.int64]


def balanced_packing(loads: Loads, sizes: Integers) -> Integers:
    """The pack of each item as [B, items]. `sizes` is [P]: the items that each pack gets."""
    rows = np.arange(len(loads))
    pack_loads = np.zeros((len(loads), len(sizes)))
    left = np.tile(sizes, (len(loads), 1))
    packs = np.empty(loads.shape, dtype=np.int64)
    for items in np.argsort(-loads, axis=1, kind="stable").T:
        pack = np.where(left > 0, pack_loads, np.inf).argmin(axis=1)
        packs[rows, items] = pack
        pack_loads[rows, pack] += loads[rows, items]
        left[rows, pack] -= 1
    return packs


def replicate_experts(loads: Loads, slot_count: int) -> Integers:
    """Replicas of each expert as [B, E]."""
    rows = np.arange(len(loads))
    counts = np.ones(loads.shape, dtype=np.int64)
    for _ in range(slot_count - loads.shape[1]):
        counts[rows, (loads / counts).argmax(axis=1)] += 1
    return counts


def place_globally(loads: Loads, sizes: Integers) -> Slots:
    """Experts as [B, R, S]. `sizes` is [R]."""
    slot_count = int(sizes.sum())
    counts = replicate_experts(loads, slot_count)
    names = np.arange(loads.shape[1])
    experts = np.stack([np.repeat(names, of_row) for of_row in counts])
    replica_loads = np.take_along_axis(loads / counts, experts, axis=1)
    packs = balanced_packing(replica_loads, sizes)
    order = np.argsort(packs, axis=1, kind="stable")
    packs = np.take_along_axis(packs, order, axis=1)
    experts = np.take_along_axis(experts, order, axis=1)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    found = np.full((len(loads), len(sizes), int(sizes.max())), EMPTY, dtype=np.int32)
    found[np.arange(len(loads))[:, None], packs, np.arange(slot_count) - first[packs]] = experts
    return found


def place_in_groups(loads: Loads, sizes: Integers, *, group_count: int, node_count: int) -> Slots:
    """Experts as [B, R, S]. Ranks of a node follow one another, and all nodes have as many."""
    rows, experts = loads.shape
    group_size, of_node = experts // group_count, group_count // node_count
    group_loads = loads.reshape(rows, group_count, group_size).sum(axis=2)
    nodes = balanced_packing(group_loads, np.full(node_count, of_node))
    groups = np.argsort(nodes, axis=1, kind="stable").reshape(rows, node_count, of_node)
    names = (groups[..., None] * group_size + np.arange(group_size)).reshape(rows, node_count, -1)
    node_ranks = len(sizes) // node_count
    found = np.full((rows, len(sizes), int(sizes.max())), EMPTY, dtype=np.int32)
    for node in range(node_count):
        own = names[:, node]
        ranks = slice(node * node_ranks, (node + 1) * node_ranks)
        inside = place_globally(np.take_along_axis(loads, own, axis=1), sizes[ranks])
        named = np.concatenate([own, np.full((rows, 1), EMPTY)], axis=1)
        found[:, ranks, : inside.shape[2]] = named[np.arange(rows)[:, None, None], inside]
    return found


def place_as_eplb(loads: Loads, sizes: Integers, *, group_count: int, node_count: int) -> Slots:
    if group_count > 1 and node_count > 1 and group_count % node_count == 0 and not len(sizes) % node_count:
        of_nodes = sizes.reshape(node_count, -1).sum(axis=1)
        if of_nodes.min() * node_count >= loads.shape[1]:
            return place_in_groups(loads, sizes, group_count=group_count, node_count=node_count)
    return place_globally(loads, sizes)
