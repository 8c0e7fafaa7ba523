"""The autoscaler on reports that make no sense: it stays within bounds, ends soon, and does not fall over."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.costs import StepCosts
from baton.core.demand import Bin, ClassLoad, DemandReport, Traits, WorkerLoad, difference, fell
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role
from baton.core.operate import ClusterState, Pool, Resize, RouterState, Version
from control_plane.autoscaler.decide import Autoscaler
from control_plane.autoscaler.live import LiveAutoscaler, RouterLoads
from control_plane.autoscaler.sizing import (
    REPLICAS_MAX,
    DecodeLoad,
    PromptGroup,
    aggregated_needed,
    decode_needed,
    prefill_needed,
)
from control_plane.autoscaler.values import AutoscalerMemory, PoolBounds, RoleState
from tests.unit.control_plane.simulated_cluster import KIND, TRAITS, observed
from tests.unit.control_plane.simulated_cluster import settings as scaler_settings

P, D = Role.PREFILL, Role.DECODE
numbers = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e-300, 1e300, math.nan, math.inf]))
totals = st.one_of(st.integers(0, 10**6), st.sampled_from([2**32, 2**64 - 1]))
bins = st.dictionaries(st.integers(0, 2**32 - 1), st.builds(Bin, totals, totals, totals), max_size=3)
loads = st.builds(ClassLoad, bins, totals, totals, totals, totals, totals, totals, totals, totals)
costs = st.builds(StepCosts, numbers, numbers, numbers, numbers, numbers)
traits = st.one_of(st.none(), st.just(KIND), st.builds(Traits, costs, totals, totals, totals))
workers = st.builds(
    WorkerLoad,
    worker_id=st.sampled_from([WorkerId("a"), WorkerId("b")]),
    role=st.sampled_from([P, D]),
    age_s=numbers,
    waiting_tokens=totals,
    decoding=totals,
    context_tokens=totals,
    held_share=numbers,
    traits=traits,
)
reports = st.builds(
    DemandReport,
    router_id=st.sampled_from([RouterId("r1"), RouterId("r2")]),
    up_s=numbers,
    classes=st.dictionaries(st.sampled_from(["", "chat", "x"]), loads, max_size=2),
    queued=totals,
    queued_prompt_tokens=totals,
    workers=st.lists(workers, max_size=3).map(tuple),
)


def state_of(prefill, decode):
    pool = Pool("m", {P: prefill, D: decode}, Version("v"))
    routers = (RouterState(RouterId("r1"), "", ""), RouterState(RouterId("r2"), "", ""))
    return ClusterState(
        "life", pools=(pool,), replicas=(), nodes=(), decisions=(), is_settled=True, routers=routers
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(reports, min_size=1, max_size=3), min_size=1, max_size=8), st.integers(1, 3))
def test_no_report_moves_the_pools_out_of_their_bounds(rounds, least):
    bounds = {P: PoolBounds(least, 6), D: PoolBounds(least, 6)}
    scaler = LiveAutoscaler(scaler_settings(bounds=bounds), model="m", now_s=0.0)
    for at, said in enumerate(rounds, start=1):
        now_s = 15.0 * at
        for router in ("r1", "r2"):
            scaler.on_report(DemandReport(RouterId(router), now_s, {}, 0, 0, ()), now_s=now_s)
        for report in said:
            scaler.on_report(report, now_s=now_s)
        state = state_of(least, least)
        scaler.on_state(state, now_s=now_s)
        order = scaler.decide(state, now_s=now_s)
        if order is not None:
            assert isinstance(order.action, Resize)
            assert all(least <= count <= 6 for count in order.action.counts.values())
        scaler.memory(now_s=now_s)


@settings(max_examples=100, deadline=None)
@given(loads, loads)
def test_counts_that_went_back_are_those_of_a_new_life(before, now):
    book = RouterLoads(now_s=0.0)
    router = RouterId("r1")
    book.on_report(DemandReport(router, 1e9, {"": before}, 0, 0, ()), now_s=0.0)
    book.take([router], now_s=15.0)
    book.on_report(DemandReport(router, 1e9, {"": now}, 0, 0, ()), now_s=15.0)
    came = book.take([router], now_s=30.0).get("", ClassLoad())
    expected = difference(now, ClassLoad() if fell(now, before) else before)
    assert came == expected
    assert all(value >= 0 for value in (came.started, came.ended, came.output_tokens, came.tpot_missed))
    assert all(
        one.prompts > 0 and one.requests >= 0 and one.prompt_tokens >= 0 for one in came.arrived.values()
    )


@pytest.mark.parametrize("work", [1e6, 1e15, 1e300, math.inf, math.nan])
def test_no_amount_of_work_takes_longer_to_size_than_any_other(work):
    prompts = [PromptGroup(1.0, 0.5, 2.0)]
    assert prefill_needed(prompts, work=work, missed_max=0.05) == REPLICAS_MAX
    load = DecodeLoad(work, 1000.0, 0.03)
    assert 0 < decode_needed(load, KIND) <= REPLICAS_MAX
    assert 0 < aggregated_needed(prompts, load, KIND, work=work, missed_max=0.05) <= REPLICAS_MAX


# Each example is 400 decisions.
@settings(max_examples=25, deadline=None)
@given(
    requests=st.integers(0, 400),
    prompt=st.integers(1, 20_000),
    output=st.integers(2, 1000),
    most=st.integers(2, 12),
)
def test_constant_demand_ends_in_constant_pools(requests, prompt, output, most):
    """After the time of a few patiences nothing is started or stopped any more."""
    bounds = {P: PoolBounds(1, most), D: PoolBounds(1, most)}
    scaler = Autoscaler(scaler_settings(bounds=bounds, patience_s=60.0, start_s=30.0))
    have, history = {P: 1, D: 1}, []
    for at in range(1, 400):
        states = {role: RoleState(serving=count) for role, count in have.items()}
        decision = scaler.decide(observed(15.0 * at, requests, states, prompt=prompt, output=output), TRAITS)
        have = dict(decision.desired)
        assert all(1 <= count <= most for count in have.values())
        history.append(tuple(have.values()))
    assert len(set(history[-100:])) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.booleans())
def test_the_last_worker_of_a_role_stays_unless_everything_sleeps(arrivals, may_sleep):
    bounds = {P: PoolBounds(0, 8), D: PoolBounds(0, 8)}
    config = scaler_settings(bounds=bounds, zero_after_s=60.0 if may_sleep else 0.0, hold_s=600.0)
    scaler, have = Autoscaler(config), {P: 1, D: 1}
    for at, requests in enumerate(arrivals, start=1):
        states = {role: RoleState(serving=count) for role, count in have.items()}
        have = dict(scaler.decide(observed(15.0 * at, requests, states), TRAITS).desired)
        assert min(have.values()) > 0 or (may_sleep and not any(have.values()) and not requests)


def test_traits_that_cannot_be_are_not_recalled():
    scaler = LiveAutoscaler(scaler_settings(), model="m", now_s=0.0)
    bad = Traits(StepCosts(math.nan, 0.0, 0.0, 0.0), 1, 1, 1)
    scaler.recall(AutoscalerMemory(traits={P: bad, D: KIND}), now_s=0.0, away_s=1.0)
    assert dict(scaler.memory(now_s=0.0).traits) == {D: KIND}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30))
def test_a_clock_that_goes_back_breaks_no_decision(instants):
    scaler = Autoscaler(scaler_settings(rank_hours_per_day=100.0))
    for at_s in instants:
        states = {P: RoleState(serving=2), D: RoleState(serving=2)}
        decision = scaler.decide(observed(at_s, 50, states), TRAITS)
        assert all(1 <= count <= 20 for count in decision.desired.values())
