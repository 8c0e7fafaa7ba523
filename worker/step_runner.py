"""Engine steps that run beside the event loop, and how long one may take."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.core.steps import StepPlan, StepResult
from baton.wire.crash import Crash
from worker import events as e


class StepOverdue(Exception):
    pass


class StepRunner:
    """Performs `RunStep`. A step that fails or never ends is a bug or a broken device: it goes to `crash`."""

    def __init__(
        self,
        step: Callable[[StepPlan], Coroutine[Any, Any, StepResult]],
        *,
        post: Callable[[e.WorkerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        crash: Crash,
        timeout_s: float,
        stalled_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`stalled_s` returns the time since the start for which steps could do nothing, through no fault of
        this worker. It does not count."""
        self._step, self._post, self._spawn = step, post, spawn
        self._crash, self._timeout_s, self._stalled_s = crash, timeout_s, stalled_s
        self._running_count = 0

    def start(self, action: e.RunStep) -> None:
        """Compute the step. Its result is posted as `StepDone`."""
        self._spawn(self._run(action.plan))

    async def _run(self, plan: StepPlan) -> None:
        # Heartbeats go on while the device hangs, and so would everybody's trust in this worker. A step that
        # was planned ahead waits for those before it.
        limit_s = (1 + self._running_count) * self._timeout_s
        self._running_count += 1
        try:
            result = await self._within(self._step(plan), limit_s)
        except Exception as error:
            keys = ", ".join(str(item.key) for item in plan.items)
            error.add_note(f"in step {plan.step_number}, {plan.token_count} tokens of {keys}")
            self._crash.report(error)
            return
        finally:
            self._running_count -= 1
        self._post(e.StepDone(result))

    async def _within(self, step: Coroutine[Any, Any, StepResult], limit_s: float) -> StepResult:
        """Raises StepOverdue, and what the step raises."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                watch = _StepWatch(limit, limit_s, self._stalled_s)
                try:
                    return await step
                finally:
                    watch.end()
        except TimeoutError:
            if not limit.expired():
                raise
            raise StepOverdue(f"the device hangs: a step takes longer than {self._timeout_s:g} s") from None


class _StepWatch:
    """Ends a step whose time is over. It is a class since a function that calls itself later would be left
    to the garbage collector, and with it the step's task."""

    def __init__(self, limit: asyncio.Timeout, limit_s: float, stalled_s: Callable[[], float]) -> None:
        """`limit` ends the step after `limit_s`. For `stalled_s` see `StepRunner`."""
        self._limit, self._stalled_s = limit, stalled_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit_s, self._look, stalled_s())

    def end(self) -> None:
        self._timer.cancel()

    def _look(self, before_s: float) -> None:
        """End the step, or look again when the time is over that did not count until now."""
        stalled_s = self._stalled_s()
        if stalled_s > before_s:
            self._timer = self._loop.call_later(stalled_s - before_s, self._look, stalled_s)
        else:
            self._limit.reschedule(self._loop.time())
