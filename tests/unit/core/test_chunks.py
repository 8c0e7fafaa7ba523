"""How much of a prompt a step computes beside sequences that decode."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.chunks import PLANNED_SHARE, TOKENS_MAX, PromptRoom, room_s, tokens_within
from baton.core.costs import StepCosts, prompt_pairs

SECONDS = st.floats(0, 10)
TOKEN_S = st.floats(0, 1e-2)
PAIR_S = st.one_of(st.just(0.0), st.floats(1e-12, 1e-5))


def costs_of(token_s, pair_s):
    return StepCosts(0.01, token_s, 1e-4, 1e-7, pair_s=pair_s)


def seconds_of(start, count, token_s, pair_s):
    return token_s * count + pair_s * prompt_pairs(start, start + count)


@pytest.mark.parametrize(
    ("slo_s", "decoding_s", "floor_s", "expected_s"),
    [
        (0.1, 0.04, 0.0, PLANNED_SHARE * 0.1 - 0.04),
        (0.1, 0.0895, 0.0, PLANNED_SHARE * 0.1 - 0.0895),
        (0.1, 0.095, 0.0, 0.095),  # missed: as long as the others take
        (0.1, 0.04, 0.3, 0.26),  # weights take longer to be read
        (0.0, 0.04, 0.3, math.inf),  # there is no objective
    ],
)
def test_prompts_have_what_the_objective_leaves(slo_s, decoding_s, floor_s, expected_s):
    assert room_s(slo_s, decoding_s, floor_s=floor_s) == pytest.approx(expected_s)


@given(SECONDS, st.integers(0, 10**6), TOKEN_S, PAIR_S)
def test_so_many_tokens_fit_and_no_more(seconds, start, token_s, pair_s):
    count = tokens_within(seconds, start, token_s=token_s, pair_s=pair_s)
    assert 0 <= count <= TOKENS_MAX
    tolerance_s = 1e-6 * seconds + 1e-9 * (count + 2)
    assert seconds_of(start, count, token_s, pair_s) <= seconds + tolerance_s
    if count < TOKENS_MAX:
        assert seconds_of(start, count + 2, token_s, pair_s) + tolerance_s >= seconds


@pytest.mark.parametrize("seconds", [1e9, math.inf])
def test_without_costs_or_limit_any_number_fits(seconds):
    assert tokens_within(seconds, 0, token_s=0.0, pair_s=0.0) == TOKENS_MAX
    assert tokens_within(math.inf, 5, token_s=1.0, pair_s=1.0) == TOKENS_MAX


@given(
    st.integers(-3, 600),
    SECONDS,
    TOKEN_S,
    PAIR_S,
    st.integers(1, 32),
    st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 3000)), min_size=1, max_size=6),
)
def test_chunks_fill_the_room_and_do_not_overrun_it(tokens, seconds, token_s, pair_s, least, prompts):
    room = PromptRoom(tokens, costs_of(token_s, pair_s), seconds=seconds, least=least)
    taken: list[tuple[int, int]] = []
    for start, count in prompts:
        if room.is_full:
            assert room.take(start, count) == 0
            break
        taken.append((start, room.take(start, count)))
        assert 1 <= taken[-1][1] <= count
        assert room.is_full or taken[-1][1] == count
    total = sum(count for _, count in taken)
    assert total <= max(0, tokens)
    # The last token of a chunk may begin while there is any time left, and the least number always may.
    *whole, (start, count) = taken or [(0, 0)]
    used_s = sum(seconds_of(*one, token_s, pair_s) for one in whole)
    used_s += seconds_of(start, max(0, count - 1), token_s, pair_s)
    if total > least:
        assert used_s <= seconds + 1e-6 * seconds + 1e-9 * (total + 2)
    if room.is_full and total < tokens:
        assert total >= least


def test_tokens_far_into_a_prompt_take_more_room():
    near, far = (PromptRoom(600, costs_of(1e-4, 1e-7), seconds=0.1001) for _ in range(2))
    assert near.take(0, 600) == 600
    assert far.take(4000, 600) == 196
    assert far.is_full


def test_a_limit_holds_whatever_time_there_is():
    room = PromptRoom(600, costs_of(1e-4, 1e-7))
    room.limit(100)
    assert room.take(0, 400) == 100
    assert room.is_full
    room.limit(50)
    assert room.take(0, 400) == 0
