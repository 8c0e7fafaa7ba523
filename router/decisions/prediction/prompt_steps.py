"""The steps in which a worker computes prompts beside sequences that decode there."""

from typing import NamedTuple

from baton.core.chunks import TOKEN_S_MIN, room_s
from baton.core.costs import StepCosts
from router.decisions.cluster.snapshot import WorkerFacts


class PromptSteps(NamedTuple):
    """Steps that are full of prompts: each has as many of their tokens as fit, and as much of their time as
    the objectives of the sequences that decode leave (`baton.core.chunks`)."""

    costs: StepCosts
    step_s: float
    """Seconds of a step without its prompts."""
    room_s: float
    """Seconds that prompts may take in a step; infinite without an objective."""
    tokens_max: int
    tokens_min: int
    """Tokens that a step has at least, whatever they take."""

    def full_steps(self, tokens: float, work_s: float) -> float:
        """Return the number of steps for so many tokens that take `work_s`, as if all steps were bound by
        the same: by the number of tokens, or by the time."""
        return max(tokens / self.tokens_max, min(work_s / self.room_s, tokens / self.tokens_min))

    def seconds(self, tokens: float, pairs: float) -> float:
        """Return the seconds of all steps that such tokens take, what decodes beside them included."""
        work_s = self.costs.prompts_s(tokens, pairs)
        steps = self.full_steps(tokens, work_s)
        return max(steps * self.costs.floor_s, steps * self.step_s + work_s)

    def longest_s(self, position: float = 0.0) -> float:
        """Return the seconds that tokens at `position` in the mean add to a full step."""
        token_s = self.costs.prompts_s(1, position)
        return min(max(self.room_s, token_s * self.tokens_min), token_s * self.tokens_max)


def prompt_steps(
    facts: WorkerFacts, costs: StepCosts, *, decoding: float, slo_s: float, step_s: float
) -> PromptSteps:
    """Return the steps of a worker at which `decoding` sequences decode, in steps of `step_s` without
    prompts, and have `slo_s` as their strictest objective (0: none)."""
    tokens_max = max(1, facts.step_tokens_max - int(decoding))
    tokens_min = min(tokens_max, max(1, facts.chunk_tokens_min))
    seconds = max(room_s(slo_s, step_s, floor_s=costs.floor_s), TOKEN_S_MIN)
    return PromptSteps(costs, step_s, seconds, tokens_max, tokens_min)
