"""Between the autoscaler's values and those in which a cluster is operated (`baton.core.operate`)."""

from collections.abc import Iterable, Mapping

from baton.core.messages import Role
from baton.core.operate import ClusterState, Order, ReplicaPhase, Resize
from control_plane.autoscaler.values import Decision, RoleState

WHO = "autoscaler"

COMING = (ReplicaPhase.WAITING, ReplicaPhase.STARTING)
SERVING = (ReplicaPhase.RUNNING, ReplicaPhase.SUSPECT)
LEAVING = (ReplicaPhase.DRAINING, ReplicaPhase.KILLING)


def roles_of(state: ClusterState, model: str, roles: Iterable[Role]) -> dict[Role, RoleState]:
    """Replicas of a model by role and phase. Their loads are not known here: zero."""
    mine = [replica for replica in state.replicas if replica.model == model]

    def count(role: Role, phases: tuple[ReplicaPhase, ...]) -> int:
        return sum(replica.role is role and replica.phase in phases for replica in mine)

    # A flipping replica has its new role already; which one it leaves is not told.
    return {
        role: RoleState(
            serving=count(role, SERVING),
            starting=count(role, COMING),
            joining=count(role, (ReplicaPhase.FLIPPING,)),
            draining=count(role, LEAVING),
        )
        for role in roles
    }


def order_of(decision: Decision, model: str) -> Order | None:
    """What to order; None: nothing changes. One `Resize` of all roles, so that one that shrinks and one that
    grows become flips."""
    if not decision.is_change:
        return None
    counts: Mapping[Role, int] = decision.desired
    why = "; ".join(decision.reasons)
    return Order(Resize(dict(counts), model), who=WHO, why=why, is_advice=decision.is_advice)
