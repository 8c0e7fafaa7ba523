"""The journal of decisions with their reasons, of bounded length."""

from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from baton.core.messages import Role
from control_plane.autoscaler.values import ScalingDecision

ENTRIES_MAX = 1000


class JournalEntry(msgspec.Struct, frozen=True):
    """A decision, and how often it was taken again with nothing to change."""

    decision: ScalingDecision
    repeated: int = 0
    until_s: float = 0.0


class Journal:
    """The newest `entries_max` entries. A decision that changes nothing and wants the same as the one before
    is counted in that entry."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries: deque[JournalEntry] = deque(maxlen=entries_max)
        self._directions: dict[Role, int] = {}
        self._last: dict[Role, int] = {}
        self._reversals: deque[tuple[float, Role]] = deque(maxlen=entries_max)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries)

    def add(self, decision: ScalingDecision) -> None:
        self._count_reversals(decision)
        last = self._entries[-1] if self._entries else None
        if (
            last is not None
            and not decision.is_change
            and not last.decision.is_change
            and last.decision.desired == decision.desired
        ):
            self._entries[-1] = JournalEntry(last.decision, last.repeated + 1, decision.at_s)
            return
        self._entries.append(JournalEntry(decision, 0, decision.at_s))

    def reversals(self, *, since_s: float = 0.0) -> Mapping[Role, int]:
        """Return how often each role's desired count went down after it had gone up, or up after down."""
        counts: dict[Role, int] = {}
        for at_s, role in self._reversals:
            if at_s >= since_s:
                counts[role] = counts.get(role, 0) + 1
        return counts

    def _count_reversals(self, decision: ScalingDecision) -> None:
        for role, count in decision.desired.items():
            change = count - self._last.get(role, count)
            self._last[role] = count
            if not change:
                continue
            direction = 1 if change > 0 else -1
            if self._directions.get(role, direction) != direction:
                self._reversals.append((decision.at_s, role))
            self._directions[role] = direction
