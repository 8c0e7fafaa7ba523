"""One instant per key, and which of them have come. No clock."""

import heapq

from baton.core.ids import SequenceId

GARBAGE_MAX = 256


class Timers:
    """A heap whose outdated entries are skipped when they surface, and swept when they are many."""

    def __init__(self) -> None:
        self._at_s: dict[SequenceId, float] = {}
        self._heap: list[tuple[float, SequenceId]] = []

    def set(self, key: SequenceId, at_s: float) -> None:
        """Replaces the instant the key had."""
        if self._at_s.get(key) == at_s:
            return
        self._at_s[key] = at_s
        heapq.heappush(self._heap, (at_s, key))
        if len(self._heap) > 2 * len(self._at_s) + GARBAGE_MAX:
            self._heap = [(at_s, key) for key, at_s in self._at_s.items()]
            heapq.heapify(self._heap)

    def drop(self, key: SequenceId) -> None:
        self._at_s.pop(key, None)

    @property
    def next_s(self) -> float | None:
        self._skip()
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_s: float) -> list[SequenceId]:
        """Keys whose instant has come, earliest first; they have none afterwards."""
        due: list[SequenceId] = []
        self._skip()
        while self._heap and self._heap[0][0] <= now_s:
            _, key = heapq.heappop(self._heap)
            del self._at_s[key]
            due.append(key)
            self._skip()
        return due

    def _skip(self) -> None:
        while self._heap and self._at_s.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
