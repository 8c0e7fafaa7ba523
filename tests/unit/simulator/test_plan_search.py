import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.messages import Role
from simulator.hardware import Node, find_gpu
from simulator.models import MODELS
from simulator.plan.clusters import ClusterKind, ClusterVerdict, ReplicaShape
from simulator.plan.region import REPLICAS_MAX, SLACK, Region
from simulator.plan.search import search

NODES = [Node(MODELS["llama-3-8b"], find_gpu("a100"), tensor=n) for n in (1, 2, 4)]
ATTAIN = 0.9


def all_kinds(prices, *, estimate=(1, 1)):
    """Make a kind whose `estimate` is that of prefill and decode."""
    shapes = [ReplicaShape(node, price / node.gpu_count) for node, price in zip(NODES, prices, strict=False)]
    pairs = [ClusterKind(((Role.PREFILL, p), (Role.DECODE, d)), estimate) for p, d in product(shapes, shapes)]
    return pairs + [ClusterKind(((Role.AGGREGATED, b),), (sum(estimate),)) for b in shapes]


def kind_of(plan):
    return tuple((role, pool.shape.name) for role, pool in plan.pools.items())


def verify_with(power, rate, *, help_share=0.0, blur=0.0):
    """Shares that grow with every replica: a pool's own power, and some that others lend. `blur` is what
    chance adds or takes, the same for the same cluster."""

    def verify(plan):
        own = {r: pool.count * power[r, pool.shape.node.tensor] for r, pool in plan.pools.items()}
        lent = help_share * sum(own.values())
        ttft, tpot = (
            min(1.0, (own.get(role, 0) + own.get(Role.AGGREGATED, 0) / 2 + lent) / rate)
            for role in (Role.PREFILL, Role.DECODE)
        )
        chance = blur * math.sin(1000 * plan.price_per_hour + plan.replica_count)
        met = max(0.0, min(1.0, ttft * tpot * (1 - blur) + chance))
        aborted = met < ATTAIN - SLACK
        return ClusterVerdict(ATTAIN - SLACK if aborted else met, ttft, tpot, aborted, so_far=met)

    return verify


def passes(verdict):
    return not verdict.aborted and verdict.met >= ATTAIN


def clusters_below(kinds, price):
    for kind in kinds:
        spans = [range(1, int(price / each) + 1) for each in kind.prices]
        for counts in product(*spans):
            if kind.price_of(counts) < price - 1e-3:
                yield kind, counts


powers = st.fixed_dictionaries(
    {(role, tensor): st.floats(0.4, 4.0) for role in Role for tensor in (1, 2)},
)


@given(
    prices=st.tuples(st.floats(1.0, 3.0), st.floats(1.0, 3.0)),
    power=powers,
    rate=st.floats(0.5, 5.0),
    help_share=st.floats(0, 0.5),
    estimate=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_nothing_cheaper_passes_wherever_the_search_began(prices, power, rate, help_share, estimate):
    kinds = all_kinds(prices, estimate=estimate)
    verify = verify_with(power, rate, help_share=help_share)
    found = search(kinds, verify, attain=ATTAIN, simulations_max=5000)
    assert found.is_complete
    assert found.best is not None
    assert passes(verify(found.best.plan))
    for kind, counts in clusters_below(kinds, found.best.plan.price_per_hour):
        assert not passes(verify(kind.cluster(counts))), (kind.name, counts)
    assert found.runner_up is None or kind_of(found.runner_up.plan) != kind_of(found.best.plan)


@given(power=powers, rate=st.floats(0.5, 6.0), estimate=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_where_chance_plays_no_replica_of_the_cheapest_can_be_left_out(power, rate, estimate):
    kinds = all_kinds((2.0, 3.1), estimate=estimate)
    found = search(kinds, verify_with(power, rate, blur=0.03), attain=ATTAIN, simulations_max=5000)
    assert found.best is not None
    tried = {one.plan: one.passed for one in found.tried}
    kind = next(k for k in kinds if kind_of(k.cluster(k.estimate)) == kind_of(found.best.plan))
    counts = tuple(pool.count for pool in found.best.plan.pools.values())
    for i, count in enumerate(counts):
        if count > 1:
            assert tried[kind.cluster((*counts[:i], count - 1, *counts[i + 1 :]))] is False


def test_a_guess_that_is_far_too_large_costs_few_simulations():
    shape = ReplicaShape(NODES[0], 2.99)
    kind = ClusterKind(((Role.PREFILL, shape), (Role.DECODE, shape)), (24, 5))

    def verify(plan):
        counts = (plan.prefill.count, plan.decode.count)
        met = 0.95 if counts[0] >= 9 and counts[1] >= 4 else 0.8
        return ClusterVerdict(met, met if counts[0] < 9 else 1.0, met if counts[1] < 4 else 1.0)

    found = search([kind], verify, attain=ATTAIN, simulations_max=100)
    assert found.best is not None
    assert (found.best.plan.prefill.count, found.best.plan.decode.count) == (9, 4)
    assert found.is_complete
    assert len(found.tried) <= 20


def test_more_of_the_pool_that_is_short_are_tried_until_one_passes():
    shape = ReplicaShape(NODES[0], 1.0)
    kind = ClusterKind(((Role.PREFILL, shape), (Role.DECODE, shape)), (2, 1))
    truth = {(Role.PREFILL, 1): 2.0, (Role.DECODE, 1): 0.5, (Role.AGGREGATED, 1): 0.0}
    found = search([kind], verify_with(truth, 4.0), attain=ATTAIN, simulations_max=100)
    assert (found.best.plan.prefill.count, found.best.plan.decode.count) == (2, 8)


def test_the_search_says_when_it_ran_out_of_simulations():
    truth = dict.fromkeys(product(Role, (1, 2, 4)), 1.0)
    whole = search(all_kinds((1, 2, 3)), verify_with(truth, 5), attain=ATTAIN, simulations_max=1000)
    needed = next(i for i, one in enumerate(whole.tried, 1) if one.plan == whole.best.plan)
    short = search(all_kinds((1, 2, 3)), verify_with(truth, 5), attain=ATTAIN, simulations_max=needed)
    assert whole.is_complete
    assert not short.is_complete
    assert short.best == whole.best
    assert len(short.tried) == needed


def test_a_run_that_was_given_up_passes_nothing_whatever_its_bound():
    kind = ClusterKind(((Role.AGGREGATED, ReplicaShape(NODES[0], 1.0)),), (1,))
    region = Region(kind, attain=ATTAIN)
    assert not region.learn((4,), ClusterVerdict(0.95, 0.95, 0.95, aborted=True, so_far=0.5))
    assert region.is_ruled_out((3,))
    assert not region.is_ruled_out((5,))


def test_a_cluster_that_missed_by_little_rules_out_itself_alone():
    """Chance may be on the side of a smaller one."""
    region = Region(ClusterKind(((Role.AGGREGATED, ReplicaShape(NODES[0], 1.0)),), (1,)), attain=ATTAIN)
    region.learn((4,), ClusterVerdict(ATTAIN - SLACK / 2, 0.9, 0.9))
    assert not region.is_open((4,))
    assert region.is_open((3,))
    assert list(region.open_below(5.0)) == [(3,)]
    region.learn((3,), ClusterVerdict(ATTAIN - 2 * SLACK, 0.9, 0.9))
    assert list(region.open_below(5.0)) == []


def test_kinds_whose_work_costs_more_are_not_simulated():
    cheap, dear = ReplicaShape(NODES[0], 1.0), ReplicaShape(NODES[1], 1.0)
    kinds = [
        ClusterKind(((Role.AGGREGATED, cheap),), (2,), ((1.5,),)),
        ClusterKind(((Role.PREFILL, dear), (Role.DECODE, dear)), (2, 2), ((3.0, 3.0),)),
    ]
    truth = dict.fromkeys(product(Role, (1, 2, 4)), 4.0)
    found = search(kinds, verify_with(truth, 4), attain=ATTAIN, simulations_max=3)
    assert found.best.plan.aggregated.count == 2
    assert found.is_complete
    assert [k.least_price for k in found.left_out] in ([], [6.0])
    assert all(one.plan.aggregated or one is found.tried[-1] for one in found.tried)


def test_work_that_does_not_fit_rules_clusters_out():
    shape = ReplicaShape(NODES[0], 2.0)
    kind = ClusterKind(((Role.PREFILL, shape), (Role.DECODE, shape)), (3, 3), ((4.0, 4.0), (6.0, 3.0)))
    region = Region(kind, attain=ATTAIN)
    fitting = {c for c in product(range(1, 7), repeat=2) if not region.is_ruled_out(c)}
    assert fitting == {(p, d) for p, d in product(range(1, 7), repeat=2) if p + d >= 4 and p / 6 + d / 3 >= 1}
    assert kind.least_price == 8.0


def test_kinds_that_serve_no_better_however_many_there_are_are_given_up():
    tried = []

    def verify(plan):
        tried.append(plan)
        return ClusterVerdict(ATTAIN - SLACK, 0.7, 1.0, aborted=True, so_far=0.7)

    found = search(all_kinds((1, 2, 3)), verify, attain=ATTAIN, simulations_max=1000)
    assert found.best is None
    assert found.is_complete
    assert len(tried) < 12 * 10
    assert max(plan.replica_count for plan in tried) < 20


def test_no_cluster_has_more_workers_than_a_router_follows():
    tried = []

    def verify(plan):
        tried.append(plan.replica_count)
        return ClusterVerdict(0.5, 0.5, 1.0, aborted=True, so_far=len(tried) / 100)

    search(all_kinds((1, 2, 3), estimate=(900, 800)), verify, attain=ATTAIN, simulations_max=60)
    assert tried
    assert max(tried) <= REPLICAS_MAX


def test_what_a_faster_kind_could_not_do_is_not_tried_with_a_slower_one():
    slow = ClusterKind(((Role.AGGREGATED, ReplicaShape(NODES[0], 0.7)),), (3,))
    fast = ClusterKind(((Role.AGGREGATED, ReplicaShape(NODES[1], 0.34)),), (3,))
    truth = dict.fromkeys(product(Role, (1, 2, 4)), 1.0)

    def counts_tried(**options):
        found = search([fast, slow], verify_with(truth, 2.0), attain=ATTAIN, simulations_max=99, **options)
        assert found.best.plan.aggregated.shape.node.tensor == 2
        return [p.aggregated.count for p, *_ in found.tried if p.aggregated.shape.node.tensor == 1]

    assert 3 in counts_tried()
    assert 3 not in counts_tried(is_slower=lambda one, other: (one, other) == (slow, fast))


def test_kinds_that_phases_doubt_come_last():
    cheap = ClusterKind(((Role.AGGREGATED, ReplicaShape(NODES[0], 1.0)),), (1,), is_doubtful=True)
    sound = ClusterKind(((Role.AGGREGATED, ReplicaShape(NODES[1], 1.0)),), (2,))
    truth = dict.fromkeys(product(Role, (1, 2, 4)), 4.0)
    found = search([cheap, sound], verify_with(truth, 4.0), attain=ATTAIN, simulations_max=50)
    assert found.tried[0].plan.aggregated.shape == sound.shapes[0][1]
    assert found.best.plan.aggregated.shape == cheap.shapes[0][1]  # and still it is found


def test_prices_add_up():
    for kind in all_kinds((1, 2, 3), estimate=(3, 2)):
        plan = kind.cluster(kind.estimate)
        assert plan.price_per_hour == pytest.approx(kind.price_of(kind.estimate))
        assert plan.price_per_hour == pytest.approx(
            sum(p.count * p.shape.node.gpu_count * p.shape.price_per_gpu_hour for p in plan.pools.values())
        )
