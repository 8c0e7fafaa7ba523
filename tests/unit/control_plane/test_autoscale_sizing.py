"""Forecasts and queueing approximations in cases where theory or arithmetic gives the answer."""

import math
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from baton.core.demand import BINS_MAX, bin_of
from control_plane.autoscaler.forecast import MARGIN_MAX, Forecaster, quantile
from control_plane.autoscaler.sizing import (
    DecodeLoad,
    PromptGroup,
    aggregated_needed,
    batch_of,
    decode_needed,
    erlang_c,
    largest_batch,
    prefill_needed,
    prompts_missed,
)
from tests.unit.control_plane.simulated_cluster import KIND


def test_a_jump_is_no_reason_for_a_margin_as_large():
    forecaster = Forecaster(caution=0.75)
    for value in [1.0] * 60 + [3.0] * 20:
        forecaster.observe(value)
    assert 3.0 <= forecaster.predict(8).upper <= 3.0 * (1 + MARGIN_MAX) * 1.05


def test_erlang_c_where_it_is_known():
    assert erlang_c(1, 0.6) == pytest.approx(0.6)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(3, 3.0) == 1.0
    assert erlang_c(10, 0.0) == 0.0
    # Published tables give this value for 10 servers at 7 erlang.
    assert erlang_c(10, 7.0) == pytest.approx(0.2217, abs=5e-4)


def test_one_server_with_exponential_service_misses_as_its_tail_says():
    """M/M/1: P(wait > t) = rho exp(-(mu - lambda) t). Two service times are mixed so that C² = 1."""
    # A mix of two service times with a squared coefficient of variation of one.
    short, long = 0.0, 2.0
    prompts = [PromptGroup(0.5, short + 1e-9, 5.0), PromptGroup(0.5, long, 5.0)]
    missed = prompts_missed(prompts, work=0.5, servers=1)
    waits = [0.5 * math.exp(-0.5 * (5.0 - s)) for s in (short, long)]
    assert missed == pytest.approx(sum(waits) / 2, rel=1e-6)


services = st.lists(
    st.tuples(st.floats(0.1, 5), st.floats(0.01, 3), st.sampled_from([0.0, 1.0, 4.0])), min_size=1, max_size=5
)


@hypothesis_settings(max_examples=80, deadline=None)
@given(services, st.floats(0.1, 30), st.floats(1.01, 2))
def test_more_work_never_takes_fewer_and_more_replicas_never_miss_more(kinds, work, factor):
    prompts = [PromptGroup(*kind) for kind in kinds]
    few = prefill_needed(prompts, work=work, missed_max=0.05)
    assert prefill_needed(prompts, work=work * factor, missed_max=0.05) >= few > work
    misses = [prompts_missed(prompts, work=work, servers=n) for n in range(int(work) + 1, int(work) + 12)]
    assert all(a >= b - 1e-12 for a, b in pairwise(misses))


@hypothesis_settings(max_examples=80, deadline=None)
@given(st.floats(1, 50_000), st.floats(10, 60_000), st.sampled_from([0.0, 0.025, 0.03, 0.1]), st.floats(1, 3))
def test_more_tokens_never_take_fewer_decode_workers(tokens, context, tpot, factor):
    load = DecodeLoad(tokens, context, tpot)
    count = decode_needed(load, KIND)
    assert count >= 1
    assert decode_needed(DecodeLoad(tokens * factor, context, tpot), KIND) >= count
    prompts = [PromptGroup(1.0, 0.1, 2.0)]
    assert aggregated_needed(prompts, load, KIND, work=1.0, missed_max=0.05) >= 1


def test_the_batch_obeys_littles_law():
    load = DecodeLoad(3000.0, 4000.0, 0.03)
    batch = batch_of(load, KIND, replicas=2)
    step_s = KIND.costs.step_s(decodes=batch, context_tokens=batch * 4000.0)
    assert batch / step_s == pytest.approx(1500.0)
    full = largest_batch(load, KIND)
    assert KIND.costs.step_s(decodes=full, context_tokens=full * 4000.0) <= 0.03 + 1e-9
    assert batch_of(DecodeLoad(1e9, 4000.0, 0.03), KIND, replicas=1) == math.inf


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.floats(0.1, 10_000), st.floats(0, 5e-3), st.floats(0, 1e-3), st.floats(10, 5_000))
def test_the_batch_obeys_littles_law_where_the_first_sequences_cost_more(tokens, few_s, decode_s, context):
    costs = msgspec.structs.replace(KIND.costs, few_decode_s=few_s, decode_s=decode_s)
    kind, load = msgspec.structs.replace(KIND, costs=costs), DecodeLoad(tokens, context, 0.05)
    batch = batch_of(load, kind, replicas=1)
    if batch < math.inf:
        step_s = costs.step_s(decodes=batch, context_tokens=batch * context)
        assert batch / step_s == pytest.approx(tokens, rel=1e-6)
    full = largest_batch(load, kind)
    if full > 1:
        assert costs.step_s(decodes=full, context_tokens=full * context) <= 0.05 * (1 + 1e-9)


def test_prompts_are_binned_by_length():
    assert bin_of(1) == 0
    assert bin_of(2**20) == 40
    assert bin_of(3000) <= bin_of(3001) < bin_of(6100)
    assert bin_of(10**12) == BINS_MAX - 1


def test_quantiles():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.75) == 1.75


def fed(values, **more):
    forecaster = Forecaster(caution=0.8, **more)
    for value in values:
        forecaster.observe(value)
    return forecaster


def test_noise_around_a_mean_is_forecast_by_the_mean():
    rng = Random(1)
    forecast = fed([10 + rng.gauss(0, 1) for _ in range(200)]).predict(8)
    assert forecast.value == pytest.approx(10, abs=0.6)
    assert 0.4 < forecast.error < 1.2
    assert forecast.value <= forecast.upper < forecast.value + 1.6


def test_a_ramp_is_forecast_by_its_trend():
    forecast = fed([float(i) for i in range(100)]).predict(8)
    assert forecast.model == "trend"
    assert 102 < forecast.value <= forecast.upper <= 109


def test_a_season_is_forecast_by_the_last_one():
    wave = [50 + 40 * math.sin(2 * math.pi * i / 96) for i in range(96 * 3)]
    forecast = fed(wave, season_steps=96).predict(16)
    assert forecast.model == "season"
    assert forecast.value == pytest.approx(50 + 40 * math.sin(2 * math.pi * (96 * 3 + 15) / 96), abs=6)
    assert fed(wave).predict(16).model != "season"


def test_forecasts_of_nothing_are_nothing():
    forecast = fed([0.0] * 50).predict(4)
    assert (forecast.value, forecast.upper, forecast.error) == (0.0, 0.0, 0.0)
