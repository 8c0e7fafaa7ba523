"""Advice that nobody follows is logged when it grows or has been smaller for long, not each time."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.messages import Role
from control_plane.autoscaler.advice import AdviceFilter

P, D = Role.PREFILL, Role.DECODE
PATIENCE_S = 300.0
ONE = {P: 1, D: 1}


def test_more_is_said_at_once_and_once():
    advised = AdviceFilter(PATIENCE_S)
    assert not advised.is_news(ONE, ONE, 0.0)
    assert advised.is_news({P: 1, D: 2}, ONE, 1.0)
    assert not advised.is_news({P: 1, D: 2}, ONE, 2.0)
    assert advised.is_news({P: 2, D: 2}, ONE, 3.0)


def test_less_is_said_when_it_has_been_less_for_the_patience():
    advised, have = AdviceFilter(PATIENCE_S), {P: 1, D: 3}
    assert not advised.is_news({P: 1, D: 2}, have, 0.0)
    assert not advised.is_news(have, have, 200.0)  # the replicas were needed after all
    assert not advised.is_news({P: 1, D: 2}, have, 250.0)
    assert not advised.is_news({P: 1, D: 2}, have, 549.0)
    assert advised.is_news({P: 1, D: 2}, have, 550.0)


def test_what_was_advised_and_is_needed_no_longer_ends_without_a_word():
    advised = AdviceFilter(PATIENCE_S)
    assert advised.is_news({P: 1, D: 2}, ONE, 0.0)
    assert not any(advised.is_news(ONE, ONE, now_s) for now_s in (1.0, 200.0, 400.0))
    assert advised.is_news({P: 1, D: 2}, ONE, 500.0)


def test_another_size_of_the_cluster_begins_anew():
    advised = AdviceFilter(PATIENCE_S)
    assert advised.is_news({P: 1, D: 2}, ONE, 0.0)
    assert not advised.is_news({P: 1, D: 2}, {P: 1, D: 2}, 1.0)
    assert advised.is_news({P: 1, D: 3}, {P: 1, D: 2}, 2.0)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=60))
def test_within_the_patience_advice_only_grows(wanted):
    advised = AdviceFilter(PATIENCE_S)
    said = [
        counts
        for now_s, (p, d) in enumerate(wanted)
        if advised.is_news(counts := {P: p, D: d}, ONE, float(now_s))
    ]
    assert len(said) <= 4
