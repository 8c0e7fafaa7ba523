"""Hysteresis: how long a pool must have had too many replicas before it loses one."""

from collections import deque

PATIENCE_MAX_S = 3600.0
MISTAKES = 2.0
"""The patience is at least this many times the cost of a wrong step down, which is a drain and a start."""

SOON_S = 3600.0
SMALL_SHARE = 0.1
GROWTH, FACTOR_MIN, FACTOR_MAX = 4.0, 2.0, 12.0
"""Changes of one replica, or of a tenth of them, are within chance. For these the patience is multiplied by a
factor that grows after mistakes; for larger changes it is not."""


class Patience:
    """The patience of one role. It grows when a step up follows a step down, and returns over quiet hours."""

    def __init__(self, patience_s: float) -> None:
        self._base_s = patience_s
        self.factor = FACTOR_MIN
        self._needs: deque[tuple[float, int]] = deque()
        """(instant, replicas needed), falling: an entry is dropped when a later one needs more."""
        self._since_s: float | None = None
        self.waited_s = 0.0
        """Time for which no more than the latest floor was needed."""
        self._down_at_s = self._eased_at_s = float("-inf")

    def seconds(self, mistake_s: float) -> float:
        return min(PATIENCE_MAX_S, self.factor * self._first_s(mistake_s))

    def _first_s(self, mistake_s: float) -> float:
        """The patience before any mistake."""
        return max(self._base_s, MISTAKES * mistake_s)

    def floor(self, needed: int, at_s: float, *, mistake_s: float) -> int | None:
        """Return the most replicas that were needed within the patience, `needed` included, or None until
        that much time has been observed. `mistake_s` is the cost of a wrong step down.

        Mistakes happen at the border between n and n + 1 replicas, so the time they add to the patience holds
        back a few replicas only. After a peak all others go once the base patience has passed.
        """
        if self._since_s is None:
            self._since_s = at_s
        while self._needs and self._needs[-1][1] <= needed:
            self._needs.pop()
        self._needs.append((at_s, needed))
        while self._needs[0][0] < at_s - PATIENCE_MAX_S:
            self._needs.popleft()
        span_s = self.seconds(mistake_s)
        first_s = min(span_s, self._first_s(mistake_s))
        if at_s - self._since_s < first_s:
            return None
        lately, long = self._most_needed(at_s - first_s), self._most_needed(at_s - span_s)
        if at_s - self._since_s < span_s:
            long = 1 << 30
        held = lately + max(1, int(SMALL_SHARE * lately))
        self.waited_s = span_s if long <= held else first_s
        return min(long, held)

    def _most_needed(self, since_s: float) -> int:
        return max(count for when, count in self._needs if when >= since_s)

    def most(self, at_s: float, span_s: float) -> int:
        """Return the most replicas needed within the last `span_s`, which is at most `PATIENCE_MAX_S`."""
        if self._since_s is None or at_s - self._since_s < span_s:
            return 1 << 30
        return self._most_needed(at_s - span_s)

    def decided(self, change: int, have: int, at_s: float) -> None:
        """Note by how much the count of `have` changes. A small step up soon after a step down shows that the
        step down was a mistake; a large one shows that the load changed."""
        if change < 0:
            self._down_at_s = at_s
        elif change > 0 and at_s - self._down_at_s < SOON_S:
            if change <= max(1, SMALL_SHARE * have):
                self.factor = min(FACTOR_MAX, GROWTH * self.factor)
                self._eased_at_s = at_s
            self._down_at_s = float("-inf")
        elif at_s - self._eased_at_s > PATIENCE_MAX_S:
            self.factor, self._eased_at_s = max(FACTOR_MIN, self.factor / 2), at_s
