"""What a worker says of the rows that it sends to expert ranks."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.steps import StepResult
from engine.experts.caller import CallerStats
from worker.expert_rows import ExpertRows
from worker.metrics import EXPERT_COUNTERS


class FakeSender:
    suspected_count, epoch, found = 2, 7, None
    is_parked, missing = False, 0.0

    def missing_s(self):
        return self.missing

    stalled_s = missing_s

    def stats(self):
        return self.found


def test_every_counter_of_rows_has_its_account():
    sender = FakeSender()
    rows = ExpertRows(sender)
    assert rows.accounts() == {}, "nothing is connected yet"
    sender.found = CallerStats(3, 6, 300, 600, 1, waited_s=0.5)
    accounts = rows.accounts()
    assert EXPERT_COUNTERS.keys() <= accounts.keys()
    assert accounts == {
        "experts.dispatched_rows": 3.0,
        "experts.dispatched_pairs": 6.0,
        "experts.dispatched_bytes": 300.0,
        "experts.combined_bytes": 600.0,
        "experts.rerouted_pairs": 1.0,
        "experts.suspected_ranks": 2.0,
        "experts.waited_s": 0.5,
        "experts.missing_s": 0.0,
        "experts.map_epoch": 7.0,
    }


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_waits_of_steps_add_up_to_the_total(steps):
    sender = FakeSender()
    rows, total = ExpertRows(sender), 0
    assert rows.waited_s() == 0.0
    for step in steps:
        total += step
        sender.found = CallerStats(0, 0, 0, 0, 0, waited_s=float(total))
        assert rows.waited_s() == step


def test_steps_do_not_cost_the_time_for_which_experts_were_missing():
    sender = FakeSender()
    sender.missing = 3.0  # while the worker started
    rows = ExpertRows(sender)
    result = StepResult(1, (), 0.25)
    assert rows.timed(result) is result
    sender.missing = 13.0
    assert rows.timed(StepResult(2, (), 10.25)).elapsed_s == 0.25
    assert rows.timed(result) is result


def test_a_parked_worker_says_so():
    sender = FakeSender()
    rows = ExpertRows(sender)
    assert rows.notes() == ()
    sender.is_parked = True
    (note,) = rows.notes()
    assert note.startswith("parked: no expert rank")
