"""Detection of changes in a rate that have happened already and are not chance.

At each interval the recent counts are cut in two at every place, and two rates are compared with one by the
generalised likelihood ratio of Poisson counts (Lorden 1971; Basseville and Nikiforov, "Detection of abrupt
changes", 1993, 2.4.3). A mean over a window notices a jump as slowly as the window is long. This test notices
a rate that trebles after ten requests in two intervals, and says which intervals belong to the new rate.
"""

from collections import deque
from itertools import pairwise
from math import log

THRESHOLD = 7.0
"""Logarithm of the likelihood ratio that counts as a jump. Chance alone exceeds it about once in ten hours of
15 s intervals."""
COUNT_MIN = 5.0
"""Number of requests that at least one side of the cut must have. Two requests after an idle hour are no
rate."""
AFTER_MAX = 12
"""Largest number of intervals since a jump. The mean over the window follows an older change by itself."""
BEFORE_MIN = 4
"""Smallest number of intervals before a jump, which define the usual rate."""
BEFORE_MAX = 40
SPREAD_STEPS = 120


class Jumps:
    """The jump detector of one stream of counts."""

    def __init__(self) -> None:
        self._counts: deque[int] = deque(maxlen=AFTER_MAX + BEFORE_MAX)
        """Counts since the last jump."""
        self._all: deque[int] = deque(maxlen=SPREAD_STEPS)

    def observe(self, count: int) -> int:
        """Add one count and return how many of the latest intervals are at a new rate; 0 if no change is
        sure."""
        self._counts.append(count)
        self._all.append(count)
        best, steps = 0.0, 0
        total = sum(self._counts)
        after = 0.0
        listed = list(self._counts)
        for k in range(1, min(AFTER_MAX, len(listed) - BEFORE_MIN) + 1):
            after += listed[-k]
            ratio = _likelihood_ratio(after, k, total - after, len(listed) - k)
            if ratio > best and max(after, total - after) >= COUNT_MIN:
                best, steps = ratio, k
        if best <= THRESHOLD * self.spread:
            return 0
        self._counts = deque(listed[-steps:], maxlen=self._counts.maxlen)
        return steps

    @property
    def spread(self) -> float:
        """Variance over mean from one interval to the next, so that a jump counts once; at least 1. Arrivals
        in bursts have more of it, and then more evidence is needed."""
        if len(self._all) < BEFORE_MIN:
            return 1.0
        mean = sum(self._all) / len(self._all)
        steps = [(b - a) ** 2 for a, b in pairwise(self._all)]
        return max(1.0, sum(steps) / len(steps) / 2 / mean) if mean else 1.0


def _likelihood_ratio(after: float, after_steps: int, before: float, before_steps: int) -> float:
    """Return the logarithm of the likelihood of two rates over that of a single one."""
    together = (after + before) / (after_steps + before_steps)
    return sum(
        count * log(count / steps / together)
        for count, steps in ((after, after_steps), (before, before_steps))
        if count > 0
    )
