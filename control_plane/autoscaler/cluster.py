"""Between the autoscaler's values and those in which a cluster is operated (`baton.core.operate`)."""

from collections.abc import Iterable, Mapping

from baton.core.messages import Role
from baton.core.operate import ClusterState, Order, ReplicaState, Resize
from control_plane.autoscaler.values import RoleState, ScalingDecision

WHO = "autoscaler"

SERVING = (ReplicaState.RUNNING, ReplicaState.SUSPECT)
LEAVING = (ReplicaState.DRAINING, ReplicaState.KILLING)


def roles_of(state: ClusterState, model: str, roles: Iterable[Role]) -> dict[Role, RoleState]:
    """Replicas of a model by role and phase; all that have been ordered, whatever became of them, and those
    that leave. So an exchange of versions, with more processes for a while, is no larger pool, and one that
    died and comes back no smaller one. Their loads are not known here: zero."""
    mine = [replica for replica in state.replicas if replica.model == model]
    pool = state.pool(model)

    def count(role: Role, phases: tuple[ReplicaState, ...]) -> int:
        return sum(replica.role is role and replica.state in phases for replica in mine)

    def state_of(role: Role) -> RoleState:
        ordered = pool.count(role) if pool else 0
        serving = min(ordered, count(role, SERVING))
        # A flipping replica has its new role already. It is paid for as one that leaves the other.
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
    """What to order; None: nothing changes. One `Resize` of all roles, so that one that shrinks and one that
    grows become flips."""
    if not decision.is_change:
        return None
    counts: Mapping[Role, int] = decision.desired
    reason = "; ".join(decision.reasons)
    return Order(Resize(dict(counts), model), who=WHO, reason=reason, is_advice=decision.is_advice)
