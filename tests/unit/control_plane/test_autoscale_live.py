"""The autoscaler on what routers of a live cluster report."""

import itertools

import msgspec
import pytest

from baton.config import Config
from baton.core.demand import Bin, ClassLoad, DemandReport, Traits, WorkerLoad, bin_of
from baton.core.errors import SetupError
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role
from baton.core.operate import ClusterState, Pool, ReplicaState, ReplicaStatus, Resize, RouterState
from control_plane.autoscaler.live import LiveAutoscaler, RouterLoads, TransitionTimes, typical
from control_plane.autoscaler.values import AutoscalerMemory
from control_plane.scaling import live_settings, scaled_roles
from tests.unit.control_plane.expert_groups import group
from tests.unit.control_plane.simulated_cluster import KIND, settings

P, D = Role.PREFILL, Role.DECODE
R1, R2 = RouterId("r1"), RouterId("r2")


def totals(requests, *, prompt=4000, output=300):
    return {
        "": ClassLoad(
            {bin_of(prompt): Bin(requests, requests * prompt)},
            started=requests,
            started_prompt_tokens=requests * prompt,
            ended=requests,
            output_tokens=requests * output,
            context_tokens=requests * output * (prompt + output // 2),
        )
    }


def report(router_id, requests, *, up_s=1000.0, queued=0, workers=()):
    return DemandReport(router_id, up_s, totals(requests), queued, queued * 4000, tuple(workers))


def worker(name, role, *, age_s=0.1, waiting=0, traits=KIND):
    return WorkerLoad(WorkerId(name), role, age_s, waiting, 0, 0, 0.25, traits)


def replica(name, role, state, *, for_s=1.0, life="x", number=1):
    return ReplicaStatus(name, "m", role, state, for_s, "1", WorkerId(f"{name}.{life}{number}"))


def cluster(prefill=2, decode=2, *, state=ReplicaState.RUNNING, routers=(R1,)):
    counts = {P: prefill, D: decode}
    replicas = [replica(f"{role}-{i}", role, state) for role, n in counts.items() for i in range(n)]
    listed = tuple(RouterState(r, "h:1", "h:2") for r in routers)
    return ClusterState("x", (Pool("m", counts),), tuple(replicas), routers=listed)


WORKERS = (worker("prefill-0.x1", P), worker("decode-0.x1", D))


def arrivals(loads):
    return sum(one.requests for load in loads.values() for one in load.arrived.values())


def test_what_came_is_the_difference_of_totals_whichever_reports_were_heard():
    loads = RouterLoads(now_s=0.0)
    loads.on_report(report(R1, 5, up_s=3.0), now_s=5.0)  # the router is younger, so all requests are new
    loads.on_report(report(R1, 9), now_s=8.0)
    loads.on_report(report(R1, 9), now_s=9.0)
    assert arrivals(loads.take([R1], now_s=10.0)) == 9
    loads.on_report(report(R1, 12), now_s=15.0)
    assert arrivals(loads.take([R1], now_s=20.0)) == 3
    assert arrivals(loads.take([R1], now_s=30.0)) == 0


def test_what_an_older_router_counted_before_this_control_plane_began_is_not_counted():
    loads = RouterLoads(now_s=0.0)
    loads.on_report(report(R1, 1_000_000, up_s=9000.0), now_s=1.0)
    loads.on_report(report(R1, 1_000_002, up_s=9010.0), now_s=11.0)
    assert arrivals(loads.take([R1], now_s=15.0)) == 2


def test_a_router_that_is_gone_is_counted_once_more_and_forgotten():
    loads = RouterLoads(now_s=0.0)
    loads.on_report(report(R1, 4, up_s=1.0, queued=2), now_s=2.0)
    loads.on_report(report(R2, 1, up_s=1.0), now_s=2.0)
    assert arrivals(loads.take([R2], now_s=15.0)) == 5
    assert loads.queued == (0, 0)
    assert loads.silent([R1, R2], now_s=15.0) == [R1, R2]


def test_a_worker_is_as_the_router_says_that_heard_it_last():
    loads = RouterLoads(now_s=0.0)
    loads.on_report(report(R1, 0, workers=[worker("w", P, age_s=0.2, waiting=7)]), now_s=1.0)
    loads.on_report(report(R2, 0, workers=[worker("w", P, age_s=5.0, waiting=9)]), now_s=1.0)
    assert loads.workers()[WorkerId("w")].waiting_tokens == 7


def test_starts_switches_and_drains_are_timed_but_not_workers_that_were_found():
    watch = TransitionTimes()
    starting, running = ReplicaState.STARTING, ReplicaState.RUNNING
    begin = [
        replica("decode-0", D, starting, for_s=1.0),
        replica("decode-1", D, starting, for_s=1.0, life="old"),
        replica("prefill-0", P, ReplicaState.SWITCHING, for_s=2.0),
        replica("prefill-1", P, ReplicaState.DRAINING, for_s=3.0),
        replica("prefill-2", P, starting, for_s=1.0),
    ]
    watch.observe(begin, life="x", now_s=100.0)
    later = [
        replica("decode-0", D, running, for_s=0.5),
        replica("decode-1", D, running, for_s=0.5, life="old"),
        replica("prefill-0", D, running, for_s=1.5),
        replica("prefill-2", P, ReplicaState.WAITING, for_s=0.1),
    ]
    watch.observe(later, life="x", now_s=130.0)
    assert watch.take() == ((30.5,), (33.0,), (30.5,))
    assert watch.take() == ((), (), ())


def live(**more):
    return LiveAutoscaler(settings(**more), model="m", now_s=0.0)


def run(scaler, state, *, rate, seconds, since_s=0.0):
    """Report this many requests per second for `seconds`, decide each interval, and return the orders."""
    orders = []
    for step in range(1, int(seconds / 15) + 1):
        now_s = since_s + 15.0 * step
        scaler.on_report(report(R1, round(rate * now_s), up_s=now_s, workers=WORKERS), now_s=now_s - 1)
        if (order := scaler.decide(state, now_s=now_s)) is not None:
            orders.append(order)
    return orders


def test_a_load_that_rises_becomes_one_resize_with_its_reason():
    (order,) = run(live(), cluster(1, 1), rate=6.0, seconds=60)[:1]
    assert isinstance(order.action, Resize)
    assert order.action.counts[P] > 1
    assert order.who == "autoscaler"
    assert "prefill" in order.reason
    assert "there are 1" in order.reason


def test_advice_is_said_once_and_again_when_it_changes():
    scaler = live(is_advice=True)
    orders = run(scaler, cluster(1, 1), rate=6.0, seconds=600)
    assert all(order.is_advice for order in orders)
    counts = [order.action.counts for order in orders]
    assert counts
    assert all(a != b for a, b in itertools.pairwise(counts))
    assert scaler.state().mode == "advise"
    assert {one.role for one in scaler.state().roles} == {P, D}


def test_nothing_is_decided_while_a_router_is_silent():
    scaler = live()
    scaler.on_report(report(R1, 1000, up_s=10.0, workers=WORKERS), now_s=14.0)
    assert scaler.decide(cluster(1, 1, routers=(R1, R2)), now_s=15.0) is None
    assert "r2" in scaler.state().text
    assert scaler.decide(cluster(1, 1, routers=()), now_s=15.0) is None
    assert scaler.state().text == "there is no router"
    scaler.on_report(report(R2, 0, up_s=5.0), now_s=15.5)
    assert scaler.decide(cluster(1, 1, routers=(R1, R2)), now_s=16.0) is not None
    assert scaler.state().text == ""


def test_a_role_that_nobody_has_yet_is_reckoned_with_as_the_others():
    scaler = live()
    scaler.on_report(report(R1, 200, up_s=10.0, workers=[worker("prefill-0.x1", P)]), now_s=14.0)
    order = scaler.decide(cluster(1, 0), now_s=15.0)
    assert order is not None
    assert isinstance(order.action, Resize)
    assert order.action.counts[D] >= 1


def test_what_was_learnt_outlives_the_process():
    scaler = live(rank_hours_per_day=100.0)
    run(scaler, cluster(3, 3), rate=2.0, seconds=1800)
    scaler.scaler.recall(AutoscalerMemory(start_s=(77.0,), corrections={P: 1.2}), 1800.0, away_s=0.0)
    memory = msgspec.json.decode(msgspec.json.encode(scaler.memory(now_s=1800.0)), type=AutoscalerMemory)
    assert memory.traits[P] == KIND
    spent = sum(hours for _, hours in scaler.memory(now_s=1800.0).spent)
    after = live(rank_hours_per_day=100.0)
    after.recall(memory, now_s=5.0, away_s=60.0)
    assert after.state().start_s == 77.0
    assert after.memory(now_s=5.0).corrections[P] == pytest.approx(1.2)
    assert sum(hours for _, hours in after.memory(now_s=5.0).spent) == pytest.approx(spent)


def test_the_middle_of_what_workers_say():
    cheap = Traits(msgspec.structs.replace(KIND.costs, base_s=0.01), 512, 64, 1000)
    assert typical([]) is None
    found = typical([KIND, cheap, KIND])
    assert found is not None
    assert (found.costs.base_s, found.batch_max, found.pool_tokens) == (0.02, 64, 1000)


def config(**cluster_fields):
    fields = {"prefill_workers": 0, "decode_workers": 0, "aggregated_workers": 0, **cluster_fields}
    return Config.model_validate({"model": {"path": "x"}, "cluster": fields, "autoscale": {"mode": "advise"}})


def test_roles_in_use_come_from_the_first_pool_and_a_mixture_is_refused():
    assert scaled_roles(config(prefill_workers=1, decode_workers=2)) == {P, D}
    (found,) = live_settings(config(aggregated_workers=2)).values()
    assert set(found.bounds) == {Role.AGGREGATED}
    assert found.is_advice
    with pytest.raises(SetupError, match="aggregated_workers=0"):
        scaled_roles(config(prefill_workers=1, aggregated_workers=1))


def test_a_limit_that_stays_as_it_is_changes_nothing():
    one = live()
    one.limit(3)
    assert one.scaler.settings.ranks_max == 3
    before = one.scaler.settings
    one.limit(3)
    assert one.scaler.settings is before
    one.limit(4)
    assert one.scaler.settings.ranks_max == 4


def with_experts(parallel, device="cpu"):
    fields = config(prefill_workers=1, decode_workers=2).model_dump()
    fields["model"]["device"] = device
    fields["experts"] |= {"parallel": parallel, "ranks": 3 if parallel == "ranks" else 0}
    return next(iter(live_settings(Config.model_validate(fields)).values()))


def test_expert_ranks_cost_what_they_take_beside_workers_and_apart_from_them():
    assert with_experts("off").cost({P: 1, D: 2}) == 3
    assert with_experts("workers").cost({P: 1, D: 2}) == 3, "they share the workers' cores"
    assert with_experts("workers", "cuda").cost({P: 1, D: 2}) == 6, "each has a device of its own"
    assert with_experts("ranks").cost({P: 1, D: 2}) == 9, "three for each pool"
    assert with_experts("ranks").cost({P: 0, D: 2}) == 5


def test_an_order_for_more_expert_ranks_changes_what_a_model_costs():
    one = LiveAutoscaler(settings(expert_ranks={P: 3, D: 3}), model="m", now_s=0.0)
    groups = [group(role=D, wanted_ranks=8), group(role=P, model="another", wanted_ranks=9)]
    one.cost_ranks({P: 1, D: 1}, groups)
    assert one.scaler.settings.cost({P: 1, D: 1}) == 1 + 1 + 3 + 8
    without = LiveAutoscaler(settings(), model="m", now_s=0.0)
    without.cost_ranks({P: 1, D: 1}, groups)
    assert without.scaler.settings.cost({P: 1, D: 1}) == 2
