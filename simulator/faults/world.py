"""Virtual time: one heap of (instant, number) events, seeded random streams, a trace and a digest.

Two events of one instant run in the order in which they were scheduled, so a run is a function of
its seed alone.
"""

import heapq
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

TRACE_ENTRIES_MAX = 60_000


class Violation(Exception):
    """Something that must always hold did not. `invariant` numbers the list in docs/invariants.md;
    0 is a programming error inside a decision object."""

    def __init__(self, invariant: int, message: str, *, seq_id: str = "") -> None:
        super().__init__(f"invariant {invariant}: {message}")
        self.invariant, self.message, self.seq_id = invariant, message, seq_id


class Happening(Protocol):
    """What an event on the heap calls."""

    def __call__(self) -> None: ...


class World:
    """The clock, the heap, and the record of what happened."""

    __slots__ = ("_crc", "_heap", "_number", "counts", "event_count", "now_s", "seed", "trace")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.event_count = 0
        self.counts: Counter[str] = Counter()
        self.trace: deque[tuple[float, str, object]] = deque(maxlen=TRACE_ENTRIES_MAX)
        self._heap: list[tuple[float, int, Happening]] = []
        self._number = 0
        self._crc = 0

    def stream(self, name: str) -> random.Random:
        """A random stream of its own per concern: drawing more in one does not shift the others."""
        return random.Random(f"{self.seed}/{name}")

    def at(self, time_s: float, happening: Happening) -> None:
        self._number += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._number, happening))

    def after(self, delay_s: float, happening: Happening) -> None:
        self.at(self.now_s + delay_s, happening)

    def note(self, who: str, what: object) -> None:
        """Adds to the trace and the digest. `what` is an immutable value, formatted only on failure."""
        self.trace.append((self.now_s, who, what))
        text = f"{self.now_s:.9f}|{who}|{type(what).__name__}|{seq_of(what)}"
        self._crc = zlib.crc32(text.encode(), self._crc)

    @property
    def digest(self) -> str:
        return f"{self._crc:08x}-{self.event_count}"

    def run_until(self, end_s: float, *, is_over: Callable[[], bool], check_every: int = 16) -> None:
        """Runs events up to `end_s`, or until `is_over`, asked every `check_every` events."""
        heap = self._heap
        while heap and heap[0][0] <= end_s:
            if self.event_count % check_every == 0 and is_over():
                return
            self.now_s, _, happening = heapq.heappop(heap)
            self.event_count += 1
            happening()
        if not is_over():
            self.now_s = end_s


def seq_of(value: object) -> str:
    """The sequence a message, event or action is about, empty if none."""
    seq_id = getattr(value, "seq_id", None)
    if seq_id is not None:
        return f"{seq_id}@{getattr(value, 'epoch', '')}"
    inner = getattr(value, "message", None)
    return "" if inner is None or isinstance(inner, str) else seq_of(inner)
