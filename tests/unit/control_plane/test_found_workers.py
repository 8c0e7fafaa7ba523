"""Workers of an earlier control plane, found by the next one."""

from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.core.operate import Pool, Version
from control_plane.reconcile import KILL_CONFIRM_S, Reconciler
from control_plane.reconcile_events import (
    Adopted,
    DrainReplica,
    KillReplica,
    ReconcileTick,
    ReplicaExited,
    SetDesired,
    StartReplica,
)
from tests.unit.control_plane.test_reconcile import POLICY, MemberSeen, running


def adopted_anew(names, pool):
    """Begin another life of the control plane that finds these workers."""
    r = Reconciler(policy=POLICY, life="y")
    for name in names:
        r.handle(Adopted(WorkerId(f"{name}.x1"), "m", Role(name.split("-")[0]), "1"), now_s=0.0)
    return r, r.handle(SetDesired((pool,)), now_s=0.0)


def test_workers_found_during_an_update_are_replaced_one_by_one_once_they_are_heard():
    pool = Pool("m", {Role.DECODE: 2}, Version("2"), surge_max=1, unavailable_max=0)
    r, actions = adopted_anew(("decode-0", "decode-1"), pool)
    assert [type(a) for a in actions] == [StartReplica]
    for name in ("decode-0", "decode-1"):
        assert r.handle(MemberSeen(WorkerId(f"{name}.x1")), now_s=1.0) == []
    (drain,) = r.handle(MemberSeen(actions[0].worker_id), now_s=2.0)
    assert isinstance(drain, DrainReplica)


def test_a_found_worker_that_is_not_wanted_is_drained_since_it_may_serve():
    _, actions = adopted_anew(("decode-0", "decode-1"), Pool("m", {Role.DECODE: 1}, Version("1")))
    assert [(type(a), a.worker_id) for a in actions] == [(DrainReplica, "decode-1.x1")]


def test_a_found_worker_that_is_never_heard_does_not_stop_an_update():
    pool = Pool("m", {Role.DECODE: 1}, Version("2"), surge_max=0, unavailable_max=1)
    r, actions = adopted_anew(("decode-0",), pool)
    assert actions == []
    (kill,) = r.handle(ReconcileTick(), now_s=POLICY.start_timeout_s)
    assert isinstance(kill, KillReplica)
    assert r.handle(ReplicaExited(WorkerId("decode-0.x1"), "killed"), now_s=70.0) == []
    (start,) = r.handle(ReconcileTick(), now_s=71.0)
    assert start.version.name == "2"


def test_a_found_worker_that_drains_does_not_count_as_running_and_is_waited_for_no_longer_than_others():
    r, _ = adopted_anew(("decode-0",), Pool("m", {Role.DECODE: 1}, Version("1")))
    worker_id = WorkerId("decode-0.x1")
    assert r.handle(MemberSeen(worker_id, is_draining=True), now_s=1.0) == []
    assert not r.is_settled
    assert r.next_tick_s == 1.0 + POLICY.drain_timeout_s + KILL_CONFIRM_S
    (kill,) = r.handle(ReconcileTick(), now_s=r.next_tick_s)
    assert (type(kill), kill.worker_id) == (KillReplica, worker_id)


def test_a_worker_that_drained_by_anothers_order_and_serves_again_is_kept():
    r, ids = running({Role.DECODE: 1})
    assert r.handle(MemberSeen(ids["decode-0"], is_draining=True), now_s=2.0) == []
    assert not r.is_settled
    assert r.handle(MemberSeen(ids["decode-0"]), now_s=3.0) == []
    assert r.is_settled
    assert r.next_tick_s is None
