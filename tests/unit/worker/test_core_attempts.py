from baton.core.ids import RouterId, SeqKey
from baton.core.messages import Phase, RefusalReason
from tests.unit.worker.worker_pair import Cluster, Machine, failures, start
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
    assert attempts.next_tick_s == 1.0
    assert [a.key.seq_id for a in attempts.overdue(3.0)] == ["early", "late"]
    assert attempts.next_tick_s == 9.0


def test_an_ask_before_the_start_does_not_count_as_the_start():
    epochs = Epochs(lambda key: False)
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
    epochs = Epochs(lambda key: False, count_max=2)
    for name in ("a", "b", "a", "c"):
        epochs.observe(SeqKey(name, 1), is_start=True)
    assert [epochs.highest(name) for name in ("a", "b", "c")] == [1, -1, 1]


def test_what_is_live_is_never_forgotten_however_long_it_runs():
    live = {SeqKey("long", 1)}
    epochs = Epochs(lambda key: key in live, count_max=3)
    epochs.observe(SeqKey("long", 1), is_start=True)
    for i in range(20):
        epochs.observe(SeqKey(str(i), 0), is_start=True)
    assert epochs.was_started(SeqKey("long", 1))
    assert epochs.highest("19") == 0
    assert len(epochs._seen) == 3
    live.clear()
    for i in range(3):
        epochs.observe(SeqKey(str(i), 0), is_start=True)
    assert epochs.highest("long") == -1


def test_a_repeated_start_of_a_sequence_that_outlived_many_changes_nothing():
    cluster = Cluster(machine := Machine("w", block_count=32))
    machine.core._epochs._count_max = 3
    long = start("long", (1, 2, 3), phase=Phase.AGGREGATED, epoch=1, max_tokens=40)
    cluster.tell("w", long)
    for i in range(6):
        cluster.tell("w", start(str(i), (4, 5), phase=Phase.AGGREGATED, max_tokens=1))
        while any(a.key.seq_id == str(i) for a in machine.core._attempts):
            cluster.perform(cluster.choices()[0])
    assert machine.core._attempts.get(SeqKey("long", 1)) is not None
    cluster.tell("w", long)
    cluster.tell("w", start("long", (1, 2, 3), phase=Phase.AGGREGATED, epoch=0))
    [refused] = failures(machine)
    assert (refused.epoch, refused.reason) == (0, RefusalReason.STALE_EPOCH)
    cluster.run()
    cluster.assert_quiet()
