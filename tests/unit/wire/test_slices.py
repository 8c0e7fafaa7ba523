"""Slices of threads, as the kernel has them."""

import asyncio
import threading

import pytest

from baton.wire.slices import SHORT_NS, answer_soon, compute_long, slice_ns
from worker.engine_thread import EngineThread


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture(autouse=True)
def _kernel_has_slices():
    compute_long()  # whatever ran in this thread before
    if in_thread(lambda: answer_soon() and slice_ns()) != SHORT_NS:
        pytest.skip("this kernel has no slices of one's own (Linux 6.12)")


def test_a_thread_that_answers_has_a_short_slice_and_those_it_starts_too():
    assert in_thread(lambda: (answer_soon(), in_thread(slice_ns))[1]) == SHORT_NS
    assert in_thread(slice_ns) > SHORT_NS  # ours is as it was


def test_a_thread_that_computes_has_the_usual_slice_whoever_started_it():
    usual_ns = in_thread(slice_ns)
    assert in_thread(lambda: (answer_soon(), compute_long(), slice_ns())[2]) == usual_ns


def test_the_engine_computes_with_the_usual_slice_beside_a_loop_that_answers():
    async def slices():
        answer_soon()
        engine = EngineThread()
        found = await engine.run(slice_ns), slice_ns()
        await engine.close(timeout_s=10)
        return found

    usual_ns = in_thread(slice_ns)
    assert in_thread(lambda: asyncio.run(slices())) == (usual_ns, SHORT_NS)
