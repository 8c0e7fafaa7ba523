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
    ) -> None:
        self._step, self._post, self._spawn = step, post, spawn
        self._crash, self._timeout_s = crash, timeout_s
        self._running_count = 0

    def start(self, action: e.RunStep) -> None:
        """Compute the step. Its result is posted as `StepDone`."""
        self._spawn(self._run(action.plan))

    async def _run(self, plan: StepPlan) -> None:
        # Heartbeats go on while the device hangs, and so would everybody's trust in this worker. A step that
        # was planned ahead waits for those before it.
        limit = asyncio.timeout((1 + self._running_count) * self._timeout_s)
        self._running_count += 1
        try:
            async with limit:
                result = await self._step(plan)
        except Exception as raised:
            overdue = StepOverdue(f"the device hangs: a step takes longer than {self._timeout_s:g} s")
            error = overdue if limit.expired() else raised
            keys = ", ".join(str(item.key) for item in plan.items)
            error.add_note(f"in step {plan.step_number}, {plan.token_count} tokens of {keys}")
            self._crash.report(error)
            return
        finally:
            self._running_count -= 1
        self._post(e.StepDone(result))
