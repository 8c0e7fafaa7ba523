import random

import pytest

from baton.core.costs import StepCosts
from simulator.plan.phases import PhaseRequest, PhaseWorker, decode_tpots, prefill_ttfts, rate_max

COSTS = StepCosts(base_s=0.01, prompt_token_s=1e-4, decode_s=1e-4, context_token_s=1e-8)
WORKER = PhaseWorker(COSTS, pool_tokens=100_000, chunk_tokens=4096, batch_max=64)


def poisson(count, rate, *, inputs=1000, outputs=100, seed=0):
    rng, at_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        found.append(PhaseRequest(at_s, inputs, 0, outputs))
    return found


def test_uniform_prompts_wait_as_in_an_m_d_1_queue():
    service_s = COSTS.prompt_s(0, 1000, chunk_tokens=4096)
    for load in (0.3, 0.6, 0.8):
        rate = load / service_s
        ttfts = prefill_ttfts(poisson(60_000, rate), WORKER, stretch=1.0)
        expected = service_s + rate * service_s**2 / (2 * (1 - rate * service_s))
        assert sum(ttfts) / len(ttfts) == pytest.approx(expected, rel=0.05)


def test_what_is_cached_is_not_computed():
    cold, warm = PhaseRequest(0, 1000, 0, 10), PhaseRequest(0, 1000, 900, 10)
    (cold_s,), (warm_s,) = (prefill_ttfts([one], WORKER, stretch=1.0) for one in (cold, warm))
    assert warm_s < cold_s / 4


def test_one_sequence_alone_decodes_at_the_step_time():
    (tpot_s,) = decode_tpots([PhaseRequest(0, 1000, 0, 101)], WORKER, stretch=1.0)
    mean_context = 1000 + 50
    assert tpot_s == pytest.approx(COSTS.step_s(decodes=1, context_tokens=mean_context), rel=0.01)


def brute_force(requests, worker):
    """Compute the decode phase step by step."""
    waiting, running, now_s, tpots = list(requests), [], 0.0, []
    while waiting or running:
        while waiting and waiting[0].at_s <= now_s + 1e-12:
            one = waiting.pop(0)
            running.append([now_s, one.input_tokens, one.output_tokens - 1, one.output_tokens - 1])
        if not running:
            now_s = waiting[0].at_s
            continue
        now_s += worker.costs.step_s(decodes=len(running), context_tokens=sum(r[1] for r in running))
        for r in running:
            r[1] += 1
            r[2] -= 1
        tpots += [(now_s - r[0]) / r[3] for r in running if r[2] == 0]
        running = [r for r in running if r[2]]
    return tpots


def test_a_batch_advanced_by_its_changes_is_the_one_that_runs_step_by_step():
    rng = random.Random(3)
    requests = [
        one._replace(input_tokens=rng.randrange(100, 4000), output_tokens=rng.randrange(2, 400))
        for one in poisson(300, 4.0)
    ]
    fast = decode_tpots(requests, WORKER, stretch=1.0)
    slow = brute_force(requests, WORKER)
    assert len(fast) == len(slow)
    assert sum(fast) / len(fast) == pytest.approx(sum(slow) / len(slow), rel=0.03)
    assert sorted(fast)[270] == pytest.approx(sorted(slow)[270], rel=0.05)


def test_those_that_find_no_room_wait_and_all_end():
    small = PhaseWorker(COSTS, pool_tokens=3000, chunk_tokens=4096, batch_max=64)
    requests = [PhaseRequest(0.0, 1000, 0, 50)] * 20
    roomy, tight = (decode_tpots(requests, w, stretch=1.0) for w in (WORKER, small))
    assert len(tight) == len(roomy) == 20
    assert max(tight) > 2 * max(roomy)


@pytest.mark.parametrize("capacity", [0.02, 0.7, 1.0, 3.3, 400.0])
def test_the_highest_rate_is_found_from_any_side(capacity):
    found = rate_max(lambda stretch: float(1.0 / stretch <= capacity), mean_rate=1.0, attain=0.9)
    assert found == pytest.approx(capacity, rel=0.03)


def test_objectives_that_no_rate_meets_are_said_to_be_so():
    assert rate_max(lambda stretch: 0.0, mean_rate=1.0, attain=0.9) == 0.0
