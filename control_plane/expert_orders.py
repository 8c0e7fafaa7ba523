"""Orders for expert ranks: what is refused, and when they are done. Pure."""

from typing import assert_never

from baton.core.experts import ExpertGroupState, ExpertRankPhase, ExpertRankStatus
from baton.core.operate import Action, ClusterState, DrainExpertRank, Outcome, RebalanceExperts, ScaleExperts

EXPERT_RANKS_MAX = 1024
"""Most expert ranks of one group."""

ExpertAction = RebalanceExperts | DrainExpertRank | ScaleExperts


class OrderRefused(Exception):
    """The order cannot be followed; the text says what to do instead."""


def is_of_experts(action: Action) -> bool:
    return isinstance(action, RebalanceExperts | DrainExpertRank | ScaleExperts)


def group_for(action: ExpertAction, state: ClusterState) -> ExpertGroupState:
    """Return the group that an order is for. Raises OrderRefused for an order that cannot be followed."""
    match action:
        case RebalanceExperts(name):
            group = _group(state, name)
            if not group.epoch:
                raise OrderRefused(f"{group.group} has no placement yet: its ranks are starting")
            return group
        case DrainExpertRank(name, is_replaced):
            group, rank = rank_of(state, name)
            if rank.phase is not ExpertRankPhase.READY:
                raise OrderRefused(f"{rank.name} is {rank.phase}: only a ready rank can be drained")
            if not is_replaced and group.wanted_ranks <= 1:
                raise OrderRefused(f"{rank.name} is the only rank of {group.group}: nobody could take over")
            return group
        case ScaleExperts(count, name):
            group = _group(state, name)
            if not 1 <= count <= EXPERT_RANKS_MAX:
                raise OrderRefused(f"a group can have 1 to {EXPERT_RANKS_MAX} expert ranks, not {count}")
            return group
        case _:
            assert_never(action)


def rank_of(state: ClusterState, name: str) -> tuple[ExpertGroupState, ExpertRankStatus]:
    """Return the rank with this id or name, and its group. Raises OrderRefused."""
    for group in state.experts:
        for rank in group.ranks:
            if name in (rank.rank_id, rank.name):
                return group, rank
    names = ", ".join([rank.name for group in state.experts for rank in group.ranks][:20]) or "none"
    raise OrderRefused(f"there is no expert rank {name!r}; the expert ranks are: {names}")


def _group(state: ClusterState, name: str) -> ExpertGroupState:
    if not state.experts:
        raise OrderRefused("no model has its experts on expert ranks: see the setting experts.parallel")
    if not name and len(state.experts) == 1:
        return state.experts[0]
    for group in state.experts:
        if group.group == name:
            return group
    names = ", ".join(repr(group.group) for group in state.experts)
    missing = f"there is no group {name!r}" if name else "the order names no group, and there are several"
    raise OrderRefused(f"{missing}; choose one of: {names}")


def wanted_after(action: ExpertAction, group: ExpertGroupState) -> int | None:
    """Return how many ranks the group shall have after an order; None: as many as before."""
    match action:
        case ScaleExperts(count):
            return count
        case DrainExpertRank(_, is_replaced) if not is_replaced:
            return group.wanted_ranks - 1
        case _:
            return None


def describe_experts(action: ExpertAction) -> str:
    """Return the action in words, for the log."""
    match action:
        case RebalanceExperts(group):
            return f"place the experts{_of(group)} anew"
        case DrainExpertRank(rank, is_replaced):
            return f"drain {rank}" if is_replaced else f"drain {rank} without a replacement"
        case ScaleExperts(count, group):
            return f"scale the expert ranks{_of(group)} to {count}"
        case _:
            assert_never(action)


def _of(group: str) -> str:
    return f" of {group}" if group else ""


def end_of_experts(
    action: ExpertAction, before: ExpertGroupState, state: ClusterState
) -> tuple[Outcome, str] | None:
    """Return how an order has ended; None: it is under way. `before` is its group when the order came."""
    group = next((one for one in state.experts if one.group == before.group), None)
    if group is None:
        return (Outcome.FAILED, "its group is gone")
    is_quiet = group.is_ready and not group.loads_running
    match action:
        case RebalanceExperts():
            is_placed = group.rebalances > before.rebalances
            balance = f"the ranks' load is balanced to {group.balance:.2f}"
            return (Outcome.DONE, balance) if is_placed and is_quiet else None
        case DrainExpertRank(name):
            ids = [rank.rank_id for rank in before.ranks if name in (rank.rank_id, rank.name)]
            is_there = any(rank.rank_id in ids for rank in group.ranks)
            return None if is_there else (Outcome.DONE, f"{ids[0] if ids else name} is gone")
        case ScaleExperts(count):
            if group.wanted_ranks != count:
                return (Outcome.FAILED, "another number was ordered since")
            ready = [rank for rank in group.ranks if rank.phase is ExpertRankPhase.READY]
            has_all = len(ready) == len(group.ranks) == count
            return (Outcome.DONE, "all ranks hold their share") if has_all and is_quiet else None
        case _:
            assert_never(action)
