"""The distribution of prediction errors, learnt from the latest ones: what a prediction of 90 % is made of.

An error is z = ln(actual / predicted) / sigma, where sigma is the spread that was expected of it. The latest
errors of a service class are the distribution of its next one, as in split conformal prediction (Lei et al.,
"Distribution-free predictive inference for regression", JASA 2018): if errors come in no particular order,
the share that stays below a quantile of the latest ones is that quantile's level, whatever their shape.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from itertools import accumulate
from math import exp, frexp, inf, log
from statistics import NormalDist
from typing import NamedTuple

WINDOW = 2048
"""The number of latest errors that make up a distribution."""
PRIOR_COUNT = 24
"""A distribution begins with so many errors of a normal one, and they leave it first."""
LEVEL_STEP = 0.0005
"""Weight of one error that was above or below what was said. Adaptive conformal inference calls it gamma."""
KNOTS_EVERY = 8
"""Quantiles are computed again after so many errors, when they are asked for."""
UNMOVED_MAX = 256
"""Most errors that wait until the levels are moved by them, since nobody asks for the quantiles."""
COUNT_MIN = 48
"""A kind of sequences with fewer errors of its own is taken to be like the next more general kind."""
KINDS_MAX = 64
SIZE_MIN, SIZE_MAX, ANY_SIZE = -12, 7, -100
"""Powers of two of predicted seconds, from 0.2 ms to two minutes."""
Z_MAX = 10.0
SIGMA_MIN = 1e-3
TAIL_MIN = 0.15
"""Least scale, in standard deviations, of the exponential tails beyond the outermost errors."""
_LEVELS = (
    *(0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6),
    *(0.65, 0.7, 0.75, 0.8, 0.85, 0.875, 0.9, 0.925, 0.95, 0.965, 0.98, 0.99, 0.995),
)
HELD_LEVEL = 0.9
HELD_WEIGHT = 0.002
_HELD = _LEVELS.index(HELD_LEVEL)
_NORMAL = NormalDist()
ODDS = 10.0
"""A level of the latest errors stands for one whose odds are at most so many times its own, or so many times
less."""
_HIGHEST = tuple(level * ODDS / (1.0 - level + level * ODDS) for level in _LEVELS)
_LOWEST = tuple(level / (level + (1.0 - level) * ODDS) for level in _LEVELS)


class ErrorDistribution(NamedTuple):
    """A frozen distribution of errors: linear between its quantiles, exponential beyond them."""

    knots: tuple[float, ...]
    """Quantiles at the levels `_LEVELS`, which do not fall."""
    low_scale: float
    """Scale of the tail below the first knot."""
    high_scale: float

    def quantile(self, level: float) -> float:
        """Return the error z that a share `level` of errors, between 0 and 1, does not exceed."""
        knots = self.knots
        if level <= _LEVELS[0]:
            return max(-Z_MAX, knots[0] + self.low_scale * log(max(level, 1e-9) / _LEVELS[0]))
        if level >= _LEVELS[-1]:
            beyond = max(1.0 - level, 1e-9) / (1.0 - _LEVELS[-1])
            return min(Z_MAX, knots[-1] - self.high_scale * log(beyond))
        i = bisect_right(_LEVELS, level)
        share = (level - _LEVELS[i - 1]) / (_LEVELS[i] - _LEVELS[i - 1])
        return knots[i - 1] + share * (knots[i] - knots[i - 1])

    def quantile_s(self, level: float, predicted_s: float, sigma: float) -> float:
        """Return the seconds that a time predicted to be `predicted_s` does not exceed in a share `level` of
        cases."""
        return predicted_s * exp(max(sigma, SIGMA_MIN) * self.quantile(level))


def _frozen(ordered: list[float], levels: list[float]) -> ErrorDistribution:
    """`ordered`: errors in ascending order, at least two. `levels`: those that stand for `_LEVELS`."""
    last = len(ordered) - 1

    def at(level: float) -> float:
        # The share of n errors below the k-th is k / (n + 1), so that the next one is below it with just
        # that probability.
        place = min(max(level * (last + 2) - 1.0, 0.0), float(last))
        low = int(place)
        high = min(low + 1, last)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    # Exponential tails, whose levels differ by ln 10 scales between the 1st and 10th percentile from an end.
    low = max(TAIL_MIN, (at(0.1) - at(0.01)) / log(10.0))
    high = max(TAIL_MIN, (at(0.99) - at(0.9)) / log(10.0))
    plain = ErrorDistribution(tuple(map(at, _LEVELS)), low, high)
    knots = accumulate((plain.quantile(level) for level in levels), max)
    return ErrorDistribution(tuple(knots), low, high)


_PRIOR = [_NORMAL.inv_cdf((i + 0.5) / PRIOR_COUNT) for i in range(PRIOR_COUNT)]
NORMAL = ErrorDistribution(tuple(map(_NORMAL.inv_cdf, _LEVELS)), 0.37, 0.37)
"""Errors as they are taken to be before any was seen."""


class LatestErrors:
    """The latest errors of one quantity, and their distribution.

    Errors of one load resemble one another, and they are known only when answers end, so the next errors
    differ from the latest ones while the load changes. Each level is therefore raised while more errors than
    it says exceed what was said, and lowered while fewer do, which makes it true in the long run whatever
    happens (adaptive conformal inference: Gibbs and Candès, NeurIPS 2021).
    """

    __slots__ = ("_frozen", "_held_from", "_is_old", "_latest", "_levels", "_ordered", "count", "held_share")

    def __init__(self) -> None:
        self.count = 0
        self.held_share = 0.0
        """Share of the latest errors that were within the level `HELD_LEVEL` as it was said."""
        self._latest: deque[float] = deque(_PRIOR)
        self._ordered = sorted(_PRIOR)
        self._levels = list(_LEVELS)
        """The levels of the latest errors that stand for `_LEVELS`."""
        self._held_from: list[int] = []
        """The first of `_LEVELS` that each error since the levels were moved did not exceed."""
        self._frozen = NORMAL
        self._is_old = False
        """Whether the levels have moved since the quantiles were computed."""

    def observe(self, z: float, said: ErrorDistribution) -> None:
        """Add an error. `said`: its distribution as it was when the time was predicted. What is no number
        says nothing."""
        if not -inf < z < inf:
            return
        self._held_from.append(bisect_left(said.knots, z))
        z = max(-Z_MAX, min(Z_MAX, z))
        self.count += 1
        self.held_share += max(HELD_WEIGHT, 1.0 / self.count) * ((z <= said.knots[_HELD]) - self.held_share)
        self._latest.append(z)
        insort(self._ordered, z)
        if len(self._latest) > WINDOW:
            del self._ordered[bisect_left(self._ordered, self._latest.popleft())]
        if len(self._held_from) >= UNMOVED_MAX:
            self._move_levels()

    @property
    def distribution(self) -> ErrorDistribution:
        """The distribution of the next error, which is at most `KNOTS_EVERY` errors old."""
        if len(self._held_from) >= KNOTS_EVERY:
            self._move_levels()
        if self._is_old:
            self._is_old = False
            self._frozen = _frozen(self._ordered, self._levels)
        return self._frozen

    def _move_levels(self) -> None:
        held, levels, total = Counter(self._held_from), self._levels, len(self._held_from)
        within = 0
        for i, level in enumerate(_LEVELS):
            within += held[i]
            changed = levels[i] + LEVEL_STEP * (level * total - within)
            levels[i] = max(_LOWEST[i], min(_HIGHEST[i], changed))
        self._held_from.clear()
        self._is_old = True


class ErrorsByKind:
    """The latest errors of one quantity: over all sequences, for each service class, and for each class and
    size of the prediction, by powers of two.

    A time predicted to be 20 ms is off by another factor than one of two seconds, so each size has a
    distribution of its own as soon as it has been seen often enough (Mondrian conformal prediction: Vovk et
    al., "Algorithmic Learning in a Random World", 2005, section 4.5).
    """

    def __init__(self, *, by_size: bool) -> None:
        """`by_size` False: sizes share one distribution."""
        self.all = LatestErrors()
        self._by_size = by_size
        self._kinds: dict[tuple[str, int], LatestErrors] = {}

    def observe(self, slo_class: str, predicted_s: float, z: float, said: ErrorDistribution) -> None:
        self.all.observe(z, said)
        for size in self._sizes(predicted_s):
            kind = slo_class, size
            found = self._kinds.get(kind)
            if found is None:
                if len(self._kinds) >= KINDS_MAX:
                    continue
                found = self._kinds[kind] = LatestErrors()
            found.observe(z, said)

    def of(self, slo_class: str, predicted_s: float) -> ErrorDistribution:
        for size in self._sizes(predicted_s):
            found = self._kinds.get((slo_class, size))
            if found is not None and found.count >= COUNT_MIN:
                return found.distribution
        return self.all.distribution

    def held_shares(self) -> dict[str, tuple[int, float]]:
        """Return for each service class the number of errors, and the share of the latest ones that were
        within the level `HELD_LEVEL`."""
        return {
            name: (found.count, found.held_share)
            for (name, size), found in self._kinds.items()
            if size == ANY_SIZE
        }

    def _sizes(self, predicted_s: float) -> tuple[int, ...]:
        if not self._by_size:
            return (ANY_SIZE,)
        return max(SIZE_MIN, min(SIZE_MAX, frexp(predicted_s)[1])), ANY_SIZE
