"""Predicted probabilities come true as often as they say, whatever errors look like."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decisions.prediction.calibration import AttainmentRecord, AttainmentRecords
from router.decisions.prediction.distribution import (
    COUNT_MIN,
    KINDS_MAX,
    NORMAL,
    WINDOW,
    Z_MAX,
    ErrorsByKind,
    LatestErrors,
)
from router.decisions.prediction.regression import TimeRegression

SHAPES = {
    "normal": lambda rng: rng.gauss(0, 1),
    "biased": lambda rng: rng.gauss(0.7, 0.4),
    "late tail": lambda rng: rng.expovariate(1.0) - 0.3,
    "two kinds": lambda rng: rng.gauss(-1, 0.1) if rng.random() < 0.6 else rng.gauss(1.5, 0.3),
    "wide": lambda rng: 4 * rng.gauss(0, 1),
}


def held(errors, draws, level, *, settled):
    """Return the share of errors within the quantile that was said before each."""
    count = within = 0
    for i, z in enumerate(draws):
        said = errors.distribution
        if i >= settled:
            count += 1
            within += z <= said.quantile(level)
        errors.observe(z, said)
    return within / count


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_as_many_errors_are_within_a_level_as_it_says(shape, level):
    rng = Random(f"{shape} {level}")
    draws = [SHAPES[shape](rng) for _ in range(4000)]
    assert held(LatestErrors(), draws, level, settled=200) == pytest.approx(level, abs=0.02)


def test_errors_that_drift_are_still_covered_in_the_long_run():
    rng = Random(7)
    draws = [rng.gauss(0.0003 * i + math.sin(i / 1500), 1) for i in range(12000)]
    assert held(LatestErrors(), draws, 0.9, settled=500) == pytest.approx(0.9, abs=0.03)


@given(st.lists(st.floats(-30, 30), max_size=120), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_never_fall_and_are_bounded(draws, one, other):
    errors = LatestErrors()
    for z in draws:
        errors.observe(z, errors.distribution)
    found, (low, high) = errors.distribution, sorted((one, other))
    assert -Z_MAX <= found.quantile(low) <= found.quantile(high) <= Z_MAX


def test_what_is_no_number_is_left_out_and_memory_is_bounded():
    errors = LatestErrors()
    for z in (math.nan, math.inf, -math.inf):
        errors.observe(z, errors.distribution)
    assert errors.count == 0
    for i in range(3 * WINDOW):
        errors.observe(i % 7, errors.distribution)
    assert len(errors._latest) == len(errors._ordered) == WINDOW
    kinds = ErrorsByKind(by_size=True)
    for i in range(3 * KINDS_MAX):
        kinds.observe(f"class {i}", 0.1, 0.0, NORMAL)
    assert len(kinds._kinds) == KINDS_MAX


def test_short_and_long_predictions_have_errors_of_their_own():
    kinds, rng = ErrorsByKind(by_size=True), Random(1)
    spreads = {0.03: 2.0, 3.0: 0.2}
    for _ in range(600):
        for predicted_s, spread in spreads.items():
            said = kinds.of("chat", predicted_s)
            kinds.observe("chat", predicted_s, rng.gauss(0, spread), said)
    for predicted_s, spread in spreads.items():
        assert kinds.of("chat", predicted_s).quantile(0.9) == pytest.approx(1.28 * spread, rel=0.2)
    assert kinds.held_shares()["chat"][1] == pytest.approx(0.9, abs=0.03)


def test_a_class_is_like_the_others_until_it_was_seen_often_enough():
    kinds = ErrorsByKind(by_size=False)
    for _ in range(400):
        kinds.observe("batch", 0.1, 3.0, kinds.of("batch", 0.1))
    assert kinds.of("chat", 0.1) is kinds.all.distribution
    for _ in range(COUNT_MIN):
        kinds.observe("chat", 0.1, -2.0, kinds.of("chat", 0.1))
    assert kinds.of("chat", 0.1).quantile(0.3) == pytest.approx(-2.0, abs=0.3)
    assert kinds.of("batch", 0.1).quantile(0.5) == pytest.approx(3.0, abs=0.1)


# --- going back to the usual --------------------------------------------------------------------------


def test_the_line_takes_away_the_part_of_a_swing_that_does_not_come_true():
    rng, line = Random(3), TimeRegression()
    plain = corrected = 0.0
    for i in range(3000):
        swing = rng.gauss(0, 0.3)
        predicted, actual = 0.02 * math.exp(swing), 0.025 * math.exp(0.4 * swing + rng.gauss(0, 0.05))
        if i > 200:
            plain += abs(math.log(predicted / actual))
            corrected += abs(math.log(line.expected_s(predicted) / actual))
        line.observe(predicted, actual)
    assert line.slope == pytest.approx(0.4, abs=0.05)
    assert corrected < 0.25 * plain


def test_predictions_that_come_true_stay_as_they_are():
    line = TimeRegression()
    assert line.expected_s(0.02) == 0.02
    for i in range(500):
        line.observe(0.01 * (1 + i % 9), 0.01 * (1 + i % 9))
    assert line.expected_s(0.05) == pytest.approx(0.05, rel=0.01)
    assert line.slope == pytest.approx(1.0, abs=0.01)


@given(
    st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=40),
    st.floats(1e-6, 1e4),
)
def test_the_line_stays_finite_whatever_is_observed(seen, predicted_s):
    line = TimeRegression()
    for predicted, actual in seen:
        line.observe(predicted, actual)
    assert 0.0 <= line.slope <= 1.0
    assert math.isfinite(line.expected_s(predicted_s))


# --- probabilities that objectives hold ------------------------------------------------------------


def test_a_probability_comes_to_mean_what_was_seen():
    rng, record = Random(5), AttainmentRecord()
    for _ in range(4000):
        said = rng.random()
        record.observe(said, has_held=rng.random() < said**0.25)
    for said in (0.15, 0.4, 0.7, 0.9):
        assert record.mapped(said) == pytest.approx(said**0.25, abs=0.06)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=200), st.floats(0, 1), st.floats(0, 1))
def test_the_order_of_two_probabilities_stays(seen, one, other):
    record = AttainmentRecord()
    for said, has_held in seen:
        record.observe(said, has_held=has_held)
    low, high = sorted((one, other))
    assert 0.0 <= record.mapped(low) <= record.mapped(high) + 1e-12 <= 1.0 + 1e-9


def test_classes_are_calibrated_apart():
    records = AttainmentRecords()
    for _ in range(400):
        records.observe("chat", 0.7, has_held=True)
        records.observe("batch", 0.7, has_held=False)
    assert records.mapped("chat", 0.7) > 0.9
    assert records.mapped("batch", 0.7) < 0.15
    assert 0.4 < records.mapped("never seen", 0.7) < 0.6
