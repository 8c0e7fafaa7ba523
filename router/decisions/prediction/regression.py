"""How much of a predicted deviation from the usual comes true: a line through the latest predictions and
outcomes, in logarithms."""

from math import exp, inf, log

KEEP = 0.998
"""Weight of an outcome relative to the next one: about 500 are remembered."""
PRIOR_WEIGHT, PRIOR_VARIANCE = 8.0, 0.04
"""Before anything was seen, predictions come true as they are, by so many outcomes of such a variance."""
TIME_MIN_S = 1e-6


class TimeRegression:
    """ln(actual) as a linear function of ln(predicted), by least squares with forgetting.

    A prediction from the present load swings further than what happens, since loads go back to the usual
    while an answer is generated. The line takes that part of the swing away, as any forecast does that is
    judged by its error (regression towards the mean: Galton, 1886).
    """

    __slots__ = ("_x", "_xx", "_xy", "_y", "_zero", "count")

    def __init__(self) -> None:
        self.count = 0.0
        """Weight of the outcomes that are remembered."""
        self._zero = 0.0
        """Subtracted from all logarithms, so that sums of squares keep their precision."""
        self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Add an outcome. What is no time (a NaN, nothing or less) says nothing."""
        if not (0.0 < predicted_s < inf and 0.0 < actual_s < inf):
            return
        if not self.count:
            self._zero = log(predicted_s)
        x, y = log(predicted_s) - self._zero, log(max(actual_s, TIME_MIN_S)) - self._zero
        self.count = KEEP * self.count + 1.0
        self._x = KEEP * self._x + x
        self._y = KEEP * self._y + y
        self._xx = KEEP * self._xx + x * x
        self._xy = KEEP * self._xy + x * y

    @property
    def slope(self) -> float:
        """The part of a deviation that comes true, from 0 to 1; 1 before anything was seen."""
        if not self.count:
            return 1.0
        x, y = self._x / self.count, self._y / self.count
        prior = PRIOR_WEIGHT * PRIOR_VARIANCE / self.count
        variance = max(0.0, self._xx / self.count - x * x)
        return min(1.0, max(0.0, (self._xy / self.count - x * y + prior) / (variance + prior)))

    def expected_s(self, predicted_s: float) -> float:
        """Return the time to expect where `predicted_s` was predicted."""
        if not self.count or not 0.0 < predicted_s < inf:
            return predicted_s
        weight = self.count + PRIOR_WEIGHT
        x, y = self._x / self.count, self._y / self.count
        # With few outcomes the mean error counts little, as the slope does.
        offset = (y - x) * self.count / weight
        deviation = log(predicted_s) - self._zero - x
        return exp(self._zero + x + offset + self.slope * deviation)
