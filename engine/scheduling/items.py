"""Translation of the scheduler's decisions into the plan that the executor receives."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from baton.core.costs import prompt_pairs
from baton.core.geometry import blocks_for
from baton.core.messages import Task
from baton.core.steps import PENDING_TOKEN, StepItem, StepPlan
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_time import StepWork
from engine.scheduling.tables import Moves


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step."""

    sequence: Sequence
    count: int
    """Tokens from `planned_count` on, draft tokens left out."""
    drafts: tuple[int, ...] = ()

    @property
    def token_count(self) -> int:
        return self.count + len(self.drafts)


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step under way."""

    plan: StepPlan
    sequences: list[Sequence]
    """Sequence of each item."""
    moves: Moves
    work: StepWork
    predicted_s: float


def work_of(work: Ordered[Work], moved_blocks: int = 0) -> StepWork:
    """Cost inputs of the step. Call it before `planned_count` is moved on."""
    prompt_tokens = decodes = context_tokens = drafts = pairs = 0
    for one in work:
        start = one.sequence.planned_count
        drafts += len(one.drafts)
        if one.count == 1:
            decodes += 1
            context_tokens += start
        else:
            prompt_tokens += one.count
            pairs += prompt_pairs(start, start + one.count)
    return StepWork(prompt_tokens, decodes, context_tokens, moved_blocks, drafts, pairs)


def item_of(work: Work, *, gives_history: bool, want_drafts: int = 0) -> StepItem:
    """The item of the sequence's next `count` tokens and the draft tokens that follow them."""
    seq, start = work.sequence, work.sequence.planned_count
    end = start + work.count
    known_count = len(seq.tokens)
    is_last = end == known_count + seq.sampling_count
    samples = is_last and seq.task is Task.GENERATE
    tokens = (PENDING_TOKEN,) if start == known_count else tuple(seq.tokens[start:end])
    follows = end < seq.prompt_token_count and seq.lacks_prompt_logprobs
    table_end = end + len(work.drafts)
    return StepItem(
        key=seq.key,
        tokens=tokens + work.drafts,
        first_position=start,
        block_ids=tuple(seq.block_ids[: blocks_for(table_end, seq.block_tokens)]),
        sample_index=seq.generated_count + seq.sampling_count if samples else None,
        sampling=seq.sampling,
        draft_count=len(work.drafts),
        prompt_token_count=seq.prompt_token_count,
        history=tuple(seq.tokens) if gives_history and samples else None,
        want_drafts=want_drafts if samples else 0,
        next_prompt_token=seq.tokens[end] if follows else None,
        adapter=seq.adapter,
        wants_embedding=is_last and seq.task is Task.EMBED,
    )
