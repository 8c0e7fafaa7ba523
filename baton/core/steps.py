"""What the scheduler asks the executor to compute, and what it gets back. Both are plain values, so
the same scheduler drives torch in a worker and a cost model in the simulator."""

from typing import Annotated

import msgspec

from baton.core.ids import SeqKey
from baton.core.sampling import SamplingParams
from baton.core.wire_types import Columns

PENDING_TOKEN = -1
"""As an item's only token: "whatever the step before this one samples for this sequence". It lets a
step be planned and handed over while the one before it still runs."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural logarithms of one position's probabilities."""

    token: int
    logprob: float
    rank: int
    """Of `token` among all, 1 is the most likely."""
    top: Annotated[tuple[tuple[int, float], ...], Columns("ids", "logprobs")] = ()
    """(token, logprob) of the most likely ones, falling; as many as were asked for."""


class StepItem(msgspec.Struct, frozen=True):
    """The tokens of one sequence in one step: a chunk of its prompt, or its newest token, or its newest
    token and guesses of those that follow it (speculative decoding)."""

    key: SeqKey
    tokens: tuple[int, ...]
    """Input token ids of positions first_position … first_position + len(tokens) - 1."""
    first_position: int
    """Positions before it are in the KV pool already."""
    block_ids: tuple[int, ...]
    """The sequence's block table; covers at least first_position + len(tokens) positions."""
    sample_index: int | None
    """Generated index of the first token to sample, after token len(tokens) - 1 - draft_count; None: do
    not sample."""
    sampling: SamplingParams
    draft_count: int = 0
    """The last so many of `tokens` are guesses. The executor samples after the last token that is none
    and after each guess that equals what was sampled before it: guesses change speed, never tokens,
    since each draw depends on (seed, index) and its logits alone."""
    prompt_token_count: int = 0
    history: tuple[int, ...] | None = None
    """All known tokens of the sequence; set in the first step in which an attempt samples on this
    executor (and again after a preemption), when `sampling.needs_history` or a draft model wants it.
    From then on the executor keeps track itself, until the key appears in `StepPlan.ended`."""
    want_drafts: int = 0
    """Where a draft model runs: how many guesses of what follows the tokens sampled here to return, at
    most. The first item that asks carries the `history`."""
    next_prompt_token: int | None = None
    """The prompt token that follows `tokens`, set when `sampling.prompt_logprobs` wants its logprob: the
    last of this item's `ItemResult.prompt_logprobs`."""
    adapter: str = ""
    """`AdapterRef.key` of a loaded LoRA adapter; empty: the base model."""
    wants_embedding: bool = False
    """Return the final hidden state of the last token (after the last norm) instead of sampling."""


class StepPlan(msgspec.Struct, frozen=True):
    """Performed in this order: `ended`, `swap_out`, `swap_in`, `copies`, then the items."""

    items: tuple[StepItem, ...]
    step_number: int
    copies: tuple[tuple[int, int], ...] = ()
    """(source block, destination block): copy on write."""
    swap_out: tuple[tuple[int, int], ...] = ()
    """(block, slot of the swap space)"""
    swap_in: tuple[tuple[int, int], ...] = ()
    """(slot of the swap space, block)"""
    ended: tuple[SeqKey, ...] = ()
    """Nothing kept for these is needed any more. One that was preempted and admitted again for this very
    step is among the items too, and begins anew there."""

    @property
    def token_count(self) -> int:
        return sum(len(item.tokens) for item in self.items)


class ItemResult(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...] = ()
    """Sampled tokens in order: none if the item did not ask, else one and as many more as guesses were
    right (without any after one that ends the sequence)."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per sampled token, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens at positions first_position + 1 … first_position + len(item.tokens), as far
    as they belong to the prompt; if asked for. The last one's id is `item.next_prompt_token`, unless the
    item reaches the prompt's end."""
    embedding: tuple[float, ...] = ()
    drafts: tuple[int, ...] = ()
    """Guesses of what follows the sampled tokens, where a draft model runs."""


NOTHING_SAMPLED = ItemResult()


class StepResult(msgspec.Struct, frozen=True):
    step_number: int
    results: tuple[ItemResult, ...]
    """One per item of the plan, in its order."""
    elapsed_s: float
