"""What has to be loaded to get from one map to another, in the order in which it should be."""

from collections.abc import Mapping, Sequence

from baton.core.ids import NodeId
from control_plane.experts.values import ExpertKey, ExpertMap, ExpertMigration, Loads, RankId


def migrations(
    target: ExpertMap,
    held: Mapping[ExpertKey, Sequence[RankId]],
    loads: Loads,
    *,
    nodes: Mapping[RankId, NodeId],
    size_bytes: int,
) -> list[ExpertMigration]:
    """Everything that ranks of `target` do not hold yet.

    `held` says which ranks have each expert now. Experts that no rank has come first, each for one rank, and
    the most used first among these and among the others. Each is read from the rank that has been given least
    to send, on the same node if possible.
    """
    wanted = [
        (key, rank, bool(held.get(key)) or rank != ranks[0])
        for key, ranks in target.replicas().items()
        for rank in ranks
        if rank not in held.get(key, ())
    ]
    wanted.sort(key=lambda one: (one[2], -float(loads[one[0]]), one))
    sends: dict[RankId, int] = {}
    found: list[ExpertMigration] = []
    for key, rank, _ in wanted:
        source = _choose_source(held.get(key, ()), rank, nodes, sends)
        if source is not None:
            sends[source] = sends.get(source, 0) + 1
        found.append(ExpertMigration(key.layer, key.expert, source, rank, size_bytes))
    return found


def _choose_source(
    holders: Sequence[RankId], target: RankId, nodes: Mapping[RankId, NodeId], sends: Mapping[RankId, int]
) -> RankId | None:
    def cost(rank: RankId) -> tuple[bool, int, RankId]:
        is_far = target not in nodes or nodes.get(rank) != nodes[target]
        return is_far, sends.get(rank, 0), rank

    return min(holders, key=cost, default=None)


def seconds_at_least(found: Sequence[ExpertMigration], *, bytes_per_s: float) -> float:
    """How long the migrations take if no rank sends or receives more than `bytes_per_s`."""
    size_bytes: dict[tuple[str, RankId], int] = {}
    for one in found:
        ends = [("to", one.target), *([("from", one.source)] if one.source is not None else [])]
        for end in ends:
            size_bytes[end] = size_bytes.get(end, 0) + one.size_bytes
    return max(size_bytes.values(), default=0) / bytes_per_s
