"""The admission queue: its order, bounds and fairness, against simple models."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.ids import SequenceId
from router.decisions.admission.attainment import attainment, below
from router.decisions.admission.drain_rate import (
    RETRY_AFTER_S_MAX,
    RETRY_AFTER_S_MIN,
    DrainRate,
    retry_after_s,
)
from router.decisions.admission.fair_shares import FairShares
from router.decisions.admission.queue import OLDEST_EVERY, OVERTAKEN_MAX, AdmissionQueue, Full, Waiter
from router.decisions.admission.retry_reservations import GRACE_S, RetryReservations
from router.decisions.prediction.forecast import Forecast
from router.decisions.timers import Timers

KEYS = st.sampled_from([SequenceId(c) for c in "abcdef"])
ARRIVALS = itertools.count(1)


def waiter(name, **fields):
    known = {"arrival": next(ARRIVALS), "tokens": 10, "due_s": 1000.0} | fields
    return Waiter(SequenceId(name), **known)


def order(line):
    return list(line.candidates())


def place_next(line, tokens=None):
    first = line[next(line.candidates())]
    line.placed(first, first.tokens if tokens is None else tokens)
    return first


# --- order ----------------------------------------------------------------------------------------


def test_within_a_tenant_priority_then_deadline_then_arrival():
    line = AdmissionQueue(new_max=9)
    line.add(waiter("late-due", due_s=9.0))
    line.add(waiter("soon-due", due_s=2.0))
    line.add(waiter("soon-due-later", due_s=2.0))
    line.add(waiter("urgent", due_s=50.0, priority=-1))
    line.add(waiter("idle", due_s=1.0, priority=3))
    assert order(line) == ["urgent", "soon-due", "soon-due-later", "late-due", "idle"]


def test_who_was_served_before_goes_first_and_takes_no_room():
    line = AdmissionQueue(new_max=1)
    line.add(waiter("new", due_s=0.5, arrival=2, priority=-9))
    assert isinstance(line.room_for(waiter("more")), Full)
    back = waiter("back", arrival=1, is_new=False, due_s=9e9)
    assert line.room_for(back) is None
    line.add(back)
    assert order(line) == ["back", "new"]
    line.check()


def test_late_ones_go_behind_all_that_are_not():
    line = AdmissionQueue(new_max=9)
    line.add(waiter("a1", tenant="a", due_s=1.0))
    line.add(waiter("a2", tenant="a", due_s=5.0))
    line.add(waiter("b1", tenant="b", due_s=9.0))
    assert line.next_due_s == 1.0
    assert line.take_overdue(1.0) == ["a1"]
    assert order(line)[-1] == "a1"
    line.add(waiter("a3", tenant="a", due_s=3.0), is_late=True)
    assert order(line)[-2:] == ["a1", "a3"]
    assert line.take_overdue(3.0) == ["a3"]  # its class may ask for a refusal now
    assert line.next_due_s == 5.0
    line.check()


def test_tenants_take_turns_where_nothing_fits():
    line = AdmissionQueue(new_max=99)
    for i in range(40):
        line.add(waiter(f"a{i}", tenant="a"))
    line.add(waiter("b0", tenant="b"))
    assert order(line).index("b0") <= 1


# --- fairness between tenants ---------------------------------------------------------------------

COSTS = st.lists(st.integers(1, 50), min_size=20, max_size=60)


@settings(max_examples=60)
@given(
    costs=st.lists(COSTS, min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([0.5, 1, 2]), min_size=4, max_size=4),
)
def test_while_tenants_wait_their_service_differs_by_two_requests_at_most(costs, weights):
    """The bound is that of virtual token counters: 2 · max cost, here over weights."""
    line = AdmissionQueue(new_max=1000)
    served = [0.0] * len(costs)
    for t, of_tenant in enumerate(costs):
        for i, tokens in enumerate(of_tenant):
            line.add(waiter(f"{t}/{i}", tenant=f"t{t}", weight=weights[t], tokens=tokens))
    bound = 2 * 50 / min(weights)
    while all(any(s.startswith(f"{t}/") for s in line._waiters) for t in range(len(costs))):
        placed = place_next(line)
        t = int(placed.tenant[1:])
        served[t] += placed.tokens / weights[t]
        assert max(served) - min(served) <= bound
    line.check()


def test_a_tenant_that_was_away_has_saved_up_nothing_and_lost_nothing():
    shares = FairShares()
    shares.came("busy", 1.0)
    shares.came("away", 1.0)
    shares.charge("away", 10, 1.0)
    shares.left("away")
    shares.charge("busy", 1000, 1.0)
    shares.came("away", 1.0)
    assert shares.level("away") == shares.level("busy")
    shares.charge("away", 500, 1.0)
    shares.left("away")
    shares.came("away", 1.0)
    assert shares.level("away") == shares.level("busy") + 500
    shares.check()


def test_where_nobody_waits_the_last_one_sets_the_level():
    shares = FairShares()
    shares.came("a", 1.0)
    shares.charge("a", 700, 1.0)
    shares.left("a")
    shares.came("b", 1.0)
    assert shares.level("b") == 700


def test_a_burst_may_use_what_was_not_used_before_and_no_more():
    shares = FairShares()
    shares.came("busy", 1.0)
    shares.charge("busy", 1000, 1.0)
    shares.came("away", 1.0, credit_tokens=100)
    assert shares.level("away") == 900
    shares.left("away")
    shares.came("away", 1.0, credit_tokens=100)
    assert shares.level("away") == 900
    shares.charge("busy", 30, 1.0)
    assert shares.part_of("new", 2.0) == 0.5


# --- nobody starves -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_sequence_with_everything_against_it_is_placed_in_bounded_time(seed):
    rng = random.Random(seed)
    line = AdmissionQueue(new_max=1000)
    older = rng.randint(0, 4)
    for i in range(older):
        line.add(waiter(f"older{i}", tenant="x", due_s=9e9, priority=9))
    line.add(waiter("poor", tenant="x", due_s=9e9, priority=10), is_late=True)
    line.shares.charge("x", 10**9, 1.0)
    placings = 0
    while "poor" in line:
        line.add(waiter(f"new{placings}", tenant=f"t{rng.randint(0, 3)}", due_s=rng.random()))
        place_next(line)
        placings += 1
    assert placings <= (older + 1) * OLDEST_EVERY


def test_after_enough_overtaking_nothing_goes_before_one_that_finds_no_room():
    line = AdmissionQueue(new_max=999)
    line.add(waiter("large"))
    line.missed(SequenceId("large"))
    for i in range(OVERTAKEN_MAX):
        assert line.may_be_passed(is_short_of_room=True)
        assert not line.is_starving(SequenceId("large"))
        line.placed(waiter(f"small{i}", due_s=0.0), 1)
    assert line.is_starving(SequenceId("large"))
    assert not line.may_be_passed(is_short_of_room=True)
    line.add(waiter("urgent", due_s=0.0, priority=-5))
    assert order(line) == ["large", "urgent"]
    line.remove(SequenceId("large"))
    assert line.may_be_passed(is_short_of_room=True)
    line.check()


# --- bounds ---------------------------------------------------------------------------------------


def test_in_a_full_line_those_give_way_that_have_most_in_it():
    line = AdmissionQueue(new_max=4)
    for i in range(3):
        line.add(waiter(f"a{i}", tenant="a", due_s=10.0 + i))
    line.add(waiter("b0", tenant="b"))
    assert line.room_for(waiter("b1", tenant="b")) == "a2"
    assert isinstance(line.room_for(waiter("a3", tenant="a")), Full)
    line.make_late(SequenceId("a0"))
    assert line.room_for(waiter("b1", tenant="b")) == "a0"
    assert line.room_for(waiter("a3", tenant="a", due_s=5.0)) == "a0"
    heavy = waiter("h", tenant="h", weight=0.25)
    assert isinstance(line.room_for(heavy), Full)


def test_classes_and_tenants_have_bounds_of_their_own():
    line = AdmissionQueue(new_max=9, class_max={"fast": 1}, tenant_max=2)
    line.add(waiter("a0", tenant="a", slo_class="fast"))
    full = line.room_for(waiter("b0", tenant="b", slo_class="fast"))
    assert isinstance(full, Full)
    assert "fast" in full.reason
    assert line.room_for(waiter("a1", tenant="a", slo_class="slow")) is None
    line.add(waiter("a1", tenant="a"))
    assert isinstance(line.room_for(waiter("a2", tenant="a")), Full)
    assert line.counts() == {("fast", "a"): 1, ("", "a"): 1}


class LineAgainstModel(RuleBasedStateMachine):
    """The order of the queue is that of a list sorted anew each time."""

    def __init__(self):
        super().__init__()
        self.line = AdmissionQueue(new_max=6, tenant_max=4)
        self.model = {}
        self.late = set()
        self.arrival = 0
        self.now_s = 0.0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from([0, 0, 1]),
        due_in_s=st.sampled_from([1.0, 2.0, 5.0]),
        is_new=st.sampled_from([True, True, True, False]),
    )
    def joins(self, tenant, priority, due_in_s, is_new):
        self.arrival += 1
        one = waiter(
            f"s{self.arrival}", arrival=self.arrival, tenant=tenant, priority=priority,
            due_s=self.now_s + due_in_s, is_new=is_new,
        )  # fmt: skip
        room = self.line.room_for(one)
        new = [w for w in self.model.values() if w.is_new]
        if not is_new:
            assert room is None
        elif isinstance(room, Full):
            assert len(new) == 6 or sum(w.tenant == tenant for w in new) == 4
            return
        elif room is not None:
            pushed = self.model.pop(room)
            assert len(new) == 6
            own = sum(w.tenant == tenant for w in new)
            assert sum(w.tenant == pushed.tenant for w in new) > own + 1 or room in self.late
            self.line.remove(room)
        self.line.add(one)
        self.model[one.seq_id] = one

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leaves(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[seq_id]
        self.line.remove(seq_id)
        self.line.remove(SequenceId("unknown"))

    @precondition(lambda self: self.model)
    @rule()
    def first_is_placed(self):
        placed = place_next(self.line)
        del self.model[placed.seq_id]

    @rule(seconds=st.sampled_from([0.5, 1.5]))
    def time_passes(self, seconds):
        self.now_s += seconds
        overdue = set(self.line.take_overdue(self.now_s))
        expected = {s for s, w in self.model.items() if w.is_new and w.due_s <= self.now_s}
        assert overdue == expected - self.late
        self.late |= overdue

    @invariant()
    def the_order_is_the_models(self):
        self.line.check()
        self.late &= self.model.keys()
        assert order(self.line) == self.expected()

    def expected(self):
        back = sorted((w for w in self.model.values() if not w.is_new), key=lambda w: w.arrival)
        ids = [w.seq_id for w in back]
        new = [w for w in self.model.values() if w.is_new]
        timely = [w for w in new if w.seq_id not in self.late]
        late = [w for w in new if w.seq_id in self.late]
        ids += self.in_turn(timely, lambda w: w.key)
        return ids + self.in_turn(late, lambda w: w.arrival)

    def in_turn(self, waiters, key):
        queues = {}
        for one in sorted(waiters, key=key):
            queues.setdefault(one.tenant, []).append(one.seq_id)
        tenants = sorted(queues, key=lambda t: (self.line.shares.level(t), t))
        rounds = itertools.zip_longest(*(queues[t] for t in tenants))
        return [s for of_round in rounds for s in of_round if s is not None]


TestLineAgainstModel = LineAgainstModel.TestCase
TestLineAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

# --- drain rate, attainment, reservations ------------------------------------------------------------


def test_the_pace_is_learnt_only_while_somebody_waits():
    pace = DrainRate()
    assert pace.takes_s(100, 0.0) is None
    for i in range(50):
        pace.placed(100, i * 0.1)  # Requests are placed as fast as they come.
    assert pace.takes_s(100, 5.0) is None
    pace.began(5.0)
    for i in range(50):
        pace.placed(100, 5.0 + (i + 1) * 0.5)
    assert pace.takes_s(1000, 30.0) == pytest.approx(5.0, rel=0.1)
    assert pace.takes_s(0, 30.0) == 0.0
    pace.ended(30.0)
    assert pace.takes_s(1000, 90.0) == pytest.approx(5.0, rel=0.1)


def test_the_hint_is_bounded():
    assert retry_after_s(0.0) == RETRY_AFTER_S_MIN
    assert retry_after_s(1e9) == RETRY_AFTER_S_MAX


FORECAST = Forecast(0.2, 0.0, 0.3, 0.0, 0.0, 0.04, 0.04, 0.2, 0.1, 1.0, 0.0)


def test_attainment_falls_with_the_queue_and_is_even_at_the_objective():
    assert below(0.5, 0.5, 0.3) == pytest.approx(0.5)
    assert attainment(FORECAST, left_s=0.5, tpot_slo_s=0.0).both == pytest.approx(0.5)
    assert attainment(FORECAST, left_s=float("inf"), tpot_slo_s=0.0).both == 1.0
    assert attainment(FORECAST, left_s=-1.0, tpot_slo_s=0.0).ttft == 0.0
    found = [
        attainment(FORECAST, left_s=1.0, tpot_slo_s=0.0, queue_s=s).ttft for s in (0, 0.2, 0.5, 1.0, 3.0)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.99
    assert found[-1] < 0.01
    assert attainment(FORECAST, left_s=9.0, tpot_slo_s=0.03).tpot < 0.05


def test_each_refused_request_is_told_a_later_time_and_let_in_then():
    reservations = RetryReservations()
    reservations.returned_share = 1.0
    waits = [
        reservations.book("t", f"k{i}", wait_s=2.0, work_s=1.0, now_s=0.0, most_s=60.0) for i in range(5)
    ]
    assert waits == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert reservations.book("u", "k0", wait_s=2.0, work_s=1.0, now_s=0.0, most_s=60.0) == 2.0
    assert reservations.expected_s("t", 4.0) == 3.0
    assert reservations.expected_s("u", 9.0) == 1.0
    assert not reservations.take("t", "k0", 1.0)  # A client that comes too early keeps its time.
    assert reservations.book("t", "k0", wait_s=50.0, work_s=1.0, now_s=1.0, most_s=60.0) == 1.0
    assert reservations.take("t", "k0", 2.5)
    assert not reservations.take("t", "k0", 2.5)
    assert not reservations.take("u", "k1", 3.0)
    assert not reservations.take("t", "", 3.0)
    reservations.check()
    reservations.expire(7.0 + GRACE_S)
    assert len(reservations) == 0
    assert reservations.returned_share < 1.0
    reservations.check()


def test_beyond_a_minute_nothing_is_promised():
    reservations = RetryReservations()
    for i in range(100):
        reservations.book("t", f"k{i}", wait_s=59.0, work_s=10.0, now_s=0.0, most_s=60.0)
    assert 0 < len(reservations) < 5
    assert reservations.book("t", "more", wait_s=1.0, work_s=1.0, now_s=0.0, most_s=60.0) == 60.0


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
