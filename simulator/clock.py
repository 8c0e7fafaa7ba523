"""Virtual time, shared by the fault simulator and the fleet simulator."""

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


class VirtualClock:
    """The instant that a simulation has reached, and a heap of the calls that are due later.

    Two calls of one instant run in the order in which they were scheduled, so that a run is a function of its
    seed alone. The heap holds (instant, number, call, arguments); the number is unique, so that two entries
    never compare their calls.
    """

    __slots__ = ("_heap", "_number", "event_count", "now_s", "recurring")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.event_count = 0
        self.recurring: set[Callable[..., None]] = set()
        """Calls that keep a cluster going even when nobody uses it: heartbeats, their messages, timers."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0

    def at(self, time_s: float, call: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Schedule a call. An instant in the past means now."""
        self._number += 1
        heappush(self._heap, (time_s if time_s > self.now_s else self.now_s, self._number, call, arguments))

    def after(self, delay_s: float, call: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Schedule a call `delay_s` from now."""
        # Written out rather than by `at`: fleets schedule millions of calls.
        self._number += 1
        heappush(
            self._heap, (self.now_s + delay_s if delay_s > 0.0 else self.now_s, self._number, call, arguments)
        )

    def run(self, *, is_over: Callable[[], bool], until_s: float = math.inf, check_every: int = 1) -> None:
        """Run calls until `is_over`, until `until_s`, or until nothing is scheduled.

        `is_over` is asked before every `check_every`-th call. When a finite `until_s` is reached first, the
        clock stands there.
        """
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            if not self.event_count % check_every and is_over():
                return
            self.now_s, _, call, arguments = heappop(heap)
            self.event_count += 1
            call(*arguments)
        if until_s < math.inf and not is_over():
            self.now_s = until_s

    def skip_idle_time(self, *, lead_s: float, least_s: float) -> None:
        """Leave out time in which nothing but `recurring` calls would happen.

        The clock goes on to `lead_s` before the first other call, and the recurring calls are put off by as
        much. Nothing is left out when that would be less than `least_s`.
        """
        is_recurring = self.recurring.__contains__
        others_s = [at_s for at_s, _, call, _ in self._heap if not is_recurring(call)]
        skipped_s = min(others_s, default=0.0) - lead_s - self.now_s
        if skipped_s < least_s:
            return
        # In place, because `run` holds this very list.
        self._heap[:] = [
            (at_s + skipped_s if is_recurring(call) else at_s, number, call, arguments)
            for at_s, number, call, arguments in self._heap
        ]
        heapify(self._heap)
        self.now_s += skipped_s
