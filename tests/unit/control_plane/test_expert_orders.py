"""Orders for expert ranks: refused with a reason, or followed until they are done."""

import pytest

from baton.core.experts import ExpertGroupState, ExpertRankPhase, ExpertRankStatus
from baton.core.ids import ExpertRankId
from baton.core.operate import (
    ClusterState,
    DrainExpertRank,
    Order,
    Outcome,
    Pool,
    RebalanceExperts,
    ScaleExperts,
)
from control_plane.desired import describe, pool_after
from control_plane.expert_orders import OrderRefused
from control_plane.order_impact import impact_of
from control_plane.orders import Orders


def rank(name, phase=ExpertRankPhase.READY, life="a1"):
    rank_id = ExpertRankId(f"{name}.{life}")
    return ExpertRankStatus(name, rank_id, phase, "n1", "h", 4, 8, 0, 0.5, 0, 0.0, 1.0)


def group(*ranks, role="decode", wanted=2, **fields):
    defaults = {"epoch": 3, "layer_count": 2, "expert_count": 8, "missing": 0, "single": 16}
    return ExpertGroupState(
        f"{role} of m",
        "m",
        role,
        **{**defaults, "is_ready": True, "rebalances": 1, **fields},
        ranks=ranks or (rank(f"experts-{role}-0"), rank(f"experts-{role}-1")),
        wanted_ranks=wanted,
        replicas_min=1,
        replicas_mean=1.0,
        balance=0.9,
        balance_worst=0.8,
        balance_worst_layer=0,
    )


def state(*groups):
    return ClusterState("x", (Pool("m", {}),), (), experts=groups)


@pytest.mark.parametrize(
    ("action", "groups", "says"),
    [
        (RebalanceExperts(), (), "experts.parallel"),
        (RebalanceExperts(), (group(), group(role="prefill")), "'decode of m', 'prefill of m'"),
        (RebalanceExperts("x of m"), (group(),), "no group 'x of m'; choose one of: 'decode of m'"),
        (RebalanceExperts(), (group(epoch=0),), "no placement yet"),
        (DrainExpertRank("experts-decode-7"), (group(),), "the expert ranks are: experts-decode-0"),
        (
            DrainExpertRank("experts-decode-0"),
            (group(rank("experts-decode-0", ExpertRankPhase.LOST)),),
            "is lost: only a ready rank",
        ),
        (
            DrainExpertRank("experts-decode-0", False),
            (group(rank("experts-decode-0"), wanted=1),),
            "nobody could take over",
        ),
        (ScaleExperts(0), (group(),), "1 to 1024 expert ranks, not 0"),
        (ScaleExperts(1025), (group(),), "1 to 1024 expert ranks, not 1025"),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused_with_what_to_do(action, groups, says):
    with pytest.raises(OrderRefused, match=says):
        pool_after(action, state(*groups))
    decision, events = Orders().take(Order(action, "me"), state(*groups), at_s=0.0)
    assert decision.outcome is Outcome.REFUSED
    assert says in decision.text
    assert events == []


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (RebalanceExperts(), "place the experts anew"),
        (RebalanceExperts("decode of m"), "place the experts of decode of m anew"),
        (DrainExpertRank("r"), "drain r"),
        (DrainExpertRank("r", False), "drain r without a replacement"),
        (ScaleExperts(3, "decode of m"), "scale the expert ranks of decode of m to 3"),
    ],
)
def test_orders_are_described_in_words(action, words):
    assert describe(action) == words
    assert impact_of(action, state(group())) is None


def progress(action, before, *after):
    """The outcomes of an order as the cluster's state changes."""
    orders = Orders()
    decision, _ = orders.take(Order(action, "me"), state(before), at_s=0.0)
    assert decision.outcome is Outcome.ACCEPTED
    found = [orders.progress(state(*groups), at_s=1.0) for groups in after]
    return [one[0].outcome if one else None for one in found], orders


def test_a_rebalance_is_done_when_what_it_moves_is_loaded():
    loading = group(rebalances=2, loads_running=3)
    outcomes, _ = progress(RebalanceExperts(), group(), (group(),), (loading,), (group(rebalances=2),))
    assert outcomes == [None, None, Outcome.DONE]


def test_a_drain_is_done_when_the_process_is_gone_whatever_has_its_name():
    renamed = group(rank("experts-decode-0", life="a9"), rank("experts-decode-1"))
    outcomes, orders = progress(DrainExpertRank("experts-decode-0"), group(), (group(),), (renamed,))
    assert outcomes == [None, Outcome.DONE]
    assert orders.expert_ranks == {}


def test_a_drain_without_a_replacement_is_remembered_as_one_rank_fewer():
    action = DrainExpertRank("experts-decode-0.a1", False)
    outcomes, orders = progress(action, group(), (group(rank("experts-decode-1"), wanted=1),))
    assert outcomes == [Outcome.DONE]
    assert orders.record().expert_ranks == {"decode of m": 1}
    again = Orders()
    again.begin([], orders.record())
    assert again.expert_ranks == {"decode of m": 1}


def test_scaling_is_done_when_all_ranks_are_there_and_fails_when_another_number_is_ordered():
    three = [rank(f"experts-decode-{n}") for n in range(3)]
    starting = group(*three[:2], rank("experts-decode-2", ExpertRankPhase.STARTING), wanted=3)
    outcomes, _ = progress(ScaleExperts(3), group(), (starting,), (group(*three, wanted=3),))
    assert outcomes == [None, Outcome.DONE]
    outcomes, _ = progress(ScaleExperts(3), group(), (group(wanted=4),))
    assert outcomes == [Outcome.FAILED]
    outcomes, _ = progress(ScaleExperts(3), group(), ())
    assert outcomes == [Outcome.FAILED]


def test_advice_changes_nothing():
    orders = Orders()
    order = Order(ScaleExperts(3), "me", is_advice=True)
    decision, _ = orders.take(order, state(group()), at_s=0.0)
    assert (decision.outcome, decision.text) == (Outcome.ADVISED, "would scale the expert ranks to 3")
    assert orders.expert_ranks == {}
