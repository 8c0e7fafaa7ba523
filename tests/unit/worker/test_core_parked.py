"""A worker core whose steps wait for experts that no rank holds."""

import pytest

from baton.core.messages import (
    FailureReason,
    LoadReport,
    Phase,
    RefusalReason,
    SequenceFailed,
    SequenceRefused,
)
from tests.unit.worker.test_core_scripts import PROMPT, of, run, tell
from tests.unit.worker.worker_pair import ROUTER, Machine, start
from worker.events import RouterJoined, SetParked, WorkerTick


@pytest.fixture
def worker():
    machine = Machine("w")
    machine.handle(RouterJoined(ROUTER), 0.0)
    return machine


def test_a_parked_worker_refuses_and_says_so_and_goes_on_with_what_it_has(worker):
    tell(worker, start("old", PROMPT, phase=Phase.AGGREGATED))
    [report] = of(worker.handle(SetParked(True), 0.0), LoadReport)
    assert (report.is_parked, report.is_draining) == (True, False)
    assert worker.core.status().state == "parked"
    [refused] = of(tell(worker, start("new", PROMPT, phase=Phase.AGGREGATED)), SequenceRefused)
    assert refused.reason is RefusalReason.BUSY
    [report] = of(worker.handle(SetParked(False), 0.0), LoadReport)
    assert not report.is_parked
    assert not of(tell(worker, start("newer", PROMPT, phase=Phase.AGGREGATED)), SequenceRefused)
    run(worker)
    assert worker.outputs("old")[-1].finish is not None


def test_the_deadline_of_a_sequence_in_a_step_that_waits_for_experts_holds(worker):
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, time_left_s=5.0))
    worker.handle(SetParked(True), 1.0)
    assert worker.core.next_tick_s <= 5.0
    [failed] = of(worker.handle(WorkerTick(), 5.0), SequenceFailed)
    assert failed.reason is FailureReason.DEADLINE
    assert not worker.core.is_idle, "the step still writes to its blocks"
    run(worker)
    assert worker.core.is_idle
