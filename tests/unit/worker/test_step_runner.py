import asyncio
import threading

from baton.core.steps import StepPlan, StepResult
from baton.wire.crash import Crash
from tests.circular_garbage import nothing_left
from worker import events as e
from worker.engine_thread import EngineThread
from worker.step_runner import StepRunner

PLAN = StepPlan((), 7)


class Running:
    """A runner, with what it posted."""

    def __init__(self, step, *, timeout_s=60.0, stalled_s=lambda: 0.0):
        self.posted, self.crash = asyncio.Queue(), Crash()
        self._runner = StepRunner(
            step,
            post=self.posted.put_nowait,
            spawn=asyncio.create_task,
            crash=self.crash,
            timeout_s=timeout_s,
            stalled_s=stalled_s,
        )

    def start(self, plan=PLAN):
        self._runner.start(e.RunStep(plan))

    async def next(self):
        return await asyncio.wait_for(self.posted.get(), 5)

    async def error(self):
        return await asyncio.wait_for(self.crash.wait(), 5)


async def test_a_step_is_computed_and_its_result_comes_back():
    async def step(plan):
        return StepResult(plan.step_number, (), 0.1)

    running = Running(step)
    running.start()
    assert await running.next() == e.StepDone(StepResult(7, (), 0.1))
    assert running.crash.error is None


async def test_steps_leave_nothing_to_the_collector_of_garbage():
    async def step(plan):
        return StepResult(plan.step_number, (), 0.1)

    running = Running(step)
    with nothing_left("worker."):
        for _ in range(3):
            running.start()
            await running.next()


async def test_a_step_that_never_ends_is_the_end_of_the_worker():
    async def step(plan):
        await asyncio.Event().wait()

    running = Running(step, timeout_s=0.01)
    running.start()
    cause = await running.error()
    assert "the device hangs" in str(cause)
    assert any("step 7" in note for note in cause.__notes__)
    assert running.posted.empty()


async def test_a_step_that_can_do_nothing_through_no_fault_of_the_worker_is_waited_for():
    """Experts are missing for many times the limit."""
    looks, done = [], asyncio.Event()

    def stalled_s():
        looks.append(0.01 * len(looks))
        if len(looks) > 20:
            done.set()
        return looks[-1]

    async def step(plan):
        await done.wait()
        return StepResult(plan.step_number, (), 0.1)

    running = Running(step, timeout_s=0.01, stalled_s=stalled_s)
    running.start()
    assert await running.next() == e.StepDone(StepResult(7, (), 0.1))
    assert running.crash.error is None


async def test_a_step_that_hangs_after_such_a_time_is_overdue():
    stalls = iter([0.0, 5.0, 5.0, 5.0])

    async def step(plan):
        await asyncio.Event().wait()

    running = Running(step, timeout_s=0.01, stalled_s=lambda: min(0.02, next(stalls)))
    running.start()
    assert "the device hangs" in str(await running.error())


async def test_a_step_that_fails_ends_the_process_and_says_which_it_was():
    async def step(plan):
        raise RuntimeError("device lost")

    running = Running(step)
    running.start()
    error = await running.error()
    assert isinstance(error, RuntimeError)
    assert "in step 7" in error.__notes__[0]
    assert running.posted.empty()


async def test_two_steps_stand_in_the_engine_threads_queue_and_their_results_come_in_order():
    """The second one begins while the event loop is still busy."""
    engine, began = EngineThread(), [threading.Event(), threading.Event()]

    def compute(plan):
        began[plan.step_number - 7].set()
        return StepResult(plan.step_number, (), 0.1)

    async def step(plan):
        return await engine.run(compute, plan)

    running = Running(step)
    for number in (7, 8):
        running.start(StepPlan((), number))
    await asyncio.sleep(0)  # the steps are handed over; from here on the loop does nothing
    assert began[1].wait(5)
    results = [await running.next(), await running.next()]
    assert [event.result.step_number for event in results] == [7, 8]
    assert await engine.close(timeout_s=5)
