"""What a rate will be some steps from now, and how wrong such forecasts have been.

Four models run side by side: a slow mean, the present level, Holt's linear trend with damping (Gardner and
McKenzie, 1985), and the same time one season ago times how this season compares. At each horizon the one
whose forecasts were nearest lately is believed, and its own errors there say how much to add.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

HORIZONS: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
"""Steps ahead at which forecasts are kept and compared with what came."""
ERRORS_KEPT = 60
ERRORS_MIN = 8
"""Fewer errors than that are no ground for a choice, nor for a quantile."""
TREND_MAX = 1.25
"""Times the level. What rises faster than that within a start is a jump, which does not go on."""
MARGIN_MAX = 0.3
"""Of the value: a load that jumped made every forecast wrong by the jump, once, and no margin helps then."""
UNKNOWN_ERROR = 0.1
"""Of the value, while errors are unknown."""
LEVEL_WEIGHT, TREND_WEIGHT, DAMPING = 0.4, 0.15, 0.9
SLOW_WEIGHT = 0.06
SWITCH_SHARE = 0.9
"""A model takes over when its errors are less than that share of those of the model in use."""
MODELS = ("mean", "level", "trend", "season")


class RateForecast(NamedTuple):
    """In the unit of the values."""

    value: float
    upper: float
    """`value`, and the quantile of what such forecasts fell short by lately; at least `value`."""
    error: float
    """Mean absolute error of such forecasts lately."""
    model: str


def quantile(values: Sequence[float], share: float) -> float:
    """By linear interpolation; of at least one value."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class Forecaster:
    """Of one value per step."""

    def __init__(self, *, caution: float, season_steps: int = 0) -> None:
        """`caution`: the quantile that `RateForecast.upper` stands for. `season_steps` 0: no season."""
        self._caution, self._season_steps = caution, season_steps
        self._count = self._since = 0
        self._slow = self._level = self._trend = 0.0
        self._past: deque[float] = deque(maxlen=max(1, season_steps + max(HORIZONS)))
        self._pending: deque[tuple[int, int, tuple[float, ...]]] = deque()
        """(step at which it is due, horizon, forecasts of the models)."""
        self._errors = {
            horizon: tuple(deque[float](maxlen=ERRORS_KEPT) for _ in MODELS) for horizon in HORIZONS
        }
        self._chosen = dict.fromkeys(HORIZONS, 0)

    def restart(self) -> None:
        """The values jump with the next one. What was forecast across the jump is forgotten: it says nothing
        of forecasts, and errors of those before are errors still."""
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
        """`steps` from now; as far as the nearest horizon that is no shorter, or the longest."""
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
        """What came one season before then, by how much more or less it is now than a season before now."""
        ago, then = self._season_steps, self._season_steps - steps
        if not ago or then < 1 or len(self._past) <= ago:
            return None
        before = self._past[-1 - ago]
        ratio = self._level / before if before > 0 else 1.0
        return self._past[-1 - then] * min(2.0, max(0.5, ratio))
