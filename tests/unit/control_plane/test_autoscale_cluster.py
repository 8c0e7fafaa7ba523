"""Conversion between the autoscaler's values and those that operate a cluster."""

from baton.core.messages import Role
from baton.core.operate import ClusterState, Pool, ReplicaState, ReplicaStatus, Resize
from control_plane.autoscaler.cluster import order_of, roles_of
from control_plane.desired import pool_after
from tests.unit.control_plane.simulated_cluster import SimulatedCluster, settings

P, D = Role.PREFILL, Role.DECODE


def replica(number, role, state, model="m"):
    return ReplicaStatus(f"{role}-{number}", model, role, state, 1.0, "1")


def test_replicas_are_counted_by_what_they_do_next():
    phases = [
        (P, ReplicaState.RUNNING),
        (P, ReplicaState.SUSPECT),
        (P, ReplicaState.WAITING),
        (D, ReplicaState.STARTING),
        (D, ReplicaState.SWITCHING),
        (D, ReplicaState.DRAINING),
    ]
    listed = [replica(i, role, state) for i, (role, state) in enumerate(phases)]
    other = replica(9, P, ReplicaState.RUNNING, model="another")
    state = ClusterState("life", (Pool("m", {P: 3, D: 2}),), (*listed, other))
    roles = roles_of(state, "m", [P, D])
    assert (roles[P].serving, roles[P].starting, roles[P].have) == (2, 1, 3)
    assert (roles[D].starting, roles[D].joining, roles[D].draining) == (1, 1, 1)
    assert roles[P].draining == 1  # the replica that switches leaves this role


def test_an_exchange_of_versions_is_no_larger_pool_and_a_dead_worker_no_smaller_one():
    surge = [replica(i, D, ReplicaState.RUNNING) for i in range(3)]
    dead = [replica(0, P, ReplicaState.RUNNING)]
    state = ClusterState("life", (Pool("m", {P: 2, D: 2}),), (*surge, *dead))
    roles = roles_of(state, "m", [P, D])
    assert (roles[D].serving, roles[D].have) == (2, 2)
    assert (roles[P].serving, roles[P].starting, roles[P].have) == (1, 1, 2)


def test_a_decision_becomes_one_order_that_the_cluster_takes():
    cluster = SimulatedCluster(settings(), prefill=8, decode=2)
    cluster.run(10, 4.0, prompt=6000, output=50)
    cluster.run(10, 4.0, prompt=500, output=1500)
    switch_role = next(d for d in cluster.decisions if d.switches)
    order = order_of(switch_role, "m")
    assert order is not None
    assert (order.who, order.is_advice) == ("autoscaler", False)
    assert "prefill to decode" in order.reason
    assert isinstance(order.action, Resize)
    state = ClusterState("life", (Pool("m", {P: 8, D: 2}),), ())
    pool = pool_after(order.action, state)
    assert pool is not None
    assert pool.counts == dict(switch_role.desired)


def test_nothing_is_ordered_where_nothing_changes():
    cluster = SimulatedCluster(settings(), prefill=3, decode=2)
    quiet = cluster.step(1.0, noise=False)
    assert not quiet.is_change
    assert order_of(quiet, "m") is None
