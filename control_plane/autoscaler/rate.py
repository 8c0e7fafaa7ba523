"""The estimate of one rate over time: its mean over a window, its forecast, and its jumps."""

from collections import deque
from math import sqrt
from statistics import median

from control_plane.autoscaler.forecast import Forecaster, RateForecast
from control_plane.autoscaler.jumps import Jumps
from control_plane.autoscaler.values import AutoscalerSettings

SURGE_SIGMAS = 3.0
SURGE_STEPS = (1, 3)
"""Numbers of latest intervals whose mean may count as a surge at once: it must exceed the mean of the window
by more than chance explains, and counts less that amount."""
JUMP_SIGMAS = 1.0
"""Standard deviations above the mean since a jump for which there are workers until a whole window has been
observed. Too few workers would be missed for as long as a start takes."""

USUAL_S = 3600.0
"""A rate that held for most of this time is usual, and a spike is not."""
BASIS_STEPS = 32
"""Number of intervals that the forecast's slow mean rests on."""


class RateEstimator:
    """The estimated rate of work that requests bring. Call `observe` once per interval."""

    def __init__(self, settings: AutoscalerSettings) -> None:
        # The queueing model or a jump accounts for whatever varies faster than this window.
        steps = max(1, round(settings.window_s / settings.interval_s))
        self._recent: deque[tuple[float, int]] = deque(maxlen=steps)
        """(value, requests) of intervals at the present rate."""
        season = round(settings.season_s / settings.interval_s)
        self._forecaster = Forecaster(caution=settings.caution, season_steps=season)
        self._jumps = Jumps()
        self.surge = 0.0
        self._variation = 1.0
        self._basis: deque[int] = deque(maxlen=BASIS_STEPS)
        """Requests per interval since a jump."""
        self._means: deque[float] = deque(maxlen=max(1, round(USUAL_S / settings.interval_s)))
        self._has_jumped = False
        self.is_ready = False
        """True once a whole window or a jump has been observed. Before that, chance looks like load."""

    def observe(self, value: float, *, requests: int, variation: float) -> None:
        """Add one interval. `variation` is the squared coefficient of variation of the work of one
        request."""
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
        """Keep only this many of the latest intervals, which are at another rate. The number of requests
        decides this and not their work, since one prompt may be the work of a hundred others and is no
        jump."""
        kept = list(self._recent)[-steps:]
        self._recent.clear()
        self._recent.extend(kept)
        self._basis = deque((n for _, n in kept), maxlen=BASIS_STEPS)
        self._has_jumped = len(kept) < (self._recent.maxlen or 0)
        self.is_ready = True
        self._forecaster.restart()

    def _sure(self, steps: int, usual: float, variation: float) -> float:
        """Return the least rate that the latest steps support, or 0 if it is not above the usual one."""
        latest = [self._recent[-1 - n] for n in range(min(steps, len(self._recent)))]
        value = sum(v for v, _ in latest) / len(latest)
        # The deviation is that of a Poisson number of requests of random size at the usual rate.
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
        """Standard deviation of the mean, as a part of it."""
        return sqrt((1 + self._variation) / self._requests)

    @property
    def doubt(self) -> float:
        """Standard deviation of the mean over all that is remembered of this rate, as a part of it. A
        forecast is never more certain."""
        return sqrt((1 + self._variation) / max(1, sum(self._basis)))

    @property
    def least(self) -> float:
        """The mean less one standard deviation."""
        return max(0.0, self.mean * (1 - self.deviation))

    @property
    def jumped(self) -> float:
        """The rate that the load may have jumped to, while the jump is younger than the window; else 0."""
        return self.mean * (1 + JUMP_SIGMAS * self.deviation) if self._has_jumped else 0.0

    @property
    def usual(self) -> float:
        return median(self._means) if self._means else 0.0

    def predict(self, steps: int) -> RateForecast:
        return self._forecaster.predict(steps)
