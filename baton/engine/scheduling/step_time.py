"""How long a step will take, learnt from how long steps took.

seconds ≈ base + a·prompt tokens + b·decodes + c·context tokens read + d·blocks moved + e·guesses

Least squares over steps, older ones forgotten, no coefficient below zero: cyclic coordinate descent on
the weighted normal equations (Franc, Hlaváč, Navara, "Sequential coordinate-wise algorithm for the
non-negative least squares problem", CAIP 2005), a few sweeps per step from where the last one ended. A
little weight on the present estimate keeps what no recent step shows from drifting.
"""

from dataclasses import dataclass

FORGET = 0.98
"""Weight of a step, per later step: about fifty steps are remembered."""
RIDGE = 0.01
SWEEPS = 4
COLD_STEPS = 8
"""Until so many steps were seen nothing counts as an outlier."""
OUTLIER = 4.0
"""A step that took so many times what was predicted counts as that much and no more: a stall is not the
model's cost, and if it is, a few such steps get there."""


@dataclass(frozen=True, slots=True)
class StepWork:
    prompt_tokens: int = 0
    decodes: int = 0
    context_tokens: int = 0
    """Positions before those that are computed, over all items."""
    moved_blocks: int = 0
    """Swapped or copied."""
    guesses: int = 0


SCALES = (1.0, 256.0, 16.0, 16_384.0, 16.0, 16.0)
"""So that all features are of the order of one."""
COLD_S = (0.002, 2e-4, 2e-4, 1e-7, 1e-4, 2e-4)
"""Before the first step: a small model on a few cores. Wrong by any factor, it is forgotten at once."""


class StepTimeModel:
    def __init__(self) -> None:
        size = len(SCALES)
        self._theta = [cold_s * scale for cold_s, scale in zip(COLD_S, SCALES, strict=True)]
        self._a = [[0.0] * size for _ in range(size)]
        self._y = [0.0] * size
        self.step_count = 0
        self.has_seen_prompt = False
        """Whether the cost of prompt tokens is more than a guess."""

    def predict_s(self, work: StepWork) -> float:
        return sum(t * x for t, x in zip(self._theta, _features(work), strict=True))

    @property
    def prompt_token_s(self) -> float:
        return self._theta[1] / SCALES[1]

    @property
    def moved_block_s(self) -> float:
        return self._theta[4] / SCALES[4]

    @property
    def guess_s(self) -> float:
        """One more guess to verify."""
        return self._theta[5] / SCALES[5]

    def prompt_tokens_within(self, limit_s: float, beside: StepWork) -> int:
        """How many prompt tokens may be computed beside that, so that the step takes `limit_s`."""
        left_s = limit_s - self.predict_s(beside)
        return int(left_s / max(self.prompt_token_s, 1e-9)) if left_s > 0 else 0

    def prompt_s(self, start: int, end: int, *, chunk_tokens: int) -> float:
        """Computing positions [start, end) of one prompt, with nobody beside it."""
        count = max(0, end - start)
        step_count = -(-count // chunk_tokens)
        context_tokens = step_count * start + chunk_tokens * step_count * (step_count - 1) // 2
        one_step_s = self._theta[0]
        return step_count * one_step_s + (
            self.predict_s(StepWork(prompt_tokens=count, context_tokens=context_tokens)) - one_step_s
        )

    def saw(self, work: StepWork, elapsed_s: float) -> None:
        if self.step_count >= COLD_STEPS:
            elapsed_s = min(elapsed_s, OUTLIER * self.predict_s(work))
        self.step_count += 1
        self.has_seen_prompt |= work.prompt_tokens > 0
        features = _features(work)
        for row, x in zip(self._a, features, strict=True):
            for j, other in enumerate(features):
                row[j] = FORGET * row[j] + x * other
        self._y = [FORGET * y + x * elapsed_s for y, x in zip(self._y, features, strict=True)]
        for _ in range(SWEEPS):
            self._sweep()

    def _sweep(self) -> None:
        theta = self._theta
        for i, row in enumerate(self._a):
            explained = sum(a * t for a, t in zip(row, theta, strict=True)) - row[i] * theta[i]
            best = (self._y[i] - explained + RIDGE * theta[i]) / (row[i] + RIDGE)
            theta[i] = max(0.0, best)


def _features(work: StepWork) -> tuple[float, ...]:
    return (
        1.0,
        work.prompt_tokens / SCALES[1],
        work.decodes / SCALES[2],
        work.context_tokens / SCALES[3],
        work.moved_blocks / SCALES[4],
        work.guesses / SCALES[5],
    )
