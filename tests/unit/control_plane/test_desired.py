import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import operate as op
from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.core.operate import ClusterState, Order, Outcome, Pool, ReplicaState, ReplicaStatus
from control_plane import desired as d


def replica(name, role, state=ReplicaState.RUNNING):
    return ReplicaStatus(name, "m", role, state, 1.0, "1", WorkerId(f"{name}.x1"))


def state(prefill=1, decode=2, **fields):
    replicas = [replica(f"prefill-{i}", Role.PREFILL) for i in range(prefill)]
    replicas += [replica(f"decode-{i}", Role.DECODE) for i in range(decode)]
    pool = Pool("m", {Role.PREFILL: prefill, Role.DECODE: decode})
    nodes = (op.NodeState("abc1", "host-a"), op.NodeState("abd2", "host-b"))
    return ClusterState(
        **{"life": "x", "pools": (pool,), "replicas": tuple(replicas), "nodes": nodes} | fields
    )


def test_a_scale_changes_its_role_only_and_nothing_is_wanted_of_none():
    assert d.pool_after(op.Scale(Role.DECODE, 5), state()).counts == {Role.PREFILL: 1, Role.DECODE: 5}
    assert d.pool_after(op.Scale(Role.DECODE, 0), state()).counts == {Role.PREFILL: 1}


@pytest.mark.parametrize("worker", ["decode-1", "decode-1.x1"])
def test_a_switch_moves_one_replica_from_role_to_role(worker):
    assert d.pool_after(op.SwitchRole(worker, Role.PREFILL), state()).counts == {
        Role.PREFILL: 2,
        Role.DECODE: 1,
    }


def test_a_drained_worker_keeps_its_place_unless_told_otherwise():
    assert d.pool_after(op.DrainWorker("decode-1"), state()) is None
    after = d.pool_after(op.DrainWorker("decode-1", is_replaced=False), state())
    assert after.counts == {Role.PREFILL: 1, Role.DECODE: 1}


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (op.Scale(Role.DECODE, -1), "0 to 1024"),
        (op.Scale(Role.DECODE, 1025), "0 to 1024"),
        (op.Scale(Role.DECODE, 1, model="other"), "choose one of: m"),
        (
            op.SwitchRole("decode-7", Role.PREFILL),
            "there is no worker 'decode-7'; the workers are: prefill-0, decode-0",
        ),
        (op.SwitchRole("decode-0", Role.DECODE), "already"),
        (op.DrainWorker("nobody"), "no worker"),
        (op.DrainNode("ab"), "several nodes"),
        (op.DrainNode("zz"), "no node"),
        (op.DrainNode(""), "no node"),
        (op.RollOut(op.Version("2"), surge_max=0), "set one of them"),
        (op.RollOut(op.Version("1", ("engine.threads=1",))), "choose another name"),
        (op.RollOut(op.Version("")), "has no name"),
    ],
)
def test_what_cannot_be_done_says_what_could(action, words):
    with pytest.raises(d.OrderRefused, match=words):
        d.pool_after(action, state())


def test_who_is_on_its_way_is_neither_switched_nor_drained():
    for replica_state in set(ReplicaState) - {ReplicaState.RUNNING, ReplicaState.SUSPECT}:
        busy = state(replicas=(replica("decode-0", Role.DECODE, replica_state),))
        for action in (op.SwitchRole("decode-0", Role.PREFILL), op.DrainWorker("decode-0")):
            with pytest.raises(d.OrderRefused, match=str(replica_state)):
                d.pool_after(action, busy)


def test_with_several_models_one_must_be_named():
    two = state(pools=(Pool("m", {}), Pool("n", {})))
    with pytest.raises(d.OrderRefused, match="names no model"):
        d.pool_after(op.Scale(Role.DECODE, 1), two)
    assert d.pool_after(op.Scale(Role.DECODE, 1, model="n"), two).model == "n"


def test_nodes_are_named_by_what_only_one_has():
    assert d.node_of(state(), "abc").host == "host-a"
    assert d.node_of(state(), "host-b").node == "abd2"


@given(st.lists(st.sampled_from(["add", "finish"]), max_size=60), st.data())
def test_the_log_is_bounded_numbered_and_what_is_over_stays(steps, data):
    log, over, last = d.DecisionLog(count_max=5), {}, 0
    for at_s, step in enumerate(steps):
        if step == "add":
            last = log.add(
                Order(op.DrainWorker("w"), "me", "x" * 999), Outcome.ACCEPTED, "", at_s=at_s
            ).number
        elif last:
            number = data.draw(st.integers(1, last))
            if ended := log.finish(
                number, data.draw(st.sampled_from([Outcome.DONE, Outcome.FAILED])), "t", at_s=at_s
            ):
                assert number not in over
                over[number] = ended
        numbers = [entry.number for entry in log.entries]
        assert numbers == list(range(last - len(numbers) + 1, last + 1))
        assert len(numbers) <= 5
        assert all(over.get(e.number, e) == e for e in log.entries)
        assert all(len(e.reason) <= d.TEXT_CHARS_MAX for e in log.entries)


def test_a_log_goes_on_where_the_last_life_stopped():
    log = d.DecisionLog()
    log.add(Order(op.DrainWorker("w"), "me"), Outcome.DONE, "", at_s=1.0)
    again = d.DecisionLog()
    again.restore(log.entries)
    assert again.add(Order(op.DrainWorker("v"), "me"), Outcome.DONE, "", at_s=2.0).number == 2


@pytest.mark.parametrize(
    "action",
    [
        op.Scale(Role.DECODE, 3),
        op.Resize({Role.DECODE: 2, Role.PREFILL: 1}, "m"),
        op.SwitchRole("w", Role.AGGREGATED),
        op.DrainWorker("w", False),
        op.DrainNode("n", True),
        op.RollOut(op.Version("2", ("a.b=c",)), "m"),
    ],
)
def test_every_action_has_words(action):
    assert d.describe(action)
