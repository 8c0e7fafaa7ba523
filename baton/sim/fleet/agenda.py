"""Virtual time: what happens when, in order."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """One heap of (instant, number, call, argument). Two entries of one instant run in the order in which
    they were made, so a run is a function of its seed alone."""

    __slots__ = ("_heap", "_number", "event_count", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.event_count = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0

    def at(self, time_s: float, call: Callable[[Any], None], argument: object = None) -> None:
        """An instant in the past is now."""
        self._number += 1
        heappush(self._heap, (max(time_s, self.now_s), self._number, call, argument))

    def after(self, delay_s: float, call: Callable[[Any], None], argument: object = None) -> None:
        self.at(self.now_s + delay_s, call, argument)

    def run(self, *, is_over: Callable[[], bool]) -> None:
        """Until `is_over`, asked after every event, or until nothing is left to happen."""
        heap = self._heap
        while heap and not is_over():
            self.now_s, _, call, argument = heappop(heap)
            self.event_count += 1
            call(argument)
