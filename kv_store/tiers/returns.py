"""When blocks come back, learnt online: how much each block of a class is worth per unit of space and time.

Time is counted in uses of blocks. For every class, uses and leavings are counted by age (time since the last
use), which gives the rate of return at each age (events over exposure; what left unseen counts as exposure
only, as in Kaplan and Meier's estimator). From the rates follows a block's worth at an age: the largest
(chance of a hit) / (expected stay) over all times it might be kept on for. That is Gittins' index of the
block; LHD (Beckmann et al., NSDI 2018) ranks by the same ratio without the choice of the time.
"""

import math
from array import array
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

AGE_FIRST = 16
AGE_RATIO = 1.2
PRIOR_EVENTS = 4.0
PRIOR_ODDS = 0.2
"""Rate of return at age a before anything is known: PRIOR_ODDS / a, under which the oldest goes first."""
KIND_EVENTS = 100.0
"""Weight, in events, of the rates of all classes in those of one kind."""
CLASS_EVENTS = 50.0
"""Weight, in events, of a kind's rates, scaled to a class' chance of return, in those of the class."""
ALIVE_MAX = 65_536
"""Blocks looked at for the exposure of those that have neither returned nor left."""
SCORE_FIRST = -1.0
"""Logit of the chance of return before anything is known."""
STEP = 0.1
STEP_NOISE = 100.0
"""Sum of squares a feature starts with: blocks of a prompt return together, so the first few say little."""


class ReturnTimes:
    """Classes are (kind, level): `cls = level * kinds + kind`. Kinds have return times of their own; levels
    of a kind share their shape and differ first of all in the chance of return."""

    def __init__(self, kinds: int, levels: int, age_max: int) -> None:
        self._kinds = kinds
        self.classes = kinds * levels
        bounds = [0.0, float(AGE_FIRST)]
        while bounds[-1] < age_max:
            bounds.append(bounds[-1] * AGE_RATIO)
        self.bounds = bounds
        self.ages = len(bounds)
        ends = np.array([*bounds[1:], bounds[-1] * AGE_RATIO])
        self._starts = np.array(bounds)
        self._widths: Floats = ends - self._starts
        self._middles: Floats = (ends + self._starts) / 2
        cells = self.classes * self.ages
        self._returned = array("d", bytes(8 * cells))
        self._ended = array("d", bytes(8 * cells))  # returned or left
        self._rest = array("d", bytes(8 * cells))  # of these: time spent in the last bucket of age

    def bucket(self, age: float) -> int:
        return bisect_right(self.bounds, age) - 1

    def ended(self, cls: int, age: float, *, returned: bool) -> None:
        """A block of this class was used again, or is watched no longer, at this age."""
        bucket = bisect_right(self.bounds, age) - 1
        cell = cls * self.ages + bucket
        self._ended[cell] += 1
        self._rest[cell] += age - self.bounds[bucket]
        if returned:
            self._returned[cell] += 1

    def worth(self, alive_classes: NDArray[np.int64], alive_ages: Floats) -> Floats:
        """[classes, ages] hits per block and unit of time. `alive_*`: those that have not ended."""
        shape = (self.classes, self.ages)
        returned = np.array(self._returned).reshape(shape)
        exposure = self._exposure(alive_classes, alive_ages).reshape(shape)
        return self._gittins(self._rates(returned, exposure))

    def _exposure(self, alive_classes: NDArray[np.int64], alive_ages: Floats) -> Floats:
        shape = (self.classes, self.ages)
        ended = np.array(self._ended)
        rest = np.array(self._rest)
        stride = max(1, len(alive_ages) // ALIVE_MAX)
        ages = alive_ages[::stride]
        buckets = np.searchsorted(self._starts, ages, side="right") - 1
        cells = alive_classes[::stride] * self.ages + buckets
        ended += stride * np.bincount(cells, minlength=len(ended))
        rest += stride * np.bincount(cells, weights=ages - self._starts[buckets], minlength=len(rest))
        later = ended.reshape(shape)[:, ::-1].cumsum(axis=1)[:, ::-1] - ended.reshape(shape)
        return later * self._widths + rest.reshape(shape)

    def _rates(self, returned: Floats, exposure: Floats) -> Floats:
        prior = PRIOR_ODDS / self._middles
        pooled = (returned.sum(0) + PRIOR_EVENTS) / (exposure.sum(0) + PRIOR_EVENTS / prior)
        rates = np.empty_like(returned)
        for kind in range(self._kinds):
            of_kind = slice(kind, None, self._kinds)
            kind_returned, kind_exposure = returned[of_kind], exposure[of_kind]
            hazard = (kind_returned.sum(0) + KIND_EVENTS) / (kind_exposure.sum(0) + KIND_EVENTS / pooled)
            density, share, chance = self._shape(hazard)
            events = kind_returned.sum(1, keepdims=True) + PRIOR_EVENTS * chance
            scaled = _scaled(density, share, kind_exposure, events)
            rates[of_kind] = (kind_returned + CLASS_EVENTS) / (kind_exposure + CLASS_EVENTS / scaled)
        return rates

    def _shape(self, hazard: Floats) -> tuple[Floats, Floats, float]:
        """The shape of return times: density at each age and share returned by then; and how many return."""
        survival = np.concatenate(([1.0], np.exp(-np.cumsum(hazard * self._widths))))
        chance = max(1e-9, 1.0 - float(survival[-1]))
        density = (survival[:-1] - survival[1:]) / chance / self._widths
        return density, (1.0 - (survival[:-1] + survival[1:]) / 2) / chance, chance

    def _gittins(self, rates: Floats) -> Floats:
        worth = np.empty_like(rates)
        for first in range(self.ages):
            widths = self._widths[first:].copy()
            widths[0] /= 2  # a block in this bucket is half through it
            stay = np.exp(-rates[:, first:] * widths)
            reach = np.ones_like(stay)
            np.cumprod(stay[:, :-1], axis=1, out=reach[:, 1:])
            gained = reach * (1 - stay)
            worth[:, first] = (gained.cumsum(axis=1) / (gained / rates[:, first:]).cumsum(axis=1)).max(axis=1)
        return worth


def _scaled(density: Floats, share: Floats, exposure: Floats, events: Floats) -> Floats:
    """[levels, ages] rates p f / (1 - p F), with each level's chance of return p under which as many events
    would be expected as there were."""
    low, high = np.zeros_like(events), np.full_like(events, 0.999)
    for _ in range(20):
        p = (low + high) / 2
        expected = (exposure * (p * density / np.maximum(1e-6, 1 - p * share))).sum(1, keepdims=True)
        is_low = expected + PRIOR_EVENTS * p < events
        low, high = np.where(is_low, p, low), np.where(is_low, high, p)
    return np.maximum(1e-15, low * density / np.maximum(1e-6, 1 - low * share))


class ReturnChance:
    """Logistic regression on features that are each there or not: will it return?

    By stochastic gradient with a step of its own for each feature (AdaGrad, Duchi et al., JMLR 2011): what is
    seen rarely is learnt from few observations, and what is seen often settles.
    """

    def __init__(self, features: int) -> None:
        self._weights = [0.0] * features
        self._squares = [STEP_NOISE] * features

    def score(self, features: tuple[int, ...]) -> float:
        """Logit of the chance."""
        weights = self._weights
        score = SCORE_FIRST
        for feature in features:
            score += weights[feature]
        return score

    def learn(self, features: tuple[int, ...], *, returned: bool) -> None:
        score = self.score(features)
        gradient = (1.0 if returned else 0.0) - 1 / (1 + math.exp(-score))
        square = gradient * gradient
        weights, squares = self._weights, self._squares
        for feature in features:
            squares[feature] += square
            weights[feature] += STEP * gradient / math.sqrt(squares[feature])
