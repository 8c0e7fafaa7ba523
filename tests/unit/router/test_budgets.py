"""Retry budgets: how much work may be done twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decisions.retry_budgets import SLICE_S, WINDOW_S, CreditBudget, WindowBudget


def test_the_floor_is_always_there_and_comes_back_with_time():
    budget = WindowBudget(share=0.0, floor=2)
    assert [budget.take(0.0), budget.take(1.0), budget.take(2.0)] == [True, True, False]
    assert budget.refused_count == 1
    assert budget.retry_after_s(2.0) == pytest.approx(WINDOW_S + SLICE_S - 2.0)
    assert not budget.take(9.9)
    assert budget.take(11.0)


def test_what_succeeds_earns_its_share():
    budget = WindowBudget(share=0.2, floor=0)
    for _ in range(9):
        budget.earn(0.0)
    assert [budget.take(0.0), budget.take(0.0)] == [True, False]
    budget.earn(0.0)
    assert budget.take(0.0)
    assert not budget.take(30.0)  # All of it is long ago.


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3)), max_size=200), st.floats(0, 1), st.integers(0, 5))
def test_within_any_window_no_more_is_taken_than_floor_and_share(events, share, floor):
    budget = WindowBudget(share=share, floor=floor)
    now_s, earned_s, spent_s = 0.0, [], []
    for earns, pause_s in events:
        now_s += pause_s
        if earns:
            budget.earn(now_s)
            earned_s.append(now_s)
        elif budget.take(now_s):
            spent_s.append(now_s)
            spent = sum(at_s > now_s - WINDOW_S for at_s in spent_s)
            earned = sum(at_s > now_s - WINDOW_S - SLICE_S for at_s in earned_s)
            assert spent <= floor + share * earned + 1e-9


def test_credit_is_a_share_of_all_and_only_so_much_is_saved():
    budget = CreditBudget(share=0.1, saved_max=2.0)
    taken = 0
    for _ in range(105):
        budget.earn()
        if budget.has_credit:
            budget.take()
            taken += 1
    assert taken == 10
    for _ in range(1000):
        budget.earn()
    budget.take()
    budget.take()
    assert not budget.has_credit
