"""Conversion between the autoscaler's values and those that operate a cluster (`baton.core.operate`)."""

from collections.abc import Iterable, Mapping

from baton.core.messages import Role
from baton.core.operate import ClusterState, Order, ReplicaState, Resize
from control_plane.autoscaler.values import RoleState, ScalingDecision

WHO = "autoscaler"

SERVING = (ReplicaState.RUNNING, ReplicaState.SUSPECT)
LEAVING = (ReplicaState.DRAINING, ReplicaState.KILLING)


def roles_of(state: ClusterState, model: str, roles: Iterable[Role]) -> dict[Role, RoleState]:
    """Count a model's replicas by role and state. All ordered replicas count, whatever became of them, and so
    do those that leave: neither a rolling update with its extra processes nor a replica that restarts changes
    the pool's size. Loads are not known here and stay zero."""
    mine = [replica for replica in state.replicas if replica.model == model]
    pool = state.pool(model)

    def count(role: Role, phases: tuple[ReplicaState, ...]) -> int:
        return sum(replica.role is role and replica.state in phases for replica in mine)

    def state_of(role: Role) -> RoleState:
        ordered = pool.count(role) if pool else 0
        serving = min(ordered, count(role, SERVING))
        # A replica that switches has its new role already. It is paid for in the role that it leaves.
        joining = min(ordered - serving, count(role, (ReplicaState.SWITCHING,)))
        leaving = sum(r.role is not role and r.state is ReplicaState.SWITCHING for r in mine)
        return RoleState(
            serving=serving,
            starting=ordered - serving - joining,
            joining=joining,
            draining=count(role, LEAVING) + leaving,
        )

    return {role: state_of(role) for role in roles}


def order_of(decision: ScalingDecision, model: str) -> Order | None:
    """Return the order that carries out a decision, or None if nothing changes. One `Resize` names all roles,
    so that a role that shrinks and one that grows become role switches."""
    if not decision.is_change:
        return None
    counts: Mapping[Role, int] = decision.desired
    reason = "; ".join(decision.reasons)
    return Order(Resize(dict(counts), model), who=WHO, reason=reason, is_advice=decision.is_advice)
