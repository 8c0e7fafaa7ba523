"""The capacity that a cluster loses once an order is followed, said before the order is given. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from baton.core.experts import ExpertGroupState, ExpertRankPhase, ExpertRankStatus
from baton.core.messages import Role
from baton.core.operate import (
    Action,
    ClusterState,
    DrainExpertRank,
    DrainNode,
    DrainWorker,
    Pool,
    RebalanceExperts,
    ReplicaState,
    ReplicaStatus,
    RollOut,
    ScaleExperts,
)
from control_plane.desired import OrderRefused, node_of, pool_after


class OrderImpact(msgspec.Struct, frozen=True):
    """The capacity that an order takes away."""

    text: str
    """Sentence that describes it."""
    is_lasting: bool
    """True if the loss lasts until another order, False if it lasts until replacement workers serve."""


def impact_of(action: Action, state: ClusterState) -> OrderImpact | None:
    """Return the impact of an action. None: every role that has workers keeps some, or the order will be
    refused with a reason of its own."""
    if isinstance(action, DrainExpertRank | ScaleExperts | RebalanceExperts):
        return impact_on_experts(action, state.experts)
    try:
        after = pool_after(action, state)
        node = node_of(state, action.node).node if isinstance(action, DrainNode) else ""
    except OrderRefused:
        return None
    before = next((p for p in state.pools if after is not None and p.model == after.model), None)
    if isinstance(action, RollOut) and after is not None and before is not None:
        return _exchanged(before, after)
    if after is not None and before is not None:
        gone = [role for role in Role if before.count(role) and not after.count(role)]
        left = [role for role in Role if after.count(role)]
        return OrderImpact(_text(after.model, gone, left), is_lasting=True) if gone else None
    match action:
        case DrainWorker(worker):
            leaving = [r for r in state.replicas if worker in (r.worker_id, r.name)]
        case DrainNode(_, is_undone):
            leaving = [] if is_undone else [r for r in state.replicas if r.node == node]
        case _:
            return None
    return _meanwhile(leaving, state)


def impact_on_experts(
    action: DrainExpertRank | ScaleExperts | RebalanceExperts, groups: Sequence[ExpertGroupState]
) -> OrderImpact | None:
    """Return the impact of an order on expert ranks. None: every expert can have as many replicas as before,
    or the order will be refused."""
    match action:
        case DrainExpertRank(rank, is_replaced):
            found = [g for g in groups if any(rank in (r.name, r.rank_id) for r in g.ranks)]
            leaving = [r for g in found for r in g.ranks if rank in (r.name, r.rank_id)]
            return _fewer(found[0], leaving, is_lasting=not is_replaced) if found else None
        case ScaleExperts(count, name):
            found = [g for g in groups if name in (g.group, "")]
            return _fewer(found[0], _surplus(found[0], count), is_lasting=True) if len(found) == 1 else None
        case RebalanceExperts():
            return None


def _surplus(group: ExpertGroupState, count: int) -> list[ExpertRankStatus]:
    """Return as many ranks as a group of `count` has too many; all have the same slots."""
    return list(group.ranks[max(0, count) :])


def _fewer(
    group: ExpertGroupState, leaving: Sequence[ExpertRankStatus], *, is_lasting: bool
) -> OrderImpact | None:
    staying = [r for r in group.ranks if r not in leaving and r.phase is not ExpertRankPhase.LOST]
    before = sum(rank.slots for rank in group.ranks) / max(1, group.expert_count)
    after = sum(rank.slots for rank in staying) / max(1, group.expert_count)
    if after < 1 or not leaving:  # refused, or nothing happens
        return None
    if after < 2 <= before:
        when = "" if is_lasting else " meanwhile"
        text = (
            f"{group.group} will have no room for a second replica of every expert{when}: if a rank is lost "
            "then, streams pause until its experts are loaded again."
        )
        return OrderImpact(text, is_lasting)
    return None


def _exchanged(before: Pool, after: Pool) -> OrderImpact | None:
    """Return the impact of a rolling update. A role loses all its workers if as many as it has may be
    unavailable at once."""
    if before.version == after.version:
        return None
    gone = [role for role in Role if 0 < before.count(role) <= after.unavailable_max]
    left = [role for role in Role if before.count(role) and role not in gone]
    return OrderImpact(_text(after.model, gone, left, " meanwhile"), is_lasting=False) if gone else None


def _meanwhile(leaving: list[ReplicaStatus], state: ClusterState) -> OrderImpact | None:
    serving = [r for r in state.replicas if r.state is ReplicaState.RUNNING]
    staying = {r.name for r in serving} - {r.name for r in leaving}
    texts: list[str] = []
    for model in sorted({r.model for r in leaving}):
        roles = {r.role for r in leaving if r.model == model}
        left = {r.role for r in serving if r.model == model and r.name in staying}
        if gone := [role for role in Role if role in roles - left]:
            texts.append(_text(model, gone, [role for role in Role if role in left], " meanwhile"))
    return OrderImpact(" ".join(texts), is_lasting=False) if texts else None


def _text(model: str, gone: Iterable[Role], left: list[Role], when: str = "") -> str:
    names = " and no ".join(gone)
    if not left:
        return f"{model} will have no worker left{when}: requests wait, and are refused with 503."
    others = " and ".join(left)
    return f"{model} will have no {names} worker left{when}: its {others} workers serve everything, slower."
