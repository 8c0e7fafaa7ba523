"""Steps that are alike, taken together."""

from dataclasses import dataclass
from math import ceil, sqrt

from simulator.fleet.sequence import MacroSequence

Chunk = tuple[MacroSequence, int]
"""A sequence, and how many tokens of its prompt a step computes."""


@dataclass(slots=True)
class StepRun:
    """Steps of one composition: one with chunks of prompts, or any number that only decode."""

    start_s: float
    count: int
    first_number: int
    """Number of the first step, counted over the engine's life."""
    work: list[Chunk]
    decodes: int
    first_step_s: float
    growth_s: float
    """Time by which each step takes longer than the one before it."""
    plans_ahead: bool
    """The step after the run was planned when the run's last one began."""
    version: int
    pause_s: float = 0.0
    """Time in which nothing is computed, such as that without some experts."""

    def seconds(self, count: int) -> float:
        """Return the time of the first `count` steps."""
        return self.pause_s + count * self.first_step_s + self.growth_s * count * (count - 1) / 2

    def step_at(self, elapsed_s: float) -> int:
        """Return the number, from 1, of the step under way after `elapsed_s`."""
        if self.count == 1 or elapsed_s <= 0:
            return 1
        if self.growth_s <= 0:
            steps = elapsed_s / self.first_step_s
        else:
            b = self.first_step_s - self.growth_s / 2
            steps = (sqrt(b * b + 2 * self.growth_s * elapsed_s) - b) / self.growth_s
        return min(self.count, max(1, ceil(steps - 1e-9)))
