import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.messages import Role
from baton.sim.hardware import MODELS, Node, find_gpu
from baton.sim.plan.search import REPLICAS_MAX, Option, Shape, Verdict, first_plans, search

NODES = [Node(MODELS["llama-3-8b"], find_gpu("a100"), tensor=n) for n in (1, 2, 4)]


def options(prices, prefill, decode, both):
    shapes = [Shape(node, price) for node, price in zip(NODES, prices, strict=True)]
    rates = ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.BOTH, both))
    return [Option(s, role, r) for role, each in rates for s, r in zip(shapes, each, strict=True)]


def capacity_of(plan, truth):
    return min(pool.count * truth[role, pool.shape.node.tensor] for role, pool in plan.pools.items())


def verify_with(truth, rate):
    def verify(plan):
        met = {
            role: min(1.0, pool.count * truth[role, pool.shape.node.tensor] / rate)
            for role, pool in plan.pools.items()
        }
        ttft, tpot = met.get(Role.PREFILL, 1.0), met.get(Role.DECODE, 1.0)
        worst = min(met.values())
        return Verdict(worst, min(ttft, worst) if plan.both else ttft, tpot)

    return verify


rates = st.lists(st.floats(0.3, 4.0), min_size=3, max_size=3)


@given(prices=rates, prefill=rates, decode=rates, both=rates, rate=st.floats(0.5, 5.0))
def test_the_cheapest_that_serves_the_rate_is_found(prices, prefill, decode, both, rate):
    """Where phases tell the truth, and pools are small."""
    listed = options(prices, prefill, decode, both)
    truth = {(o.role, o.shape.node.tensor): o.rate for o in listed}
    found = search(first_plans(listed, rate=rate), verify_with(truth, rate), attain=1.0, simulations_max=4000)
    assert found.best is not None
    cheapest = {
        role: min(math.ceil(rate / o.rate) * o.shape.price_per_hour for o in listed if o.role is role)
        for role in Role
    }
    least = min(cheapest[Role.BOTH], cheapest[Role.PREFILL] + cheapest[Role.DECODE])
    assert found.best.price_per_hour == pytest.approx(least)
    assert found.runner_up is None or found.runner_up.kind != found.best.kind


def test_a_pool_that_phases_overrate_grows_until_the_simulator_agrees():
    listed = options((1, 9, 9), (2, 2, 2), (2, 2, 2), (0.01, 0.01, 0.01))
    truth = {(o.role, o.shape.node.tensor): o.rate for o in listed}
    truth[Role.DECODE, 1] = 0.5
    found = search(first_plans(listed, rate=4), verify_with(truth, 4), attain=0.99, simulations_max=100)
    assert (found.best.prefill.count, found.best.decode.count) == (2, 8)


def test_shapes_that_cannot_serve_are_not_tried():
    listed = options((1, 1, 1), (0, 0, 0), (1, 1, 1), (0, 0, 0))
    assert first_plans(listed, rate=1.0) == []


def test_it_stops_when_it_was_told_to():
    listed = options((1, 1, 1), *([(1, 1, 1)] * 3))
    found = search(first_plans(listed, rate=5), lambda plan: Verdict(0, 0, 0), attain=0.9, simulations_max=7)
    assert found.best is None
    assert len(found.tried) == 7


def test_prices_add_up():
    for plan, _ in product(first_plans(options((1, 2, 3), *([(1, 1, 1)] * 3)), rate=5), range(1)):
        assert plan.price_per_hour == sum(
            p.count * p.shape.node.gpu_count * p.shape.price_per_gpu_hour for p in plan.pools.values()
        )


def test_shapes_that_serve_no_better_however_many_there_are_are_given_up():
    listed = options((1, 1, 1), (0.1, 0, 0), (0.1, 0, 0), (0.1, 0, 0))
    tried = []

    def verify(plan):
        tried.append(plan)
        return Verdict(0.7, 0.7, 1.0)

    found = search(first_plans(listed, rate=20), verify, attain=0.9, simulations_max=1000)
    assert found.best is None
    assert 2 < len(tried) < 40
    least = {plan.kind: min(p.replica_count for p in tried if p.kind == plan.kind) for plan in tried}
    assert all(plan.replica_count < 2 + 1.5 * least[plan.kind] for plan in tried)


def test_no_cluster_has_more_workers_than_a_router_follows():
    listed = options((1, 9, 9), (1e-3, 0, 0), (1e-3, 0, 0), (0, 0, 0))
    tried = []

    def verify(plan):
        tried.append(plan.replica_count)
        return Verdict(len(tried) / 100, 0.5, 1.0)

    search(first_plans(listed, rate=2.6), verify, attain=0.9, simulations_max=100)
    search(first_plans(listed, rate=100), verify, attain=0.9, simulations_max=100)
    assert tried
    assert max(tried) <= REPLICAS_MAX
