"""The warning before an order that leaves a role without workers."""

import msgspec
import pytest

from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.core.operate import (
    ClusterState,
    DrainExpertRank,
    DrainNode,
    DrainWorker,
    NodeState,
    Pool,
    RebalanceExperts,
    ReplicaState,
    ReplicaStatus,
    Resize,
    RollOut,
    Scale,
    ScaleExperts,
    SwitchRole,
    Version,
)
from control_plane.order_impact import impact_of
from tests.unit.control_plane.expert_groups import group, rank


def replica(name, role, *, state=ReplicaState.RUNNING, node="n1"):
    return ReplicaStatus(name, "m", role, state, 1.0, "1", WorkerId(f"{name}.a1"), node)


def state(*replicas):
    counts = {role: sum(r.role is role for r in replicas) for role in Role}
    pool = Pool("m", {role: count for role, count in counts.items() if count})
    return ClusterState("x", (pool,), replicas, (NodeState("n1", "host-a"), NodeState("n2", "host-b")))


TWO = state(replica("prefill-0", Role.PREFILL), replica("decode-0", Role.DECODE))
THREE = state(*TWO.replicas, replica("decode-1", Role.DECODE, node="n2"))


@pytest.mark.parametrize(
    ("action", "is_lasting", "said"),
    [
        (Scale(Role.DECODE, 0), True, "m will have no decode worker left: its prefill workers"),
        (Resize({Role.DECODE: 0, Role.PREFILL: 0}), True, "m will have no worker left: requests wait"),
        (SwitchRole("prefill-0", Role.DECODE), True, "no prefill worker left"),
        (
            SwitchRole("decode-0", Role.AGGREGATED),
            True,
            "no decode worker left: its prefill and aggregated workers",
        ),
        (DrainWorker("decode-0", is_replaced=False), True, "no decode worker left:"),
        (DrainWorker("decode-0.a1"), False, "no decode worker left meanwhile"),
        (DrainNode("host-a"), False, "m will have no worker left meanwhile"),
        (RollOut(Version("2"), "m", 0, 1), False, "m will have no worker left meanwhile"),
    ],
)
def test_the_last_one_of_a_role_is_missed(action, is_lasting, said):
    loss = impact_of(action, TWO)
    assert loss is not None
    assert said in loss.text
    assert loss.is_lasting is is_lasting


@pytest.mark.parametrize(
    "action",
    [
        Scale(Role.DECODE, 1),
        Scale(Role.AGGREGATED, 0),
        SwitchRole("decode-1", Role.PREFILL),
        DrainWorker("decode-0", is_replaced=False),
        DrainWorker("decode-0"),
        DrainNode("host-b"),
        DrainNode("host-a", is_undone=True),
        RollOut(Version("2")),
        Scale(Role.DECODE, 0, "another model"),
        DrainWorker("nobody"),
        DrainNode("nowhere"),
    ],
)
def test_where_some_are_left_or_the_order_will_be_refused_nothing_is_said(action):
    assert impact_of(action, THREE) is None


def test_a_worker_that_does_not_serve_is_no_help_meanwhile():
    down = state(
        replica("decode-0", Role.DECODE), replica("decode-1", Role.DECODE, state=ReplicaState.STARTING)
    )
    loss = impact_of(DrainWorker("decode-0"), down)
    assert loss is not None
    assert not loss.is_lasting


def test_an_exchange_that_may_leave_a_role_without_workers_is_told():
    loss = impact_of(RollOut(Version("2"), "m", 1, 1), THREE)
    assert loss is not None
    assert "m will have no prefill worker left meanwhile: its decode workers" in loss.text
    assert impact_of(RollOut(Version("2"), "m", 1, 0), THREE) is None
    assert impact_of(RollOut(Version("1"), "m", 0, 1), THREE) is None


ROOM = "decode of m will have no room for a second replica of every expert"


@pytest.mark.parametrize(
    ("slots", "action", "is_lasting"),
    [
        (32, ScaleExperts(3), True),
        (32, ScaleExperts(3, "decode of m"), True),
        (32, ScaleExperts(3, "prefill of m"), None),
        (32, ScaleExperts(4), None),
        (32, ScaleExperts(8), None),
        (32, ScaleExperts(1), None),  # refused: half of the experts would have no room
        (32, DrainExpertRank("experts-decode-2"), False),
        (32, DrainExpertRank("experts-decode-2.a", is_replaced=False), True),
        (32, DrainExpertRank("walrus"), None),
        (32, RebalanceExperts(), None),
        (20, ScaleExperts(3), None),  # there was no room for second replicas before
        (64, ScaleExperts(3), None),
        (64, DrainExpertRank("experts-decode-2", is_replaced=False), None),
    ],
)
def test_room_for_second_replicas_is_not_lost_unnoticed(slots, action, is_lasting):
    experts = (group(*(rank(i, slots=slots) for i in range(4))),)
    found = impact_of(action, msgspec.structs.replace(TWO, experts=experts))
    assert (found and found.is_lasting) is is_lasting
    if found is not None:
        assert found.text.startswith(ROOM + ("" if is_lasting else " meanwhile"))
