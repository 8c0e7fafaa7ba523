"""Predictions: how they follow load, what they learn, when they say that they are no good."""

import random
from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.chunks import PLANNED_SHARE
from baton.core.costs import PhaseTimings, StepCosts
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import Phase, Role, WorkerHello
from router.decisions.cluster.backlog import Backlog
from router.decisions.cluster.load_account import SequenceProfile
from router.decisions.cluster.prediction_inputs import COLD
from router.decisions.cluster.view import ClusterView
from router.decisions.prediction.correction import Correction, ErrorWindow
from router.decisions.prediction.forecast import Prediction, PrefillForecast, SequenceNeeds
from router.decisions.prediction.links import Links
from router.decisions.prediction.model import attainment_probability
from router.decisions.prediction.predictor import Predictor

COSTS = StepCosts(0.004, 1e-4, 5e-4, 1e-7, 1e-9)


def cluster_of(*names, costs=COSTS, role=Role.AGGREGATED):
    cluster = ClusterView(silence_s=1e9)
    for name in names:
        hello = WorkerHello(WorkerId(name), role, "f", "m", 16, 4000, 100_000, costs=costs, host=name)
        cluster.join(hello, f"{name}:1")
    return cluster


def sends(worker, number, tokens, phase=Phase.PREFILL, now_s=0.0):
    profile = SequenceProfile(tokens)
    fresh = 0 if phase is Phase.DECODE else tokens
    worker.reserve(
        SequenceId(f"s{number}"), phase=phase, tokens=fresh, blocks=1, profile=profile, now_s=now_s
    )


def needs(tokens=1000, tokens_max=100):
    return SequenceNeeds(tokens, 0, tokens_max, 0.0, 0.0, 0.0)


def ttft_s(worker, tokens=1000, cached=0, now_s=0.0, predictor=None):
    return (
        (predictor or Predictor(error_max=1.0))
        .prefill(worker.snapshot, needs(tokens), cached, now_s=now_s)
        .ttft_s
    )


def tpot_s(worker, starts_in_s=0.0):
    return Predictor(error_max=1.0).tpot_s(
        worker.snapshot, 500, starts_in_s=starts_in_s, output_tokens=100, now_s=0.0
    )


@given(st.lists(st.integers(1, 20_000), max_size=12), st.integers(1, 20_000), st.integers(1, 20_000))
def test_more_work_ahead_never_makes_the_first_token_earlier(lengths, tokens, one_more):
    cluster = cluster_of("a")
    worker = cluster[WorkerId("a")]
    for number, length in enumerate(lengths):
        sends(worker, number, length)
    before_s = ttft_s(worker, tokens)
    sends(worker, 99, one_more)
    assert ttft_s(worker, tokens) >= before_s - 1e-9


@given(st.integers(0, 40), st.floats(0, 5))
def test_more_sequences_never_make_decoding_faster(count, starts_in_s):
    cluster = cluster_of("a", role=Role.DECODE)
    worker = cluster[WorkerId("a")]
    for number in range(count):
        sends(worker, number, 500, Phase.DECODE)
    before_s = tpot_s(worker, starts_in_s)
    sends(worker, 99, 500, Phase.DECODE)
    assert tpot_s(worker, starts_in_s) >= before_s


@given(st.integers(0, 999), st.integers(0, 999))
def test_what_is_cached_is_not_computed(some, more):
    worker = cluster_of("a")[WorkerId("a")]
    few, many = sorted((some, more))
    assert ttft_s(worker, cached=many) <= ttft_s(worker, cached=few)


def test_short_prompts_go_before_long_ones_and_long_ones_wait_for_short():
    worker = cluster_of("a", role=Role.PREFILL)[WorkerId("a")]
    alone_s = ttft_s(worker, 100), ttft_s(worker, 8000)
    for number in range(4):
        sends(worker, number, 4000)
    overtakes_s, waits_s = ttft_s(worker, 100) - alone_s[0], ttft_s(worker, 8000) - alone_s[1]
    assert waits_s > 1.5
    assert overtakes_s < 0.1


def test_a_prompt_under_way_is_counted_as_far_as_it_is_left():
    worker = cluster_of("a", role=Role.PREFILL)[WorkerId("a")]
    sends(worker, 0, 4000, now_s=10.0)
    assert ttft_s(worker, 4000, now_s=10.2) == pytest.approx(ttft_s(worker, 4000, now_s=10.0) - 0.2)
    worker.begin(SequenceId("s0"), 10.4)
    assert ttft_s(worker, 4000, now_s=10.4) == pytest.approx(ttft_s(cluster_of("b")[WorkerId("b")], 4000))


def test_who_is_on_the_way_decodes_by_then_and_who_decodes_may_have_ended():
    on_the_way, there = (cluster_of("a", role=Role.DECODE)[WorkerId("a")] for _ in range(2))
    for worker in (on_the_way, there):
        for number in range(30):
            sends(worker, number, 500, Phase.DECODE)
    for number in range(30):
        there.begin(SequenceId(f"s{number}"))
    assert tpot_s(there) == pytest.approx(tpot_s(on_the_way))
    assert tpot_s(there, starts_in_s=5.0) < 0.6 * tpot_s(on_the_way, starts_in_s=5.0)


def test_prompts_lengthen_a_step_by_no_more_than_the_chunk_that_its_objectives_allow():
    """However busy the worker is with prompts."""
    worker = cluster_of("w")["w"]
    predictor = Predictor(error_max=1.0)

    def raw_s(slo_s):
        return predictor.raw_tpot_s(
            worker.snapshot, 500, starts_in_s=0.0, output_tokens=100, now_s=0.0, slo_s=slo_s
        )

    alone_s = raw_s(0.0)
    for number in range(40):
        sends(worker, number, 4000)
        worker.placed(1.0, 0.0)
    assert worker.snapshot.prediction.busy_share(0.0) == 0.95
    token_s = COSTS.prompt_token_s + 2000 * COSTS.pair_s  # in the middle of a prompt
    chunk_s = worker.hello.step_tokens_max * token_s
    assert raw_s(0.0) <= alone_s + chunk_s
    assert raw_s(0.0) > 2 * alone_s
    slo_s = alone_s + chunk_s / 2
    assert raw_s(slo_s) == pytest.approx(PLANNED_SHARE * slo_s, rel=0.05)


@pytest.mark.parametrize(
    ("own_slo_s", "default_s", "kept_s"),
    [
        (0.0, 0.0, None),
        (0.0, 0.05, 0.05),
        (0.03, 0.05, 0.03),
        (0.2, 0.05, 0.2),  # nobody decodes there who names none
    ],
)
def test_prompts_have_the_room_that_the_worker_plans(own_slo_s, default_s, kept_s):
    """Sequences that name no objective have the worker's."""
    cluster = ClusterView(silence_s=1e9)
    hello = WorkerHello(
        WorkerId("w"), Role.AGGREGATED, "f", "m", 16, 4000, 100_000, costs=COSTS, step_tokens_max=4096,
        tpot_slo_s=default_s, chunk_tokens_min=32,
    )  # fmt: skip
    cluster.join(hello, "w:1")
    worker = cluster[WorkerId("w")]
    worker.reserve(
        SequenceId("s"),
        phase=Phase.DECODE,
        tokens=0,
        blocks=1,
        profile=SequenceProfile(100, 0, own_slo_s),
        now_s=0.0,
    )
    worker.begin(SequenceId("s"))
    ahead = Predictor(error_max=1.0).outlook(worker.snapshot)
    if kept_s is None:
        assert ahead.prompts.room_s == inf
        assert ahead.prompts.seconds(4095, 0) == pytest.approx(ahead.step_s + 4095 * COSTS.prompt_token_s)
    else:
        step_s = PLANNED_SHARE * kept_s
        assert ahead.prompts.room_s == pytest.approx(step_s - ahead.step_s)
        count = ahead.prompts.room_s / COSTS.prompt_token_s
        assert ahead.prompts.seconds(count, 0) == pytest.approx(step_s)
        # Attention takes time of the same steps, so that there are more of them.
        pairs = count * COSTS.prompt_token_s / COSTS.pair_s
        assert ahead.prompts.seconds(count, pairs) == pytest.approx(2 * step_s)


@pytest.mark.parametrize(("least", "expected_s"), [(1, None), (100, 0.01)])
def test_prompts_take_as_long_as_decodes_that_miss_their_objective(least, expected_s):
    """They have the least chunk at least, of 0.1 ms a token."""
    cluster = ClusterView(silence_s=1e9)
    hello = WorkerHello(
        WorkerId("w"), Role.AGGREGATED, "f", "m", 16, 4000, 100_000, costs=COSTS, step_tokens_max=4096,
        tpot_slo_s=0.004, chunk_tokens_min=least,
    )  # fmt: skip
    cluster.join(hello, "w:1")
    worker = cluster[WorkerId("w")]
    profile = SequenceProfile(100, 0, 0.0)
    worker.reserve(SequenceId("s"), phase=Phase.DECODE, tokens=0, blocks=1, profile=profile, now_s=0.0)
    worker.begin(SequenceId("s"))
    ahead = Predictor(error_max=1.0).outlook(worker.snapshot)
    assert ahead.step_s > PLANNED_SHARE * 0.004
    prompts_s = ahead.step_s if expected_s is None else expected_s
    assert ahead.prompts.longest_s() == pytest.approx(prompts_s)
    # Attention makes tokens far into a prompt longer, and a step takes as long unless it has the least chunk.
    far = 100_000
    far_s = least * (COSTS.prompt_token_s + far * COSTS.pair_s)
    assert ahead.prompts.longest_s(far) == pytest.approx(max(ahead.prompts.room_s, far_s))
    count = prompts_s / COSTS.prompt_token_s
    assert ahead.prompts.seconds(10 * count, 0) == pytest.approx(10 * (ahead.step_s + prompts_s))


def test_a_worker_that_says_nothing_is_taken_to_be_like_its_fleet_or_slow():
    cluster = cluster_of("a", "b", costs=COSTS)
    hello = WorkerHello(WorkerId("c"), Role.AGGREGATED, "f", "m", 16, 4000, 100_000)
    cluster.join(hello, "c:1")
    assert cluster[WorkerId("c")].prediction.costs == COSTS
    assert cluster_of("d", costs=None)[WorkerId("d")].prediction.costs == COLD


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_a_correction_finds_the_factor_whatever_single_outliers_say(factor):
    rng, correction = random.Random(1), Correction()
    for _ in range(100):
        stall = 20.0 if rng.random() < 0.04 else 1.0
        correction.observe(0.1, 0.1 * factor * stall * rng.lognormvariate(0, 0.1))
    assert correction.factor() == pytest.approx(factor, rel=0.15)
    assert correction.sigma < 0.35


def test_a_worker_that_becomes_slower_is_noticed_at_once_and_once():
    rng, correction = random.Random(2), Correction()
    for _ in range(60):
        correction.observe(0.1, 0.1 * rng.lognormvariate(0, 0.1))
    assert correction.change_count == 0
    for _ in range(8):
        correction.observe(0.1, 0.3 * rng.lognormvariate(0, 0.1))
    assert correction.change_count == 1
    assert log(correction.factor()) == pytest.approx(log(3), abs=0.25)


def test_links_are_learnt_apart_and_unknown_ones_are_as_all():
    links = Links()
    for _ in range(80):
        links.observe(("a", "b"), transferred_bytes=10**8, transfer_s=0.1, handover_s=0.002)
        links.observe(("a", "c"), transferred_bytes=10**8, transfer_s=1.0, handover_s=0.002)
    fast, slow, other = (
        links.exposed_s(("a", host), total_bytes=1e8, last_bytes=1e8, hidden_s=0.0) for host in "bcd"
    )
    assert fast == pytest.approx(0.1, rel=0.1)
    assert slow == pytest.approx(1.0, rel=0.1)
    assert fast < other < slow


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 9999), st.integers(0, 9999)), max_size=20))
def test_a_backlog_forgets_what_is_taken_out(entries):
    backlog = Backlog()
    for priority, full, fresh in entries:
        backlog = backlog.plus(priority=priority, full_tokens=full, tokens=fresh, pairs=full * fresh)
    assert backlog.ahead(3, 10**9).tokens == backlog.tokens
    assert backlog.head().tokens <= backlog.tokens
    for priority, full, fresh in entries:
        backlog = backlog.minus(priority=priority, full_tokens=full, tokens=fresh, pairs=full * fresh)
    assert backlog == Backlog()


def test_the_window_tells_error_and_bias_of_the_latest_hundred():
    window = ErrorWindow()
    for _ in range(300):
        window.observe(5.0, 1.0, tolerance_s=0.0)
    for _ in range(50):
        window.observe(1.2, 1.0, tolerance_s=0.0)
        window.observe(0.8, 1.0, tolerance_s=0.0)
    assert (window.count, window.mape, window.bias) == (100, pytest.approx(0.2), pytest.approx(0, abs=1e-6))


def test_bad_predictions_are_not_trusted_until_they_are_good_again():
    worker = cluster_of("a")[WorkerId("a")]
    predictor, rng = Predictor(error_max=0.5), random.Random(3)

    def see(count, spread):
        for _ in range(count):
            raw_s = 1.0
            predicted = Prediction(PrefillForecast(0.0, raw_s, 0.0, 0.0, raw_s), 0.01, 0.01, 0.0)
            elapsed_s = raw_s * rng.lognormvariate(0, spread)
            predictor.observe_first_token(
                worker.snapshot, predicted, elapsed_s, PhaseTimings(0.0, 0.0, elapsed_s)
            )

    see(100, 0.1)
    assert predictor.is_trusted
    see(200, 2.0)
    assert not predictor.is_trusted
    see(400, 0.1)
    assert predictor.is_trusted
    assert predictor.fallback_count == 1


def seen(predictor, worker, predicted_s, elapsed_s):
    predicted = Prediction(PrefillForecast(0.0, predicted_s, 0.0, 0.0, predicted_s), 0.01, 0.01, 0.0)
    timings = PhaseTimings(0.0, 0.0, elapsed_s)
    predictor.observe_first_token(worker.snapshot, predicted, elapsed_s, timings)


def ended(predictor, worker, tpot_s):
    predicted = Prediction(PrefillForecast(0.0, 0.1, 0.0, 0.0, 0.1), 0.01, 0.01, 0.0, 0.01, 0.01)
    predictor.observe_end(worker.snapshot, predicted, 21, 20 * tpot_s, is_whole=True)


def test_predictions_that_are_far_off_are_trusted_while_they_tell_short_from_long():
    worker = cluster_of("a")[WorkerId("a")]
    predictor, rng = Predictor(error_max=0.5), random.Random(4)
    for _ in range(400):
        predicted_s = rng.lognormvariate(0, 1.2)
        seen(predictor, worker, predicted_s, predicted_s * rng.lognormvariate(0, 0.8))
        assert predictor.is_trusted
    assert predictor.corrections_of(WorkerId("a")).ttft_errors.excess > 0.5
    for _ in range(200):  # as far off, and they tell nothing
        seen(predictor, worker, rng.lognormvariate(0, 1.2), rng.lognormvariate(0, 0.4))
    assert not predictor.is_trusted


def test_errors_of_a_worker_that_gets_no_prompts_any_more_do_not_keep_predictions_from_being_trusted():
    cluster = cluster_of("a", "b")
    idle, busy = cluster[WorkerId("a")], cluster[WorkerId("b")]
    predictor = Predictor(error_max=0.5)
    for _ in range(20):
        seen(predictor, idle, 5.0, 1.0)
        seen(predictor, busy, 5.0, 1.0)
    assert not predictor.is_trusted
    # By cached prefix no prompt goes to a decode worker, whose answers end all the same.
    for _ in range(120):
        seen(predictor, busy, 1.0, 1.0)
        ended(predictor, idle, 0.01)
    assert predictor.is_trusted


def test_wrong_tpots_alone_leave_predictions_trusted():
    worker = cluster_of("a")[WorkerId("a")]
    predictor = Predictor(error_max=0.5)
    for _ in range(60):
        seen(predictor, worker, 1.0, 1.0)
        ended(predictor, worker, 0.002)
    assert predictor.is_trusted
    assert predictor.corrections_of(WorkerId("a")).tpot_errors.excess > 0.5


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.05, 1.5))
def test_the_probability_rises_with_the_limit(limit_s, predicted_s, sigma):
    assert attainment_probability(limit_s, predicted_s, sigma) <= attainment_probability(
        limit_s * 1.1, predicted_s, sigma
    )
    assert attainment_probability(predicted_s, predicted_s, sigma) == pytest.approx(0.5)
    assert attainment_probability(0.0, predicted_s, sigma) == 0.0
