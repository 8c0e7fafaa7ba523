import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import WorkerId
from baton.core.messages import Member, Role
from baton.core.operate import (
    ClusterState,
    DrainNode,
    DrainWorker,
    NodeState,
    Order,
    Outcome,
    Pool,
    ReplicaState,
    ReplicaStatus,
    Resize,
    RollOut,
    Scale,
    SwitchRole,
    Version,
)
from control_plane.desired import OrderRefused, describe, pool_after
from control_plane.orders import Orders, has_all
from control_plane.reconcile import Reconciler
from control_plane.reconcile_events import (
    KillReplica,
    MemberSeen,
    ReplicaExited,
    RestartPolicy,
    StartReplica,
    SwitchReplicaRole,
)

POLICY = RestartPolicy(
    backoff_s=0.5, backoff_max_s=8.0, start_timeout_s=60.0, drain_timeout_s=10.0, stable_s=30.0
)
COUNTS = {Role.PREFILL: 2, Role.DECODE: 2}
names = st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-9"])
roles = st.sampled_from(Role)
actions = st.one_of(
    st.builds(Scale, roles, st.integers(-1, 3)),
    st.builds(Resize, st.dictionaries(roles, st.integers(0, 3))),
    st.builds(SwitchRole, names, roles),
    st.builds(DrainWorker, names, st.booleans()),
    st.builds(DrainNode, st.sampled_from(["n0", "nowhere"]), st.booleans()),
    st.builds(RollOut, st.builds(Version, st.sampled_from(["1", "2", "3"]))),
)


class OperatedCluster:
    """A cluster whose workers follow every action at once."""

    def __init__(self):
        self.orders, self.reconciler = Orders(), Reconciler(policy=POLICY, life="x")
        self.now_s = 0.0
        self.handle(self.orders.begin([Pool("m", COUNTS)], None))

    @property
    def state(self):
        nodes = (NodeState("n0", "a"), NodeState("n1", "b"))
        replicas = tuple(self.reconciler.status(now_s=self.now_s))
        return ClusterState("x", self.orders.pools, replicas, nodes, self.orders.log.entries)

    def handle(self, event):
        waiting = [event]
        for _ in range(200):
            if not waiting:
                return
            self.now_s += 0.1
            for action in self.reconciler.handle(waiting.pop(0), now_s=self.now_s):
                match action:
                    case StartReplica(worker_id, role) | SwitchReplicaRole(worker_id, role):
                        node = "n1" if "n0" in self.orders.avoid else "n0"
                        waiting.append(MemberSeen(Member(worker_id, role, "h:1", "m", "f", node=node)))
                    case _:
                        assert not isinstance(action, KillReplica)
                        waiting.append(ReplicaExited(action.worker_id, "drained"))
        raise AssertionError("it does not come to rest")

    def order(self, action):
        decision, events = self.orders.take(Order(action, "me"), self.state, at_s=self.now_s)
        for event in events:
            self.handle(event)
        self.orders.progress(self.state, at_s=self.now_s)
        return next(d for d in self.orders.log.entries if d.number == decision.number)


@given(st.lists(actions, max_size=12))
def test_any_orders_are_refused_or_done_and_the_cluster_is_what_they_made_it(ordered):
    cluster = OperatedCluster()
    for action in ordered:
        before = cluster.orders.pools
        decision = cluster.order(action)
        assert decision.outcome in (Outcome.DONE, Outcome.REFUSED), decision
        assert decision.text
        if decision.outcome is Outcome.REFUSED:
            assert cluster.orders.pools == before
    state = cluster.state
    assert has_all(state.pools[0], state)
    assert cluster.reconciler.is_settled


def test_an_order_that_another_overtakes_has_failed():
    cluster = OperatedCluster()
    starting = ReplicaStatus(
        "decode-0", "m", Role.DECODE, ReplicaState.STARTING, 0.0, "1", WorkerId("decode-0.1")
    )
    busy = ClusterState("x", cluster.orders.pools, (starting,))
    first, _ = cluster.orders.take(Order(Scale(Role.DECODE, 3), "me"), busy, at_s=1.0)
    assert cluster.orders.progress(ClusterState("x", cluster.orders.pools, (starting,)), at_s=2.0) == []
    cluster.orders.take(Order(Scale(Role.DECODE, 1), "me"), busy, at_s=3.0)
    (ended,) = cluster.orders.progress(ClusterState("x", cluster.orders.pools, (starting,)), at_s=4.0)
    assert (ended.number, ended.outcome, ended.done_after_s) == (first.number, Outcome.FAILED, 3.0)


def test_a_drain_of_a_node_that_was_undone_has_failed():
    """Workers may start there again, and it would wait for ever."""
    orders = Orders()
    orders.begin([Pool("m", {Role.DECODE: 1})], None)
    worker = ReplicaStatus(
        "decode-0", "m", Role.DECODE, ReplicaState.RUNNING, 0.0, "1", WorkerId("decode-0.1"), "n0"
    )
    state = ClusterState("x", orders.pools, (worker,), (NodeState("n0", "a"),))
    drain, _ = orders.take(Order(DrainNode("n0"), "me"), state, at_s=1.0)
    assert orders.progress(state, at_s=2.0) == []
    orders.take(Order(DrainNode("n0", is_undone=True), "me"), state, at_s=3.0)
    ended = {one.number: one for one in orders.progress(state, at_s=4.0)}
    assert (ended[drain.number].outcome, ended[drain.number].text) == (
        Outcome.FAILED,
        "the drain was undone since",
    )


def test_orders_are_kept_while_the_configuration_says_the_same():
    configured = Pool("m", {Role.DECODE: 2})
    orders = Orders()
    orders.begin([configured], None)
    state = ClusterState("x", orders.pools, ())
    orders.take(Order(Scale(Role.DECODE, 5), "me"), state, at_s=1.0)
    record = orders.record()
    again = Orders()
    again.begin([configured], record)
    assert again.pools == (Pool("m", {Role.DECODE: 5}),)
    assert again.record().configured == (configured,)
    changed = Orders()
    changed.begin([Pool("m", {Role.DECODE: 3})], record)
    assert changed.pools == (Pool("m", {Role.DECODE: 3}),)
    assert changed.log.entries[0].number == 1


def test_a_version_of_what_no_worker_reads_is_refused():
    pool = Pool("m", {Role.AGGREGATED: 1})
    state = ClusterState(life="l", pools=(pool,), replicas=())
    with pytest.raises(OrderRefused, match=r"router\.port=99: workers do not read this setting"):
        pool_after(RollOut(Version("2", ("engine.threads=1", "router.port=99"))), state)
    version = Version("2", ("engine.threads=1",))
    after = pool_after(RollOut(version), state)
    assert after is not None
    assert after.version == version
    assert describe(RollOut(version)) == "roll out version 2 with engine.threads=1"
