"""The capacity that a cluster loses once an order is followed, said before the order is given. Pure."""

from collections.abc import Iterable

import msgspec

from baton.core.messages import Role
from baton.core.operate import (
    Action,
    ClusterState,
    DrainNode,
    DrainWorker,
    Pool,
    ReplicaState,
    ReplicaStatus,
    RollOut,
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
