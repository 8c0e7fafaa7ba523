"""Forecasts of a rate some steps ahead, and how wrong they have been.

Four models run side by side: a slow mean, the present level, Holt's linear trend with damping (Gardner and
McKenzie, 1985), and the value one season ago scaled by how this season compares. At each horizon the model
with the smallest recent errors is used, and its own errors set the margin.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

HORIZONS: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
"""Numbers of steps ahead at which forecasts are kept and compared with what came."""
ERRORS_KEPT = 60
ERRORS_MIN = 8
"""Fewer errors than this support neither a choice of model nor a quantile."""
TREND_MAX = 1.25
"""Largest forecast of the trend model, times the level. A rate that rises faster within one start is a jump,
which does not go on."""
MARGIN_MAX = 0.3
"""Largest margin, as a part of the forecast. A jump of the load makes every forecast wrong once, and no
margin helps against that."""
UNKNOWN_ERROR = 0.1
"""Assumed error, as a part of the value, while errors are unknown."""
LEVEL_WEIGHT, TREND_WEIGHT, DAMPING = 0.4, 0.15, 0.9
SLOW_WEIGHT = 0.06
SWITCH_SHARE = 0.9
"""A model takes over when its errors are below this part of those of the model in use."""
MODELS = ("mean", "level", "trend", "season")


class RateForecast(NamedTuple):
    """A forecast in the unit of the values."""

    value: float
    upper: float
    """`value` plus the quantile by which such forecasts fell short lately. It is never below `value`."""
    error: float
    """Mean absolute error of such forecasts lately."""
    model: str


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of at least one value by linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class Forecaster:
    """Forecasts of one series with one value per step."""

    def __init__(self, *, caution: float, season_steps: int = 0) -> None:
        """`caution` is the quantile of errors that `RateForecast.upper` covers. `season_steps` 0 means that
        there is no season."""
        self._caution, self._season_steps = caution, season_steps
        self._count = self._since = 0
        self._slow = self._level = self._trend = 0.0
        self._past: deque[float] = deque(maxlen=max(1, season_steps + max(HORIZONS)))
        self._pending: deque[tuple[int, int, tuple[float, ...]]] = deque()
        """Forecasts not yet resolved: (step at which it is due, horizon, forecasts of the models)."""
        self._errors = {
            horizon: tuple(deque[float](maxlen=ERRORS_KEPT) for _ in MODELS) for horizon in HORIZONS
        }
        self._chosen = dict.fromkeys(HORIZONS, 0)

    def restart(self) -> None:
        """Note that the values jump with the next one. Forecasts made across the jump are dropped, because
        their errors say nothing about the models; errors counted before stay."""
        self._pending.clear()
        self._since = self._count
        self._trend = 0.0

    def observe(self, value: float) -> None:
        self._count += 1
        self._resolve(value)
        known = self._count - self._since
        if known == 1:
            self._slow = self._level = value
        else:
            # The slow mean is a plain mean until it has seen enough.
            self._slow += max(SLOW_WEIGHT, 1 / known) * (value - self._slow)
            before = self._level
            expected = self._level + DAMPING * self._trend
            self._level = expected + LEVEL_WEIGHT * (value - expected)
            self._trend += TREND_WEIGHT * (self._level - before - self._trend)
        self._past.append(value)
        for horizon in HORIZONS:
            self._pending.append((self._count + horizon, horizon, self._models(horizon)))
            self._choose(horizon)

    def predict(self, steps: int) -> RateForecast:
        """Return the forecast for `steps` from now, at the nearest horizon that is not shorter, or at the
        longest."""
        horizon = next((h for h in HORIZONS if h >= steps), HORIZONS[-1])
        number = self._chosen[horizon]
        value = self._models(horizon)[number]
        errors = self._errors[horizon][number]
        if len(errors) < ERRORS_MIN:
            margin = UNKNOWN_ERROR * value
            return RateForecast(value, value + margin, margin, MODELS[number])
        short = min(MARGIN_MAX * value, max(0.0, quantile(errors, self._caution)))
        mean = sum(abs(error) for error in errors) / len(errors)
        return RateForecast(value, value + short, mean, MODELS[number])

    def _resolve(self, value: float) -> None:
        kept: deque[tuple[int, int, tuple[float, ...]]] = deque()
        for due, horizon, predictions in self._pending:
            if due > self._count:
                kept.append((due, horizon, predictions))
                continue
            for errors, predicted in zip(self._errors[horizon], predictions, strict=False):
                errors.append(value - predicted)
        self._pending = kept

    def _choose(self, horizon: int) -> None:
        means = [
            sum(abs(e) for e in errors) / len(errors) if len(errors) >= ERRORS_MIN else None
            for errors in self._errors[horizon]
        ]
        held = means[self._chosen[horizon]]
        for number, mean in enumerate(means):
            if mean is not None and held is not None and mean < SWITCH_SHARE * held:
                self._chosen[horizon], held = number, mean

    def _models(self, steps: int) -> tuple[float, ...]:
        damped = sum(DAMPING**n for n in range(1, steps + 1))
        trend = min(TREND_MAX * self._level, max(0.0, self._level + damped * self._trend))
        season = self._seasonal(steps)
        own = (self._slow, self._level, trend)
        return own if season is None else (*own, season)

    def _seasonal(self, steps: int) -> float | None:
        """Return the value one season before the predicted step, scaled by how the present level compares
        with one season ago."""
        ago, then = self._season_steps, self._season_steps - steps
        if not ago or then < 1 or len(self._past) <= ago:
            return None
        before = self._past[-1 - ago]
        ratio = self._level / before if before > 0 else 1.0
        return self._past[-1 - then] * min(2.0, max(0.5, ratio))
