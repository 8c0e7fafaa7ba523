"""Plans to send."""

from baton.core.ids import BlockId, SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan


def plan(number: int, item_count: int, *, block_count: int = 64) -> StepPlan:
    """A step that decodes `item_count` sequences."""
    items = tuple(
        StepItem(
            key=SeqKey(SequenceId(f"chatcmpl-{number:08x}-{i}/0"), 1),
            tokens=(1000 + i,),
            first_position=500 + number,
            block_ids=tuple(BlockId(i * block_count + b) for b in range(block_count)),
            sample_index=number,
            sampling=SamplingParams(max_tokens=256, temperature=0.7, top_p=0.9, seed=2**63 + i),
            prompt_token_count=400,
        )
        for i in range(item_count)
    )
    return StepPlan(items=items, step_number=number, ended=(SeqKey(SequenceId("gone/0"), 3),))
