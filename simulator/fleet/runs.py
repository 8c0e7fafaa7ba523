"""Steps that are alike, taken together."""

from dataclasses import dataclass
from math import ceil, sqrt

from simulator.fleet.sequence import MacroSequence

Chunk = tuple[MacroSequence, int]
"""Of whose prompt how many tokens a step computes."""


@dataclass(slots=True)
class Run:
    """Steps of one composition: one with chunks of prompts, or any number that only decode."""

    start_s: float
    count: int
    first_number: int
    """Of its first step, counted over the engine's life."""
    work: list[Chunk]
    decodes: int
    first_step_s: float
    growth_s: float
    """How much longer each step takes than the one before it."""
    plans_ahead: bool
    """The step after it was planned when its last one began."""
    version: int

    def seconds(self, count: int) -> float:
        """Of its first `count` steps."""
        return count * self.first_step_s + self.growth_s * count * (count - 1) / 2

    def step_at(self, elapsed_s: float) -> int:
        """Number, from 1, of the step under way then."""
        if self.count == 1:
            return 1
        if self.growth_s <= 0:
            steps = elapsed_s / self.first_step_s
        else:
            b = self.first_step_s - self.growth_s / 2
            steps = (sqrt(b * b + 2 * self.growth_s * elapsed_s) - b) / self.growth_s
        return min(self.count, max(1, ceil(steps - 1e-9)))
