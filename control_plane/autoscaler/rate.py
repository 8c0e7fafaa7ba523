"""One rate over time: its mean over a window, its forecast, and jumps."""

from collections import deque
from math import sqrt
from statistics import median

from control_plane.autoscaler.forecast import Forecaster, RateForecast
from control_plane.autoscaler.jumps import Jumps
from control_plane.autoscaler.values import AutoscalerSettings

SURGE_SIGMAS = 3.0
SURGE_STEPS = (1, 3)
"""Intervals whose mean lies further above the window's than chance explains count at once, less so much."""
JUMP_SIGMAS = 1.0
"""Standard deviations above the mean of what came since a jump, that there are workers for until a whole
window was seen: too few are missed for as long as a start takes."""

USUAL_S = 3600.0
"""What was so for most of this time is usual, and a spike is not."""
BASIS_STEPS = 32
"""Intervals that the forecast's slow mean rests on."""


class RateEstimator:
    """Of work that requests bring. `observe` once per interval."""

    def __init__(self, settings: AutoscalerSettings) -> None:
        # What varies faster than this window is the queueing model's, or a jump.
        steps = max(1, round(settings.window_s / settings.interval_s))
        self._recent: deque[tuple[float, int]] = deque(maxlen=steps)
        """(value, requests) of intervals at the present rate."""
        season = round(settings.season_s / settings.interval_s)
        self._forecaster = Forecaster(caution=settings.caution, season_steps=season)
        self._jumps = Jumps()
        self.surge = 0.0
        self._variation = 1.0
        self._basis: deque[int] = deque(maxlen=BASIS_STEPS)
        """Requests of intervals since a jump."""
        self._means: deque[float] = deque(maxlen=max(1, round(USUAL_S / settings.interval_s)))
        self._has_jumped = False
        self.is_ready = False
        """A whole window was seen once, or a jump. Before, chance looks like load."""

    def observe(self, value: float, *, requests: int, variation: float) -> None:
        """`variation`: squared coefficient of variation of what one request brings."""
        self._variation = variation
        usual = self.mean if self._recent else value
        self._recent.append((value, requests))
        self._basis.append(requests)
        self._has_jumped &= len(self._recent) < (self._recent.maxlen or 0)
        self.is_ready |= len(self._recent) == self._recent.maxlen
        self.surge = max(self._sure(steps, usual, variation) for steps in SURGE_STEPS)
        if steps := self._jumps.observe(requests):
            self._begin_anew(steps)
        self._forecaster.observe(self.mean)
        self._means.append(self.mean)

    def _begin_anew(self, steps: int) -> None:
        """So many of the latest intervals are at another rate. Of requests: one prompt may be the work of a
        hundred others, and is no jump."""
        kept = list(self._recent)[-steps:]
        self._recent.clear()
        self._recent.extend(kept)
        self._basis = deque((n for _, n in kept), maxlen=BASIS_STEPS)
        self._has_jumped = len(kept) < (self._recent.maxlen or 0)
        self.is_ready = True
        self._forecaster.restart()

    def _sure(self, steps: int, usual: float, variation: float) -> float:
        """What the latest steps are at the least; 0: no more than usual."""
        latest = [self._recent[-1 - n] for n in range(min(steps, len(self._recent)))]
        value = sum(v for v, _ in latest) / len(latest)
        # Of a Poisson number of requests, each of random size; as many as are usual, and one at the least.
        requests = max(1, sum(n for _, n in latest))
        chance = sqrt(max(usual, value / requests) * value * (1 + variation) / requests)
        sure = value - SURGE_SIGMAS * chance
        return sure if sure > usual else 0.0

    @property
    def _requests(self) -> int:
        return max(1, sum(n for _, n in self._recent))

    @property
    def mean(self) -> float:
        return sum(v for v, _ in self._recent) / len(self._recent) if self._recent else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the mean, as a share of it."""
        return sqrt((1 + self._variation) / self._requests)

    @property
    def doubt(self) -> float:
        """The same of the mean of all that is remembered of this rate: what a forecast rests on at best."""
        return sqrt((1 + self._variation) / max(1, sum(self._basis)))

    @property
    def least(self) -> float:
        """What the mean is at the least, one standard deviation below it."""
        return max(0.0, self.mean * (1 - self.deviation))

    @property
    def jumped(self) -> float:
        """Since a jump that is no older than the window: what it may have jumped to; else 0."""
        return self.mean * (1 + JUMP_SIGMAS * self.deviation) if self._has_jumped else 0.0

    @property
    def usual(self) -> float:
        return median(self._means) if self._means else 0.0

    def predict(self, steps: int) -> RateForecast:
        return self._forecaster.predict(steps)
