"""Virtual time: what happens when, in order."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any


class Agenda:
    """One heap of (instant, number, call, argument). Two entries of one instant run in the order in which
    they were made, so a run is a function of its seed alone."""

    __slots__ = ("_heap", "_number", "event_count", "now_s", "recurring")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.event_count = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0
        self.recurring: set[Callable[[Any], None]] = set()
        """Calls that look after a cluster whatever happens in it: heartbeats, their messages, timers."""

    def at(self, time_s: float, call: Callable[[Any], None], argument: object = None) -> None:
        """An instant in the past is now."""
        self._number += 1
        heappush(self._heap, (max(time_s, self.now_s), self._number, call, argument))

    def after(self, delay_s: float, call: Callable[[Any], None], argument: object = None) -> None:
        self.at(self.now_s + delay_s, call, argument)

    def leave_out(self, *, lead_s: float, least_s: float) -> None:
        """Time in which only `recurring` calls would happen: goes on to `lead_s` before the first other one,
        if that is at least `least_s` of time, and puts the recurring ones off by as much."""
        is_recurring = self.recurring.__contains__
        others_s = [at_s for at_s, _, call, _ in self._heap if not is_recurring(call)]
        left_out_s = min(others_s, default=0.0) - lead_s - self.now_s
        if left_out_s < least_s:
            return
        # In place: `run` holds this very list.
        self._heap[:] = [
            (at_s + left_out_s if is_recurring(call) else at_s, number, call, argument)
            for at_s, number, call, argument in self._heap
        ]
        heapify(self._heap)
        self.now_s += left_out_s

    def run(self, *, is_over: Callable[[], bool]) -> None:
        """Until `is_over`, asked after every event, or until nothing is left to happen."""
        heap = self._heap
        while heap and not is_over():
            self.now_s, _, call, argument = heappop(heap)
            self.event_count += 1
            call(argument)
