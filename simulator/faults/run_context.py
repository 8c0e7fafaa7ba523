"""The surroundings of one seeded run: its clock, its random streams, and the record of what happened."""

import random
import zlib
from collections import Counter, deque

from simulator.clock import VirtualClock

TRACE_ENTRIES_MAX = 60_000


class Violation(Exception):
    """A promise that did not hold. `invariant` numbers the list in docs/invariants.md; 0 is a programming
    error inside a decision object."""

    def __init__(self, invariant: int, message: str, *, seq_id: str = "") -> None:
        super().__init__(f"invariant {invariant}: {message}")
        self.invariant, self.message, self.seq_id = invariant, message, seq_id


class RunContext:
    """The context of one run: its clock, its seed, its trace and its counts."""

    __slots__ = ("_crc", "clock", "counts", "seed", "trace")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.clock = VirtualClock()
        self.counts: Counter[str] = Counter()
        self.trace: deque[tuple[float, str, object]] = deque(maxlen=TRACE_ENTRIES_MAX)
        """Instant, name of the process, and what happened; the newest entries only."""
        self._crc = 0

    def stream(self, name: str) -> random.Random:
        """Return the random stream of one concern, so that drawing more in one does not shift the others."""
        return random.Random(f"{self.seed}/{name}")

    def note(self, who: str, what: object) -> None:
        """Add to the trace and the digest. `what` is an immutable value, formatted only on failure."""
        now_s = self.clock.now_s
        self.trace.append((now_s, who, what))
        text = f"{now_s:.9f}|{who}|{type(what).__name__}|{seq_of(what)}"
        self._crc = zlib.crc32(text.encode(), self._crc)

    @property
    def digest(self) -> str:
        """A few characters that tell what happened in what order; two runs of one seed have the same."""
        return f"{self._crc:08x}-{self.clock.event_count}"


def seq_of(value: object) -> str:
    """Return the sequence that a message, event or action is about; empty if there is none."""
    seq_id = getattr(value, "seq_id", None)
    if seq_id is not None:
        return f"{seq_id}@{getattr(value, 'epoch', '')}"
    inner = getattr(value, "message", None)
    return "" if inner is None or isinstance(inner, str) else seq_of(inner)
