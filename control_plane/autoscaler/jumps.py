"""Where a rate changed: not what may come, but what has come already and is no chance.

Each time the counts seen lately are cut in two at every place, and two rates are compared with one by the
generalised likelihood ratio of Poisson counts (Lorden 1971; Basseville and Nikiforov, "Detection of abrupt
changes", 1993, 2.4.3). A mean over a window learns of a jump as slowly as the window is long; this learns of
one that trebles ten requests in two intervals, and says which of them belong to the new rate.
"""

from collections import deque
from itertools import pairwise
from math import log

THRESHOLD = 7.0
"""Of the logarithm of the likelihood ratio: by chance about once in ten hours of intervals of 15 s."""
COUNT_MIN = 5.0
"""On one side at least. Two requests after an idle hour are no rate."""
AFTER_MAX = 12
"""A rate that changed longer ago is the window's matter."""
BEFORE_MIN = 4
"""Intervals that say what was usual."""
BEFORE_MAX = 40
SPREAD_STEPS = 120


class Jumps:
    """Of one stream of counts."""

    def __init__(self) -> None:
        self._counts: deque[int] = deque(maxlen=AFTER_MAX + BEFORE_MAX)
        """Since the last jump."""
        self._all: deque[int] = deque(maxlen=SPREAD_STEPS)

    def observe(self, count: int) -> int:
        """How many of the latest intervals are at a new rate; 0: no change is sure."""
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
        """Variance by mean, from one interval to the next, so that a jump counts once; at least 1. Arrivals
        in bursts have more, and then it takes more to be sure."""
        if len(self._all) < BEFORE_MIN:
            return 1.0
        mean = sum(self._all) / len(self._all)
        steps = [(b - a) ** 2 for a, b in pairwise(self._all)]
        return max(1.0, sum(steps) / len(steps) / 2 / mean) if mean else 1.0


def _likelihood_ratio(after: float, after_steps: int, before: float, before_steps: int) -> float:
    """Logarithm: of two rates, against one for all."""
    together = (after + before) / (after_steps + before_steps)
    return sum(
        count * log(count / steps / together)
        for count, steps in ((after, after_steps), (before, before_steps))
        if count > 0
    )
