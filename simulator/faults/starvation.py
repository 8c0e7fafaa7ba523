"""Nobody starves: how often a waiting sequence is passed by those that came after it.

The bound is the scheduler's (`engine.scheduling.order`): of every four admissions one is the oldest that
waits. Seen from outside, arrivals are the start messages and admissions are the first items of a plan.
"""

from baton.core.ids import SeqKey
from baton.core.messages import Phase, StartSequence
from baton.core.steps import StepPlan
from simulator.faults.observed_processes import ObservedWorker
from simulator.faults.run_context import Violation

PASSED_PER_OLDER = 3
SLACK = 3
"""Admissions of one plan are seen together, in no order."""
SIBLING_TOKENS = 3
"""Sequences whose prompts agree in so many first tokens may wait for each other's KV, and are left out."""


class _Arrival:
    __slots__ = ("number", "older_count", "passed_count", "preemption_count", "prompt_start")

    def __init__(
        self, number: int, older_count: int, preemption_count: int, prompt_start: tuple[object, ...]
    ) -> None:
        self.number, self.older_count = number, older_count
        self.preemption_count = preemption_count
        self.prompt_start = prompt_start
        self.passed_count = 0


class StarvationChecker:
    """The turns of one worker's sequences."""

    __slots__ = ("_arrivals", "_number", "_prompt_starts", "longest_wait")

    def __init__(self) -> None:
        self._arrivals: dict[SeqKey, _Arrival] = {}
        self._prompt_starts: dict[tuple[object, ...], int] = {}
        self._number = 0
        self.longest_wait = 0
        """Most admissions that passed one sequence."""

    def observe_start(self, worker: ObservedWorker, start: StartSequence) -> None:
        """Take note of an arrival, after the worker handled it."""
        key = SeqKey(start.seq_id, start.epoch)
        if start.phase is Phase.DECODE or key in self._arrivals:
            return
        # Those that start at once count as well: others may wait for what they compute.
        prompt_start = (start.cache_root, start.tokens[:SIBLING_TOKENS])
        self._prompt_starts[prompt_start] = self._prompt_starts.get(prompt_start, 0) + 1
        if key not in worker.core.waiting_keys:
            return
        self._number += 1
        older_count = sum(other in worker.core.waiting_keys for other in self._arrivals)
        preemption_count = worker.core.status().preemption_count
        self._arrivals[key] = _Arrival(self._number, older_count, preemption_count, prompt_start)

    def observe_plan(self, worker: ObservedWorker, plan: StepPlan) -> None:
        admitted = [
            arrival for item in plan.items if (arrival := self._arrivals.pop(item.key, None)) is not None
        ]
        if not admitted:
            return
        waiting = worker.core.waiting_keys
        for key in [key for key in self._arrivals if key not in waiting]:
            del self._arrivals[key]
        for key, arrival in self._arrivals.items():
            arrival.passed_count += sum(other.number > arrival.number for other in admitted)
            self._judge(worker, key, arrival)

    def _judge(self, worker: ObservedWorker, key: SeqKey, arrival: _Arrival) -> None:
        if self._prompt_starts[arrival.prompt_start] > 1:
            return
        self.longest_wait = max(self.longest_wait, arrival.passed_count)
        preempted_count = worker.core.status().preemption_count - arrival.preemption_count
        bound = PASSED_PER_OLDER * (arrival.older_count + preempted_count + 1) + SLACK
        if arrival.passed_count > bound:
            raise Violation(
                6,
                f"{worker.name}: {key} waits, and {arrival.passed_count} that came later have started; "
                f"it found {arrival.older_count} waiting, so {bound} may pass it",
                seq_id=key.seq_id,
            )
