"""Whether predictions say more than their mean: what makes them worth deciding by, however far off they are.

Times of a busy cluster vary by a factor of ten, and predictions of them may be off by one half and still tell
which worker is soonest. The measure is the mean squared error skill score (Murphy, "Skill scores based on the
mean square error", Monthly Weather Review 1988) of logarithms, with the latest mean as the reference.
"""

from math import inf, log

WEIGHT = 0.04
"""Weight of the newest observation: about twenty-five are remembered."""
COUNT_MIN = 8
SCORE_MIN = 0.2
"""Least share of the variance that predictions must explain. A constant explains none, and chance may seem to
explain a little."""
ERROR_MAX = 3.0
"""Bound of ln(actual / predicted), either way."""


class Skill:
    """The skill of the latest predictions of one quantity."""

    __slots__ = ("_mean", "_square_error", "_variance", "count")

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._variance = self._square_error = 0.0

    def observe(self, predicted_s: float, actual_s: float, *, tolerance_s: float) -> None:
        """Add a prediction. `tolerance_s`: a difference that nobody minds. What is no time (a NaN, less than
        nothing) says nothing."""
        if not (0.0 <= predicted_s < inf and 0.0 <= actual_s < inf):
            return
        actual = log(actual_s + tolerance_s)
        error = max(-ERROR_MAX, min(ERROR_MAX, actual - log(predicted_s + tolerance_s)))
        self.count += 1
        weight = max(WEIGHT, 1.0 / self.count)
        away = actual - self._mean
        self._mean += weight * away
        self._variance = (1.0 - weight) * (self._variance + weight * away * away)
        self._square_error += weight * (error * error - self._square_error)

    @property
    def is_enough(self) -> bool:
        """Whether deciding by the predictions is better than deciding without any. False while few are
        known."""
        return self.count >= COUNT_MIN and self._square_error < (1.0 - SCORE_MIN) * self._variance


class Smoothed:
    """The mean of what was observed lately."""

    __slots__ = ("_weight_min", "count", "value")

    def __init__(self, weight_min: float) -> None:
        """`weight_min`: least weight of the newest observation."""
        self._weight_min, self.count, self.value = weight_min, 0, 0.0

    def observe(self, value: float) -> None:
        self.count += 1
        self.value += max(self._weight_min, 1.0 / self.count) * (value - self.value)
