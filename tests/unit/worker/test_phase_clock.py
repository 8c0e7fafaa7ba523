"""Where a phase's time goes: queue, store, compute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.messages import Phase
from tests.unit.worker.test_core_store import filled, pair, wait_for_load
from tests.unit.worker.worker_pair import ROUTER, Machine, start
from worker.events import FromRouter, RouterJoined
from worker.phase_clock import PhaseClock

STEP_S = 0.01
"""What the fake engine says that a step took."""


def machine():
    worker = Machine("w")
    worker.handle(RouterJoined(ROUTER), 0.0)
    return worker


def timings(worker, seq_id):
    return [output.timings for output in worker.outputs(seq_id)]


@pytest.mark.parametrize("phase", [Phase.AGGREGATED, Phase.PREFILL])
def test_an_attempts_first_output_tells_wait_and_compute_and_no_other_does(phase):
    worker = machine()
    worker.handle(FromRouter(ROUTER, start("first", range(16), phase=Phase.AGGREGATED, max_tokens=1)), 1.0)
    worker.handle(FromRouter(ROUTER, start("s", range(100, 132), phase=phase, max_tokens=3)), 1.5)
    now_s = 2.0
    while worker.plan is not None:
        worker.finish_step(now_s)
        now_s += 1.0
    first, *others = timings(worker, "s")
    # The step before it ends at 2, its own two at 3 and 4, the first of which took 10 ms.
    assert first.wait_s == pytest.approx(1.5 - STEP_S)
    assert first.load_s == 0
    assert first.compute_s == pytest.approx(1.0 + STEP_S)
    assert not any(others)


def test_waiting_for_the_store_is_told_apart_from_waiting_and_computing():
    worker, node = pair()
    filled(worker, node)
    began_s = node.now_s
    wait_for_load(worker, node)
    node.now_s += 0.02
    node.run()  # the blocks come
    node.now_s += 0.03
    while worker.plan is not None:
        worker.finish_step(node.now_s)
    told = timings(worker, "b")[0]
    assert told.load_s == pytest.approx(0.02)
    assert told.wait_s + told.load_s + told.compute_s == pytest.approx(node.now_s - began_s)
    assert told.compute_s == pytest.approx(STEP_S)


STEPS = st.lists(st.tuples(st.sampled_from(["block", "free", "step"]), st.floats(0, 5)), max_size=12)


@given(STEPS, st.floats(0, 5))
def test_the_parts_are_never_negative_and_sum_up_to_the_time_since_the_start(steps, last_s):
    now_s = 10.0
    clock = PhaseClock(now_s)
    blocked = False
    for what, seconds in steps:
        now_s += seconds
        if what == "step" and not blocked:
            clock.stepped(now_s - seconds / 2)
        elif what != "step":
            blocked = what == "block"
            clock.observe(is_blocked=blocked, now_s=now_s)
    now_s += last_s
    told = clock.timings(now_s)
    assert min(told.wait_s, told.load_s, told.compute_s) >= 0
    total_s = told.wait_s + told.load_s + told.compute_s
    assert total_s == pytest.approx(now_s - 10.0, abs=1e-6)
