"""Costs of steps whose first sequences cost more or less than later ones, and chunks beside them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.costs import FEW_DECODES, TOKENS_MAX, StepCosts, chunk_beside, median_costs

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


@pytest.mark.parametrize(
    ("slo_s", "decoding_s", "floor_s", "tokens"),
    [
        (0.1, 0.04, 0.0, 50),  # nine tenths of the objective
        (0.1, 0.0895, 0.0, 16),  # the least chunk
        (0.1, 0.095, 0.0, 95),  # missed: as long as the others take
        (0.001, 0.01, 0.0, 16),
        (0.1, 0.04, 0.3, 260),  # weights take longer to be read
        (1e9, 0.0, 0.0, TOKENS_MAX),
    ],
)
def test_a_chunk_beside_others_takes_what_their_objective_leaves(slo_s, decoding_s, floor_s, tokens):
    found = chunk_beside(slo_s, decoding_s, 0.001, floor_s=floor_s, chunk_tokens_min=16)
    assert found == pytest.approx(tokens, abs=1)
    assert chunk_beside(slo_s, decoding_s, 0.0, floor_s=floor_s, chunk_tokens_min=16) <= TOKENS_MAX
