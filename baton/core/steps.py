"""What the scheduler asks the executor to compute, and what it gets back. Both are plain values, so
the same scheduler drives torch in a worker and a cost model in the simulator."""

import msgspec

from baton.core.ids import SeqKey
from baton.core.sampling import SamplingParams


class StepItem(msgspec.Struct, frozen=True):
    """The tokens of one sequence in one step: a chunk of its prompt, or its newest token."""

    key: SeqKey
    tokens: tuple[int, ...]
    """Input token ids of positions first_position … first_position + len(tokens) - 1."""
    first_position: int
    """Positions before it are in the KV pool already."""
    block_ids: tuple[int, ...]
    """The sequence's block table; covers at least first_position + len(tokens) positions."""
    sample_index: int | None
    """Generated index of the token to sample after the last input token; None: do not sample."""
    sampling: SamplingParams


class StepPlan(msgspec.Struct, frozen=True):
    items: tuple[StepItem, ...]
    step_number: int

    @property
    def token_count(self) -> int:
        return sum(len(item.tokens) for item in self.items)


class StepResult(msgspec.Struct, frozen=True):
    step_number: int
    sampled: tuple[int | None, ...]
    """One entry per item of the plan, in its order; None where the item did not ask to sample."""
    elapsed_s: float
