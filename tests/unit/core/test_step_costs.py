"""Costs of steps whose first sequences cost more or less than later ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.costs import FEW_DECODES, StepCosts, median_costs

SECONDS = st.floats(0, 10)


def costs_of(decode_s, first_s):
    """`first_s`: what each of the first sequences costs."""
    return StepCosts(0.01, 1e-4, decode_s, 1e-7, few_decode_s=first_s - decode_s)


@given(SECONDS, SECONDS, st.integers(0, 64))
def test_one_more_sequence_never_makes_a_step_shorter(decode_s, first_s, count):
    costs = costs_of(decode_s, first_s)
    assert costs.is_usable
    expected = first_s if count < FEW_DECODES else decode_s
    assert costs.one_more_s(count) == pytest.approx(expected, abs=1e-9 + 1e-12 * count)
    assert costs.decodes_s(count) >= 0


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5))
def test_medians_of_usable_costs_are_usable(each):
    found = median_costs(costs_of(*one) for one in each)
    assert found is not None
    assert found.is_usable


@pytest.mark.parametrize("few_s", [-2e-4, -1e9, math.nan, math.inf])
def test_first_sequences_that_cost_less_than_nothing_are_refused(few_s):
    assert not StepCosts(0.01, 1e-4, 1e-4, 1e-7, few_decode_s=few_s).is_usable
