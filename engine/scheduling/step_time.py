"""Prediction of a step's time, learnt from the times of earlier steps.

seconds ≈ base + a·prompt tokens + b·max(0, decodes - 8) + b'·min(decodes, 8) + c·context tokens
+ d·blocks moved + e·draft tokens + f·pairs

The fit is least squares over steps, older ones forgotten, no coefficient below zero: cyclic coordinate
descent on the weighted normal equations (Franc, Hlaváč, Navara, "Sequential coordinate-wise algorithm for the
non-negative least squares problem", CAIP 2005), with a few sweeps per step from where the last one ended.
Errors count relative to the step's length, since a few long prompts would otherwise drown what a decode
costs. A little weight on the present estimate keeps coefficients that no recent step shows from drifting.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log, sqrt

import msgspec

from baton.core.costs import FEW_DECODES, StepCosts, prompt_pairs

FORGET = 0.98
"""Weight of a step, per later step: about fifty steps are remembered, for what the next step will take."""
FORGET_USUAL = 0.9995
"""The same for what others are told: routers correct it by what happens, and a base that moves with every
fifty steps would move under their corrections. So many steps tell the costs apart; fifty alike do not."""
FORGET_FAST = 0.8
"""Factor by which both sums forget while steps repeatedly take much longer or shorter than predicted."""
SURPRISE = 0.5
"""Smoothed ln(actual / predicted) from which on the machine counts as changed."""
SURPRISE_WEIGHT = 0.2
RIDGE = 0.02
"""Steps' worth of belief in each cost as it is now."""
RIDGE_SHARE_MIN = 0.05
"""Least ridge weight, as a share of the cold value, so that a cost of zero can become positive again."""
SWEEPS = 4
SWEEPS_USUAL = 16
"""Sweeps when the usual costs are read, which starts from the last reading, many steps ago."""
COLD_STEPS = 8
"""Steps that must be observed before any step counts as an outlier."""
OUTLIER = 4.0
"""A step that took so many times what was predicted counts as that much and no more: a stall is not the
model's cost, and if it is, a few such steps get there."""

NEAR_FLOOR = 1.15
"""Steps up to so many times the floor show the floor and not their own costs."""
FLOOR_WEIGHT = 0.1
"""Weight of a step that took less than the floor."""


@dataclass(frozen=True, slots=True)
class StepWork:
    prompt_tokens: int = 0
    decodes: int = 0
    context_tokens: int = 0
    """Positions before those that are computed, of the sequences that decode."""
    moved_blocks: int = 0
    """Swapped or copied."""
    drafts: int = 0
    pairs: int = 0
    """Pairs of a prompt token computed and a position before it, see `baton.core.costs`."""


_MANY, _FEW = 2, 7
"""The features of sequences that decode: those beyond the first `FEW_DECODES`, and those."""
SCALES = (1.0, 256.0, 16.0, 16_384.0, 16.0, 16.0, 262_144.0, 8.0)
"""So that all features are of the order of one."""
COLD_S = (0.002, 2e-4, 2e-4, 1e-7, 1e-4, 2e-4, 1e-8, 4e-4)
"""Before the first step: a small model on a few cores. Wrong by any factor, it is forgotten at once."""


class _Fit:
    """Weighted normal equations of the steps seen, and the costs that solve them."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        size = len(SCALES)
        self.theta = [cold_s * scale for cold_s, scale in zip(COLD_S, SCALES, strict=True)]
        self._theta_min = [RIDGE_SHARE_MIN * theta for theta in self.theta]
        self._a = [[0.0] * size for _ in range(size)]
        self._y = [0.0] * size

    def add(self, features: tuple[float, ...], seconds: float, *, forget: float) -> None:
        for row, x in zip(self._a, features, strict=True):
            for j, other in enumerate(features):
                row[j] = forget * row[j] + x * other
        self._y = [forget * y + x * seconds for y, x in zip(self._y, features, strict=True)]

    def solve(self, sweeps: int) -> None:
        theta = self.theta
        for _ in range(sweeps):
            for i, row in enumerate(self._a):
                explained = sum(a * t for a, t in zip(row, theta, strict=True)) - row[i] * theta[i]
                ridge = RIDGE / max(theta[i], self._theta_min[i]) ** 2
                best = (self._y[i] - explained + ridge * theta[i]) / (row[i] + ridge)
                theta[i] = max(0.0, best)
            if not self._a[_MANY][_MANY]:  # no step had so many, and they are not known to be cheaper
                theta[_MANY] = theta[_FEW] * SCALES[_MANY] / SCALES[_FEW]

    @property
    def costs(self) -> StepCosts:
        each = [theta / scale for theta, scale in zip(self.theta, SCALES, strict=True)]
        few_decode_s = each[_FEW] - each[_MANY]
        return StepCosts(*each[:4], pair_s=each[6], stages=self._stages, few_decode_s=few_decode_s)


class StepTimeModel:
    def __init__(self, *, chunk_tokens: int = 512, stages: int = 1, floor_s: float = 0.0) -> None:
        """`chunk_tokens`: of a long prompt, in one step. `stages`: of the worker's pipeline. floor_s: see
        `StepCosts`. It sinks if steps turn out to take less."""
        self._chunk_tokens, self._floor_s = chunk_tokens, floor_s
        self._latest, self._usual = _Fit(stages), _Fit(stages)
        self._is_usual_solved = True
        self._surprise = 0.0
        self.step_count = 0
        self.has_seen_prompt = False
        """True once the cost of prompt tokens was measured."""

    def begin(self, measured: Iterable[tuple[StepWork, float]], *, floor_s: float) -> None:
        """Learn what a worker measured when it started."""
        self._floor_s = floor_s
        for work, elapsed_s in measured:
            self.observe(work, elapsed_s)

    def predict_s(self, work: StepWork) -> float:
        return max(self._floor_s, self.compute_s(work))

    def compute_s(self, work: StepWork) -> float:
        """Predict the time of a step without its floor."""
        return sum(t * x for t, x in zip(self._latest.theta, _features(work), strict=True))

    @property
    def moved_block_s(self) -> float:
        return self._latest.theta[4] / SCALES[4]

    @property
    def draft_s(self) -> float:
        """Seconds for one more draft token to verify."""
        return self._latest.theta[5] / SCALES[5]

    def work_s(self, start: int, end: int) -> float:
        """Predict what positions [start, end) of a prompt add to steps."""
        return self._latest.costs.prompts_s(end - start, prompt_pairs(start, end))

    def prompt_s(self, start: int, end: int) -> float:
        """Computing positions [start, end) of one prompt, with nobody beside it."""
        return self.costs.prompt_s(start, end, chunk_tokens=self._chunk_tokens)

    def share_s(self, start: int, end: int) -> float:
        """The same, of positions within a longer chunk."""
        chunk_tokens = self._chunk_tokens
        return self.prompt_s(start, start + chunk_tokens) * (end - start) / chunk_tokens

    @property
    def seen_costs(self) -> StepCosts | None:
        """The usual costs, from which routers, planner and simulator start; None if no step ran yet."""
        if not self.step_count:
            return None
        if not self._is_usual_solved:
            self._usual.solve(SWEEPS_USUAL)
            self._is_usual_solved = True
        return msgspec.structs.replace(self._usual.costs, floor_s=self._floor_s)

    @property
    def costs(self) -> StepCosts:
        """The recent costs."""
        return msgspec.structs.replace(self._latest.costs, floor_s=self._floor_s)

    def observe(self, work: StepWork, elapsed_s: float) -> None:
        predicted_s = self.predict_s(work)
        if self.step_count >= COLD_STEPS:
            elapsed_s = min(elapsed_s, OUTLIER * predicted_s)
        error = log(max(elapsed_s, 1e-6) / max(predicted_s, 1e-6))
        self._surprise += SURPRISE_WEIGHT * (error - self._surprise)
        is_another = abs(self._surprise) > SURPRISE
        self.step_count += 1
        self.has_seen_prompt |= work.prompt_tokens > 0
        if self._is_hidden(work, elapsed_s):
            return
        scale = 1.0 / max(sqrt(elapsed_s * predicted_s), 1e-5)
        features = tuple(x * scale for x in _features(work))
        self._latest.add(features, elapsed_s * scale, forget=FORGET_FAST if is_another else FORGET)
        self._usual.add(features, elapsed_s * scale, forget=FORGET_FAST if is_another else FORGET_USUAL)
        self._latest.solve(SWEEPS)
        self._is_usual_solved = False

    def _is_hidden(self, work: StepWork, elapsed_s: float) -> bool:
        """Whether the step took what reading weights takes, so that its own cost is hidden behind it."""
        if elapsed_s > NEAR_FLOOR * self._floor_s or self.compute_s(work) > elapsed_s:
            return False
        if elapsed_s < self._floor_s:
            self._floor_s += FLOOR_WEIGHT * (elapsed_s - self._floor_s)
        return True


def _features(work: StepWork) -> tuple[float, ...]:
    return (
        1.0,
        work.prompt_tokens / SCALES[1],
        max(0, work.decodes - FEW_DECODES) / SCALES[2],
        work.context_tokens / SCALES[3],
        work.moved_blocks / SCALES[4],
        work.drafts / SCALES[5],
        work.pairs / SCALES[6],
        min(work.decodes, FEW_DECODES) / SCALES[7],
    )
