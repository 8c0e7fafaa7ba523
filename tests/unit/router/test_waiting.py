"""Sequences in front of workers that compute one after another: which are served, which refused, and when."""

import random
from dataclasses import replace

import pytest

from baton.config.router import RouterConfig
from baton.core.geometry import blocks_for
from router.decisions.events import FailureKind
from tests.unit.router.waiting_world import BLOCK_TOKENS, Ask, World, goodput, poisson

BLIND = RouterConfig(reject_below=0.0, hold_above_s=0.0)


def of(asked, tenant):
    return [one for one in asked if one.ask.tenant == tenant]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("refuse_late", [False, True])
def test_a_tenant_that_floods_costs_another_five_percent_of_its_goodput_at_most(refuse_late):
    """One tenant asks for four fifths of its fair share, the other for two and a half times the whole
    capacity."""
    losses = []
    for seed in range(8):
        rng = random.Random(seed)
        meek = poisson(rng, 4, until_s=30, tenant="meek", refuse_late=refuse_late)
        flood = poisson(rng, 25, until_s=30, tenant="flood", refuse_late=refuse_late)
        alone = goodput(World().run(meek))
        asked = World(checks_every=500).run(sorted(meek + flood, key=lambda one: one.at_s))
        losses.append(alone - goodput(of(asked, "meek")))
        assert goodput(of(asked, "meek")) > 3 * goodput(of(asked, "flood"))
    assert mean(losses) <= 0.05
    assert max(losses) <= 0.10


@pytest.mark.parametrize("refuse_late", [False, True])
def test_what_a_flood_holds_already_leaves_others_room(refuse_late):
    """Answers hold their blocks for thirty times as long as a prompt takes, so room is scarce. The small
    tenant's prompts are four times as long as the flood's."""

    def good(seed, flood_rate, **world):
        rng = random.Random(seed)
        meek = [
            replace(ask, tokens=4 * ask.tokens, ttft_s=3.0)
            for ask in poisson(rng, 0.6, until_s=30, tenant="meek", refuse_late=refuse_late)
        ]
        flood = poisson(rng, flood_rate, until_s=30, tenant="flood", refuse_late=refuse_late)
        asked = full_world(**world).run(sorted(meek + flood, key=lambda one: one.at_s))
        return goodput(of(asked, "meek")), goodput(of(asked, "flood"))

    alone = mean(good(seed, 0.01)[0] for seed in range(6))
    meek, flood = zip(*(good(seed, 30) for seed in range(6)), strict=True)
    meek_without, flood_without = zip(*(good(seed, 30, keeps_room=False) for seed in range(6)), strict=True)
    assert mean(meek) >= alone - 0.05
    assert mean(meek_without) < alone - 0.15
    assert mean(flood) > 0.75 * mean(flood_without)


def full_world(**world):
    return World(workers=4, blocks=120, stays_s=3.0, checks_every=500, **world)


def test_no_room_is_kept_from_a_tenant_that_is_alone():
    asks = poisson(random.Random(1), 30, until_s=15, tenant="flood")
    placed = [[one.placed_s for one in full_world(keeps_room=keeps).run(asks)] for keeps in (True, False)]
    assert placed[0] == placed[1]


def test_whoever_leaves_room_to_others_is_served_in_the_end():
    """There are no objectives, and nobody is refused though one tenant is over its share all the time."""
    rng = random.Random(2)
    meek = poisson(rng, 1, until_s=30, tenant="meek", ttft_s=0.0)
    flood = poisson(rng, 12, until_s=30, tenant="flood", ttft_s=0.0)
    asked = full_world().run(sorted(meek + flood, key=lambda one: one.at_s))
    assert all(one.first_token_s is not None for one in asked)


def test_weights_divide_what_there_is():
    rng = random.Random(1)
    asks = [
        ask
        for tenant, weight in (("one", 1.0), ("three", 3.0))
        for ask in poisson(rng, 30, until_s=40, tenant=tenant, weight=weight, ttft_s=10.0)
    ]
    asked = World(checks_every=500).run(sorted(asks, key=lambda one: one.at_s))
    tokens = {
        t: sum(a.ask.tokens for a in of(asked, t) if a.placed_s and a.placed_s < 40) for t in ("one", "three")
    }
    assert 2.5 < tokens["three"] / tokens["one"] < 3.5


def test_weights_divide_a_few_seats():
    """One seat of four is less than three tenths of them, and two are more."""
    asks = [
        replace(ask, tokens=300)
        for seed, (tenant, weight) in enumerate((("three", 3.0), ("seven", 7.0)))
        for ask in poisson(random.Random(seed), 8, until_s=60, tenant=tenant, weight=weight, ttft_s=0.0)
    ]
    world = World(workers=1, blocks=4 * blocks_for(301, BLOCK_TOKENS) + 1, stays_s=1.0, checks_every=500)
    asked = world.run(sorted(asks, key=lambda one: one.at_s))
    placed = {
        t: sum(a.placed_s is not None and a.placed_s < 60 for a in of(asked, t)) for t in ("three", "seven")
    }
    assert 0.27 < placed["three"] / sum(placed.values()) < 0.33, placed


def test_urgency_takes_nothing_from_other_tenants():
    """Workers serve urgent sequences first, so these are held less long."""
    asks = [
        ask
        for seed, (tenant, priority) in enumerate((("calm", 0), ("urgent", -5)))
        for ask in poisson(random.Random(seed), 20, until_s=60, tenant=tenant, priority=priority, ttft_s=0.0)
    ]
    asked = World(urgent_share=0.5, checks_every=500).run(sorted(asks, key=lambda one: one.at_s))
    tokens = [
        sum(a.ask.tokens for a in of(asked, t) if a.placed_s and a.placed_s < 60) for t in ("calm", "urgent")
    ]
    assert 0.9 < tokens[0] / tokens[1] < 1.1, tokens


@pytest.mark.parametrize("seed", range(4))
def test_at_twice_capacity_little_is_computed_in_vain(seed):
    asks = poisson(random.Random(seed), 20, until_s=40, ttft_s=1.0)
    blind = World(config=BLIND, checks_every=500).run(asks)
    late = World(checks_every=500).run(asks)
    refusing = World(checks_every=500).run([replace(ask, refuse_late=True) for ask in asks])
    wasted = sum(one.is_wasted for one in blind)
    assert sum(one.is_wasted for one in refusing) <= wasted / 10
    assert goodput(refusing) > 0.4
    assert goodput(late) > 0.35
    assert goodput(blind) < 0.2
    assert all(one.failed.kind is FailureKind.UNMET for one in refusing if one.failed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rates", [(2, 16), (12, 12)])
def test_a_client_that_comes_back_when_told_is_let_in(seed, rates):
    """Clients come in bursts, and under a load that never ends."""
    rng = random.Random(seed)
    asks = []
    for start in range(0, 80, 10):
        for half, rate in enumerate(rates):
            begin = start + 5 * half
            asks += poisson(rng, rate, from_s=begin, until_s=begin + 5, refuse_late=True, returns=True)
    asked = World(checks_every=500).run(asks)
    returned = [one for one in asked if one.is_return]
    assert len(returned) > 50
    assert mean(one.placed_s is not None for one in returned) >= 0.8
    # The promised time is not far too long, either.
    told = [one.failed.retry_after_s for one in asked if not one.is_return and one.failed]
    assert mean(told) < (5.0 if rates[0] < rates[1] else 20.0)


def test_clients_that_never_come_back_cost_nothing():
    asks = poisson(random.Random(5), 15, until_s=60, refuse_late=True)
    assert goodput(World(checks_every=500).run(asks)) > 0.6


def test_order_is_decided_as_late_as_possible():
    """Three sequences wait for one worker. A fourth comes last, with priority, and is next."""
    asks = [Ask(0.0, 1000, ttft_s=60), *(Ask(0.1 + i / 100, 500, ttft_s=60) for i in range(3))]
    asks.append(Ask(0.5, 500, ttft_s=60, priority=-1))
    asked = World().run(asks)
    placed = sorted(range(5), key=lambda i: asked[i].placed_s)
    assert placed == [0, 4, 1, 2, 3]
    assert asked[4].placed_s >= 0.74  # Its worker had work for a quarter of a second then.
    at_once = World(config=RouterConfig(hold_above_s=0.0)).run(asks)
    assert max(one.placed_s for one in at_once) == 0.5


@pytest.mark.parametrize(
    ("workers", "somebody_starves", "count"), [(1, False, 1), (2, False, 2), (1, True, 4)]
)
def test_a_scan_tries_no_more_once_every_worker_is_waited_for(workers, somebody_starves, count):
    """Long sequences keep each worker busy; of those behind them as many are tried as there are workers."""
    world = World(workers=workers)
    for i in range(workers + 12):
        world.ask(f"{i}", Ask(0.0, 2000 if i < workers else 500, ttft_s=60))
    assert len(world.waiting) == 12
    if somebody_starves:  # and is tried before those whose turn it is
        world.waiting._queue.may_be_passed = lambda *, is_short_of_room: False
    tried = []
    find = world.find

    def counted(flow, **options):
        tried.append(flow.name)
        found = find(flow, **options)
        # The second one's best worker is another, as if its prompt were cached there.
        return found._replace(prefill=list(world.cluster.values())[(len(tried) - 1) % workers])

    world.find = counted
    assert world.waiting.scan(now_s=0.01) == []
    assert len(tried) == count


@pytest.mark.parametrize("hold_above_s", [0.25, 0.001])
def test_what_is_held_is_looked_at_again_after_a_while_only(hold_above_s):
    """A little more to do than `hold_above_s` does not make a scan for every moment that passes."""
    world = World(config=RouterConfig(hold_above_s=hold_above_s))
    world.ask("first", Ask(0.0, 400, ttft_s=60))
    world.ask("second", Ask(0.0, 500, ttft_s=60))
    world.free_at_s[0] = hold_above_s + 1e-6
    world.waiting.scan(now_s=0.0)
    assert world.waiting.next_tick_s == pytest.approx(max(0.2 * hold_above_s, 0.01))


def test_what_is_late_is_served_last_or_refused_as_its_class_says():
    def run(refuse_late):
        asks = [Ask(0.0, 2000, ttft_s=60), Ask(0.1, 100, ttft_s=0.5, refuse_late=refuse_late)]
        return World().run([*asks, Ask(1.0, 100, ttft_s=60)])

    _, late, timely = run(refuse_late=False)
    assert late.first_token_s > timely.first_token_s
    _, refused, _ = run(refuse_late=True)
    assert refused.failed.kind is FailureKind.UNMET
    assert "objective 0.5 s" in refused.failed.message
    assert 1.0 <= refused.failed.retry_after_s <= 3.0


def test_who_is_unlikely_to_be_served_in_time_is_refused_when_the_time_is_over():
    """Nothing is refused in advance here, so that the sequence joins the queue as a late one."""
    asks = [Ask(0.0, 4000, ttft_s=60), Ask(0.1, 4000, ttft_s=60), Ask(0.2, 100, ttft_s=0.5, refuse_late=True)]
    *_, refused = World(config=RouterConfig(reject_below=0.0)).run(asks)
    assert refused.failed.kind is FailureKind.UNMET
    assert "no longer possible" in refused.failed.message


def test_what_can_never_be_met_says_so_by_the_longest_hint():
    (asked,) = World().run([Ask(0.0, 2000, ttft_s=0.5, refuse_late=True)])
    assert asked.failed.retry_after_s == 60.0


def test_too_slow_a_decode_is_waited_for_and_then_refused():
    world = World(tpot_s=0.5)
    world.cluster["w0"].load.sequences = 1  # It may end, and decode is faster then.
    asks = [Ask(0.0, 100, ttft_s=4.0, tpot_slo_s=0.1, refuse_late=True)]
    (asked,) = world.run(asks)
    assert asked.failed.kind is FailureKind.UNMET
    assert "per token" in asked.failed.message


def test_without_objectives_nobody_is_refused_for_being_late():
    asks = [replace(ask, ttft_s=0.0) for ask in poisson(random.Random(2), 12, until_s=20, refuse_late=True)]
    asked = World().run(asks)
    assert all(one.first_token_s is not None for one in asked)
