from baton.core.ids import RouterId, SeqKey
from baton.core.messages import Phase
from tests.unit.worker.worker_pair import start
from worker.core_attempts import Attempt, Attempts, Epochs
from worker.phase_clock import PhaseClock


def attempt(name, deadline_s):
    message = start(name, (1,), phase=Phase.AGGREGATED)
    return Attempt(SeqKey(message.seq_id, 0), RouterId("r"), message, deadline_s, PhaseClock(0.0))


def test_overdue_attempts_come_earliest_first_and_ended_ones_never():
    attempts = Attempts()
    for name, deadline_s in (("late", 3.0), ("early", 1.0), ("ended", 0.5), ("later", 9.0)):
        attempts.add(attempt(name, deadline_s))
    attempts.pop(SeqKey("ended", 0))
    assert attempts.next_deadline_s == 1.0
    assert [a.key.seq_id for a in attempts.overdue(3.0)] == ["early", "late"]
    assert attempts.next_deadline_s == 9.0


def test_an_ask_before_the_start_does_not_count_as_the_start():
    epochs = Epochs()
    key = SeqKey("s", 2)
    epochs.observe(key, is_start=False)
    assert epochs.highest("s") == 2
    assert not epochs.was_started(key)
    epochs.observe(key, is_start=True)
    epochs.observe(key, is_start=False)
    assert epochs.was_started(key)
    epochs.observe(SeqKey("s", 3), is_start=False)
    assert not epochs.was_started(SeqKey("s", 3))


def test_the_memory_for_ended_sequences_is_bounded_and_the_stalest_fades_first():
    epochs = Epochs(count_max=2)
    for name in ("a", "b", "a", "c"):
        epochs.observe(SeqKey(name, 1), is_start=True)
    assert [epochs.highest(name) for name in ("a", "b", "c")] == [1, -1, 1]
