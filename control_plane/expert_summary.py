"""What is worth knowing of a group of expert ranks, for the dashboard and for commands. Pure."""

from collections.abc import Sequence

import msgspec

from baton.core.experts import ExpertGroupState, ExpertRankPhase, ExpertRankStatus

EXPERTS_NAMED = 5


class BusyExpert(msgspec.Struct, frozen=True):
    layer: int
    expert: int
    """Its number in the layer."""
    times: float
    """Its load in multiples of an even share of the layer."""
    replicas: int


def phase_counts(group: ExpertGroupState) -> dict[ExpertRankPhase, int]:
    """Return the number of ranks in each phase, zeros included."""
    return {phase: sum(rank.phase is phase for rank in group.ranks) for phase in ExpertRankPhase}


def ready_count(group: ExpertGroupState) -> int:
    return phase_counts(group)[ExpertRankPhase.READY]


def is_whole(group: ExpertGroupState) -> bool:
    """Whether a group has all its ranks and no other ones, and every expert a replica."""
    return group.is_ready and ready_count(group) == len(group.ranks) == group.wanted_ranks


def progress(group: ExpertGroupState) -> str:
    """Return what changes while an order is followed, in one line of plain text."""
    counts = phase_counts(group)
    others = "".join(
        f", {n} {phase}" for phase, n in counts.items() if n and phase is not ExpertRankPhase.READY
    )
    missing = f", {group.missing:,} experts without a replica" if group.missing else ""
    loading = f", {group.loads_running:,} experts loading" if group.loads_running else ""
    ready = counts[ExpertRankPhase.READY]
    return f"{group.group}: {ready} of {group.wanted_ranks} ranks ready{others}{loading}{missing}"


def listed(group: ExpertGroupState, count: int) -> Sequence[ExpertRankStatus]:
    """Return all ranks of a small group in their order; of a larger one the ranks that are not ready, then
    the busiest, `count` in all."""
    if len(group.ranks) <= count:
        return group.ranks
    ordered = sorted(group.ranks, key=lambda r: (r.phase is ExpertRankPhase.READY, -r.load))
    return ordered[:count]


def has_experts_listed(group: ExpertGroupState) -> bool:
    """Whether the state has replicas and load of every expert. Those of large models are left out."""
    total = group.layer_count * group.expert_count
    return 0 < total == len(group.expert_replicas) == len(group.expert_loads)


def layer_shares(group: ExpertGroupState) -> list[list[float]]:
    """Return the loads by layer and expert, in multiples of an even share of the layer; zeros for a layer
    without load. Empty: experts are not listed."""
    if not has_experts_listed(group):
        return []
    shares: list[list[float]] = []
    for layer in range(group.layer_count):
        loads = group.expert_loads[layer * group.expert_count : (layer + 1) * group.expert_count]
        even = sum(loads) / group.expert_count
        shares.append([load / even if even else 0.0 for load in loads])
    return shares


def busiest(group: ExpertGroupState, count: int = EXPERTS_NAMED) -> list[BusyExpert]:
    """Return the busiest experts, the busiest first. Empty: experts are not listed, or have no load."""
    found = [
        BusyExpert(layer, expert, times, group.expert_replicas[layer * group.expert_count + expert])
        for layer, shares in enumerate(layer_shares(group))
        for expert, times in enumerate(shares)
        if times
    ]
    return sorted(found, key=lambda one: (-one.times, one.layer, one.expert))[:count]
