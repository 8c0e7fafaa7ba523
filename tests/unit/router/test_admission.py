"""The line of those that wait, and its timers, against dull models."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import SequenceId
from router.admission import OVERTAKEN_MAX, RETRY_AFTER_S_MAX, Pace, WaitLine
from router.timers import Timers

KEYS = st.sampled_from([SequenceId(c) for c in "abcdef"])


def test_a_sequence_that_comes_back_takes_its_old_place_and_no_room():
    line = WaitLine(new_max=1)
    line.add(SequenceId("new"), arrival=5, is_new=True)
    assert not line.has_room
    line.add(SequenceId("old"), arrival=2, is_new=False)
    assert line.in_order() == ["old", "new"]
    line.check()


def test_after_enough_overtaking_nothing_goes_before():
    line = WaitLine(new_max=9)
    line.add(SequenceId("large"), arrival=1, is_new=True)
    for i in range(OVERTAKEN_MAX):
        assert line.may_follow_all()
        line.went_before(2 + i)
    assert not line.may_follow_all()
    line.remove(SequenceId("large"))
    assert line.may_follow_all()
    line.check()


def test_the_hint_grows_with_the_line_and_is_bounded():
    pace = Pace()
    for i in range(100):
        pace.freed(i * 0.5)
    assert pace.retry_after_s(0) < pace.retry_after_s(20) < pace.retry_after_s(10_000) == RETRY_AFTER_S_MAX


@given(st.lists(st.tuples(st.sampled_from(["set", "drop", "due"]), KEYS, st.integers(0, 20)), max_size=60))
def test_timers_agree_with_a_dictionary(operations):
    timers, model = Timers(), {}
    for what, key, at_s in operations:
        if what == "set":
            timers.set(key, at_s)
            model[key] = at_s
        elif what == "drop":
            timers.drop(key)
            model.pop(key, None)
        else:
            due = timers.take_due(at_s)
            assert sorted(due) == sorted(k for k, t in model.items() if t <= at_s)
            model = {k: t for k, t in model.items() if t > at_s}
        assert timers.next_s == min(model.values(), default=None)
