"""What the loss of a node does to a pool whose experts are divided, by the production placement."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.core.ids import NodeId
from control_plane.experts.migrations import migrations
from control_plane.experts.place import place
from control_plane.experts.values import ExpertRank, RankId
from simulator.experts.pool import ExpertPool
from simulator.experts.popularity import COUNTED_TOKENS

FILE_BYTES_S = 6.5e9
"""Bytes per second that a node reads of the model's files, from NVMe."""


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """The consequences of the loss of one node's expert ranks."""

    node_id: NodeId
    missing: int
    """Experts of all layers that no surviving rank holds."""
    load_s: float
    """Time in which survivors load them from the model's files."""
    smaller: ExpertPool | None
    """The pool of the survivors; None if they have no memory for all experts, so that nothing is computed
    until the node is back."""


def lose_node(pool: ExpertPool, *, file_bytes_s: float = FILE_BYTES_S) -> NodeLoss:
    """Lose the node that leaves the most experts without a replica. Raises ExpertsDoNotFit if they did not
    fit before."""
    placed, ranks = pool.placement.map, pool.ranks
    replicas = placed.replicas()
    nodes = {rank.rank_id: rank.node_id for rank in ranks}
    alone: dict[NodeId, int] = defaultdict(int)
    for holders in replicas.values():
        of = {nodes[holder] for holder in holders}
        if len(of) == 1:
            alone[of.pop()] += 1
    lost = max(sorted(set(nodes.values())), key=lambda node: alone[node])
    survivors = [rank for rank in ranks if rank.node_id != lost]
    if not survivors:
        return NodeLoss(lost, len(replicas), 0.0, None)
    held = {key: [holder for holder in holders if nodes[holder] != lost] for key, holders in replicas.items()}
    if (slots := _slots_after(pool, len(survivors))) is None:
        return NodeLoss(lost, alone[lost], 0.0, None)
    survivors = [replace(rank, slots=slots) for rank in survivors]
    loads = pool.popularity.counts(COUNTED_TOKENS * pool.model.experts_used)
    target = place(loads, survivors, current=placed, group_count=pool.model.groups)
    moved = migrations(target.map, held, loads, nodes=nodes, size_bytes=int(pool.expert_bytes))
    first = [one.target for one in moved if one.source is None]
    read_s = _reading_s(first, survivors, pool.expert_bytes / file_bytes_s)
    return NodeLoss(lost, alone[lost], read_s, pool.with_ranks(survivors, target))


def _slots_after(pool: ExpertPool, ranks: int) -> int | None:
    """Return the slots that each of so many ranks uses. They use more than is planned where the experts do
    not fit otherwise, as `control_plane.experts.group_placement` decides, out of the memory that is planned
    for nothing. None: that is too little."""
    needed = -(-pool.model.experts // ranks)
    more = max(0, needed - pool.layout.slots) * pool.model.expert_layers * pool.expert_bytes
    return max(needed, pool.layout.slots) if more <= pool.spare_bytes else None


def _reading_s(targets: Sequence[RankId], ranks: Sequence[ExpertRank], expert_s: float) -> float:
    """Return the time of the node that has most to read."""
    nodes = {rank.rank_id: rank.node_id for rank in ranks}
    counts: dict[NodeId, int] = defaultdict(int)
    for target in targets:
        counts[nodes[target]] += 1
    return max(counts.values(), default=0) * expert_s
