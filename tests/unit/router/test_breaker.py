"""Breakers: which workers are kept out, for how long, and how they come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import Role
from router.decisions.breaker import Breakers, BreakerState, slowness

A, B, C = WorkerId("a.1"), WorkerId("b.1"), WorkerId("c.1")
POOL = {A: Role.AGGREGATED, B: Role.AGGREGATED, C: Role.AGGREGATED}
SEQ, OTHER = SequenceId("s"), SequenceId("t")


def breakers(**fields):
    return Breakers(RouterConfig(**{"breaker_failures": 3, "breaker_open_s": 2.0} | fields))


def fail(book, worker=A, times=3, now_s=0.0):
    for _ in range(times):
        book.failed(worker, "broken", now_s=now_s)


def state(book, now_s, worker=A):
    return book.state(worker, now_s=now_s).state


def test_failures_in_a_row_open_it_and_a_success_between_does_not():
    book = breakers()
    fail(book, times=2)
    book.worked(A, SEQ, now_s=0.0)
    fail(book, times=2)
    assert state(book, 0.0) is BreakerState.CLOSED
    fail(book, times=1)
    assert state(book, 0.0) is BreakerState.OPEN
    assert book.state(A, now_s=0.0).reason == "3 failures in a row, the last one: broken"
    assert book.suspended(POOL, now_s=1.9) == {A}


def test_one_probe_at_a_time_and_its_success_closes_it():
    book = breakers()
    fail(book)
    assert state(book, 2.0) is BreakerState.HALF_OPEN
    assert book.suspended(POOL, now_s=2.0) == frozenset()
    book.placed(A, SEQ, now_s=2.0)
    assert book.suspended(POOL, now_s=2.1) == {A}
    book.worked(A, OTHER, now_s=2.2)  # It was placed before, so it says nothing.
    assert state(book, 2.2) is BreakerState.HALF_OPEN
    book.worked(A, SEQ, now_s=2.3)
    assert state(book, 2.3) is BreakerState.CLOSED
    assert book.is_idle


def test_a_probe_that_ends_without_a_verdict_makes_room_for_the_next():
    book = breakers()
    fail(book)
    book.placed(A, SEQ, now_s=2.0)
    book.left(SEQ, ())  # The client went away.
    assert book.suspended(POOL, now_s=2.1) == frozenset()
    book.placed(A, OTHER, now_s=2.1)
    book.worked(A, OTHER, now_s=2.2)
    assert state(book, 2.2) is BreakerState.CLOSED


def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_a_bound():
    book, now_s, spans = breakers(breaker_open_max_s=10.0), 0.0, []
    fail(book)
    for _ in range(4):
        began_s = now_s
        while state(book, now_s) is BreakerState.OPEN:
            now_s += 0.5
        spans.append(now_s - began_s)
        book.placed(A, SEQ, now_s=now_s)
        book.failed(A, "placed before", now_s=now_s, seq_id=OTHER)
        assert state(book, now_s) is BreakerState.HALF_OPEN
        book.failed(A, "broken", now_s=now_s, seq_id=SEQ)
    assert spans == [2.0, 4.0, 8.0, 10.0]


def test_after_long_good_times_it_begins_with_the_shortest_time_again():
    book = breakers()
    fail(book)
    book.placed(A, SEQ, now_s=2.0)
    book.worked(A, SEQ, now_s=2.0)
    fail(book, now_s=3.0)
    assert state(book, 6.9) is BreakerState.OPEN  # It failed again soon, so the wait is 4 s.
    book.placed(A, SEQ, now_s=7.0)
    book.worked(A, SEQ, now_s=7.0)
    fail(book, now_s=1000.0)
    assert state(book, 1002.0) is BreakerState.HALF_OPEN


def test_half_of_many_attempts_failing_opens_it():
    book = breakers(breaker_failures=5)
    for _ in range(10):
        book.worked(A, SEQ, now_s=0.0)
        book.failed(A, "broken", now_s=0.0)
        book.worked(A, SEQ, now_s=0.0)
    assert state(book, 0.0) is BreakerState.CLOSED  # A third is too few.
    for _ in range(10):
        book.worked(A, SEQ, now_s=0.0)
        book.failed(A, "broken", now_s=0.0)
    assert state(book, 0.0) is BreakerState.OPEN


def test_being_full_is_no_failure_unless_it_never_works():
    book = breakers()
    for _ in range(11):
        book.failed(A, "no room", now_s=0.0, is_refusal=True)
    assert state(book, 0.0) is BreakerState.CLOSED
    book.failed(A, "no room", now_s=0.0, is_refusal=True)
    assert state(book, 0.0) is BreakerState.OPEN


def test_a_new_life_of_the_same_replica_is_the_same_replica():
    book = breakers()
    for life in range(3):
        book.failed(WorkerId(f"a.{life}"), "lost", now_s=0.0)
    assert state(book, 0.0, WorkerId("a.9")) is BreakerState.OPEN


def costs(factor):
    return StepCosts(0.01 * factor, 1e-4 * factor, 1e-4 * factor, 1e-7 * factor)


def test_steps_that_became_much_slower_than_those_of_peers_open_it():
    book = breakers(breaker_slow_factor=4.0)
    slow, usual = slowness(costs(9), costs(1)), slowness(costs(2), costs(1))
    assert (slow, usual) == pytest.approx((9, 2))
    for _ in range(4):
        book.reported(B, usual, POOL, now_s=0.0)
        book.reported(C, usual, POOL, now_s=0.0)
        book.reported(A, slow, POOL, now_s=0.0)
    assert state(book, 0.0) is BreakerState.OPEN
    assert "9.0 times as long" in book.state(A, now_s=0.0).reason


def test_when_all_became_slower_nobody_is_sick():
    book = breakers(breaker_slow_factor=4.0)
    for _ in range(10):
        for worker in POOL:
            book.reported(worker, 9.0, POOL, now_s=0.0)
    assert not book.any_open
    assert slowness(costs(1), None) is None


def test_off_means_off():
    book = breakers(breaker_failures=0)
    fail(book, times=100)
    assert not book.any_open


@pytest.mark.parametrize(("share", "out"), [(0.0, 0), (0.34, 1), (0.5, 1), (1.0, 2)])
def test_only_a_share_of_a_pool_is_kept_out_and_never_all(share, out):
    book = breakers(breaker_share_max=share)
    for worker in POOL:
        fail(book, worker)
    assert len(book.suspended(POOL, now_s=1.0)) == out
    assert book.suspended({A: Role.AGGREGATED}, now_s=1.0) == frozenset()
    assert book.suspended({A: Role.PREFILL, B: Role.DECODE}, now_s=1.0) == frozenset()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["fail", "refuse", "work", "place", "left"]),
        st.sampled_from([A, B, C]),
        st.sampled_from([SEQ, OTHER]),
        st.floats(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(EVENTS, st.sampled_from([Role.PREFILL, Role.DECODE, Role.AGGREGATED]))
def test_whatever_happens_somebody_is_left_and_everybody_is_tried_again(events, role):
    book, now_s = breakers(breaker_failures=2, breaker_open_max_s=8.0), 0.0
    roles = {A: role, B: Role.AGGREGATED, C: Role.DECODE}
    for what, worker, seq, pause_s in events:
        now_s += pause_s
        match what:
            case "fail" | "refuse":
                book.failed(worker, "x", now_s=now_s, is_refusal=what == "refuse")
            case "work":
                book.worked(worker, seq, now_s=now_s)
            case "place":
                book.placed(worker, seq, now_s=now_s)
            case _:
                book.left(seq, ())
        book.check()
        out = book.suspended(roles, now_s=now_s)
        for phase in ("prefills", "decodes"):
            pool = {w for w, r in roles.items() if getattr(r, phase)}
            assert pool - out
    for seq in (SEQ, OTHER):
        book.left(seq, ())
    assert book.is_idle
    assert book.suspended(roles, now_s=now_s + 8.0) == frozenset()
