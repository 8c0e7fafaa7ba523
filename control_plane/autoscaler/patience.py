"""Hysteresis: how long a pool must have had too many replicas before it loses one."""

from collections import deque

PATIENCE_MAX_S = 3600.0
MISTAKES = 2.0
"""Patience is at least so many times what a step down costs that was wrong: a drain and a start."""

SOON_S = 3600.0
SMALL_SHARE = 0.1
GROWTH, FACTOR_MAX = 4.0, 12.0


class Patience:
    """Of one role. Grows when a step up follows one down, and comes back over quiet hours."""

    def __init__(self, patience_s: float) -> None:
        self._base_s = patience_s
        self.factor = 1.0
        self._needs: deque[tuple[float, int]] = deque()
        """(instant, replicas needed), falling: an entry is dropped when a later one needs more."""
        self._kept: deque[tuple[float, int]] = deque()
        self._since_s: float | None = None
        self._down_at_s = self._eased_at_s = float("-inf")

    def seconds(self, mistake_s: float) -> float:
        return min(PATIENCE_MAX_S, self.factor * max(self._base_s, MISTAKES * mistake_s))

    def floor(self, needed: int, at_s: float, *, mistake_s: float) -> int | None:
        """The most that was needed within the patience, `needed` now included. None until it has
        watched for so long. `mistake_s`: what a step down costs that was wrong."""
        if self._since_s is None:
            self._since_s = at_s
        while self._needs and self._needs[-1][1] <= needed:
            self._needs.pop()
        self._needs.append((at_s, needed))
        self._kept.append((at_s, needed))
        span_s = self.seconds(mistake_s)
        while self._needs[0][0] < at_s - PATIENCE_MAX_S:
            self._needs.popleft()
        while self._kept[0][0] < at_s - 600.0:
            self._kept.popleft()
        if at_s - self._since_s < span_s:
            return None
        return max(count for when, count in self._needs if when >= at_s - span_s)

    def most(self, at_s: float, span_s: float) -> int:
        """Needed within the last `span_s`, which is at most 600 s."""
        if self._since_s is None or at_s - self._since_s < span_s:
            return 1 << 30
        return max((count for when, count in self._kept if when >= at_s - span_s), default=1 << 30)

    def decided(self, change: int, have: int, at_s: float) -> None:
        """By how much the count of `have` changes. A small step up soon after one down says that the step
        down was a mistake; a large one, that the load changed."""
        if change < 0:
            self._down_at_s = at_s
        elif change > 0 and at_s - self._down_at_s < SOON_S:
            if change <= max(1, SMALL_SHARE * have):
                self.factor = min(FACTOR_MAX, GROWTH * self.factor)
                self._eased_at_s = at_s
            self._down_at_s = float("-inf")
        elif at_s - self._eased_at_s > PATIENCE_MAX_S:
            self.factor, self._eased_at_s = max(1.0, self.factor / 2), at_s
