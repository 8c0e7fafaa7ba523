"""How wrong a prediction is, learnt from what happened: a factor, its spread, and whether it has changed."""

from collections import deque
from math import exp, inf, log
from statistics import median

FLOOR_S = 1e-4
"""Added to both sides of a ratio: below it nothing is a matter of the model."""
RATIO_MAX = 3.0
"""Bound of ln(actual / predicted), either way: what is further off says no more than that."""
WEIGHT_MIN = 0.05
"""Least weight of the newest observation: about twenty are remembered."""
PRIOR_COUNT = 2.0
"""A fleet's experience counts as so many observations of a worker that has none."""
HUBER = 2.0
"""In standard deviations: an observation further off counts as that far (Huber, 1964)."""
SIGMA_FIRST, SIGMA_MIN, SIGMA_MAX = 0.4, 0.05, 1.5
CUSUM_SLACK, CUSUM_LIMIT = 0.75, 8.0
"""In standard deviations: two-sided cumulative sums (Page, "Continuous inspection schemes", 1954)."""
RECENT = 8
RECENT_AFTER_CHANGE = 4


class Correction:
    """ln(actual / predicted) of one quantity of one worker.

    `mean` follows slowly what is usual and pays little heed to outliers. When the cumulative sum of
    residuals says that the usual has changed, it starts anew from the latest few.
    """

    __slots__ = ("_down", "_recent", "_spread", "_up", "change_count", "count", "mean", "sigma")

    def __init__(self) -> None:
        self.mean = 0.0
        self.sigma = SIGMA_FIRST
        self.count = 0
        self.change_count = 0
        self._spread = SIGMA_FIRST / 1.25
        self._up = self._down = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """`predicted_s` as the model says it, uncorrected. What is no time (a NaN, less than nothing) says
        nothing."""
        if not (0.0 <= predicted_s < inf and 0.0 <= actual_s < inf):
            return
        ratio = log((actual_s + FLOOR_S) / (predicted_s + FLOOR_S))
        ratio = max(-RATIO_MAX, min(RATIO_MAX, ratio))
        self._recent.append(ratio)
        error = ratio - self.mean
        if self.count >= RECENT and self._has_changed(error / self.sigma):
            self._begin_anew()
            return
        self.count += 1
        weight = max(WEIGHT_MIN, 1.0 / self.count)
        bound = HUBER * self.sigma if self.count > 4 else RATIO_MAX
        self.mean += weight * max(-bound, min(bound, error))
        if self.count > 1:
            self._spread += max(WEIGHT_MIN, 1.0 / (self.count + 2)) * (min(abs(error), 1.5) - self._spread)
            # The mean absolute deviation of a normal distribution is 0.8 of its standard deviation.
            self.sigma = max(SIGMA_MIN, min(SIGMA_MAX, 1.25 * self._spread))

    def _has_changed(self, z: float) -> bool:
        z = max(-3.0, min(3.0, z))
        self._up = max(0.0, self._up + z - CUSUM_SLACK)
        self._down = max(0.0, self._down - z - CUSUM_SLACK)
        return self._up > CUSUM_LIMIT or self._down > CUSUM_LIMIT

    def _begin_anew(self) -> None:
        latest = list(self._recent)[-RECENT_AFTER_CHANGE:]
        self.mean = median(latest)
        self._spread = max(self._spread, median(abs(r - self.mean) for r in latest))
        self.sigma = max(SIGMA_MIN, min(SIGMA_MAX, 1.25 * self._spread))
        self.count = RECENT_AFTER_CHANGE
        self._up = self._down = 0.0
        self.change_count += 1

    def factor(self, prior: "Correction | None" = None) -> float:
        """What to multiply a prediction by; `prior`: of the fleet, while there is little of its own."""
        if prior is None or prior is self or self.count >= 20:
            return exp(self.mean)
        weight = self.count / (self.count + PRIOR_COUNT)
        return exp(weight * self.mean + (1.0 - weight) * prior.mean)


WINDOW = 100


class ErrorWindow:
    """The latest predictions as they were given, beside what happened. Seconds."""

    __slots__ = ("_bias", "_errors", "_excess", "_latest")

    def __init__(self) -> None:
        self._latest: deque[tuple[float, float, float]] = deque()
        self._errors = self._bias = self._excess = 0.0

    def observe(self, predicted_s: float, actual_s: float, *, tolerance_s: float) -> None:
        """`tolerance_s`: a difference that nobody minds; it does not count in `excess`."""
        if not (0.0 <= predicted_s < inf and 0.0 <= actual_s < inf):
            return
        actual_s = max(actual_s, FLOOR_S)
        difference_s = predicted_s - actual_s
        entry = (
            abs(difference_s) / actual_s,
            difference_s / actual_s,
            min(2.0, max(0.0, abs(difference_s) - tolerance_s) / actual_s),
        )
        self._latest.append(entry)
        self._add(entry, 1)
        if len(self._latest) > WINDOW:
            self._add(self._latest.popleft(), -1)

    def _add(self, entry: tuple[float, float, float], sign: int) -> None:
        self._errors += sign * entry[0]
        self._bias += sign * entry[1]
        self._excess += sign * entry[2]

    @property
    def count(self) -> int:
        return len(self._latest)

    @property
    def mape(self) -> float:
        """Mean of |predicted - actual| / actual; 0 while there is nothing."""
        return max(0.0, self._errors) / max(1, len(self._latest))

    @property
    def bias(self) -> float:
        """Mean of (predicted - actual) / actual: above 0, too much was predicted."""
        return self._bias / max(1, len(self._latest))

    @property
    def excess(self) -> float:
        """As `mape`, with what is within the tolerance as no error and 2 at most for any one."""
        return max(0.0, self._excess) / max(1, len(self._latest))
