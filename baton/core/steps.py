"""What the scheduler asks the executor to compute, and what it gets back.

Both are plain values, so the same scheduler drives torch in a worker and a cost model in the simulator.
"""

from typing import Annotated

import msgspec

from baton.core.ids import SeqKey
from baton.core.sampling import SamplingParams
from baton.core.wire_types import Columns

PENDING_TOKEN = -1
"""An item's only token may be this one: it stands for what the step before samples for the sequence. It lets
a step be planned and handed over while the one before it still runs."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural logarithms of one position's probabilities."""

    token: int
    logprob: float
    rank: int
    """The rank of `token` among all tokens; 1 is the most likely."""
    top: Annotated[tuple[tuple[int, float], ...], Columns("ids", "logprobs")] = ()
    """(token, logprob) of as many tokens as were asked for, the most likely one first."""


class StepItem(msgspec.Struct, frozen=True):
    """The tokens of one sequence in one step.

    They are a chunk of its prompt, or its newest token, or its newest token and draft tokens that may follow
    it (speculative decoding).
    """

    key: SeqKey
    tokens: tuple[int, ...]
    """The input token ids of positions first_position … first_position + len(tokens) - 1."""
    first_position: int
    """The positions before this one are in the KV pool already."""
    block_ids: tuple[int, ...]
    """The sequence's block table, which covers at least first_position + len(tokens) positions."""
    sample_index: int | None
    """The generated index of the first token to sample, after token len(tokens) - 1 - draft_count; None: do
    not sample."""
    sampling: SamplingParams
    draft_count: int = 0
    """The number of draft tokens at the end of `tokens`. The executor samples after the last token that is no
    draft and after each draft that equals what was sampled before it. Drafts change speed, never tokens,
    since each draw depends on (seed, index) and its logits alone."""
    prompt_token_count: int = 0
    history: tuple[int, ...] | None = None
    """All known tokens of the sequence. It is set in the first step in which an attempt samples on this
    executor, and again after a preemption, if `sampling.needs_history` or a draft model wants it. From then
    on the executor keeps track itself, until the key appears in `StepPlan.ended`."""
    want_drafts: int = 0
    """The most draft tokens to return after the tokens sampled here, where a draft model runs. The first item
    that asks carries the `history`."""
    next_prompt_token: int | None = None
    """The prompt token that follows `tokens`, if `sampling.prompt_logprobs` wants its logprob. It is the last
    of this item's `ItemResult.prompt_logprobs`."""
    adapter: str = ""
    """The `AdapterRef.key` of a loaded LoRA adapter; empty: the base model."""
    wants_embedding: bool = False
    """Return the final hidden state of the last token (after the last norm) instead of sampling."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step. The executor performs `ended`, `swap_out`, `swap_in`, `copies`, then the items."""

    items: tuple[StepItem, ...]
    step_number: int
    copies: tuple[tuple[int, int], ...] = ()
    """(source block, destination block) of each copy on write."""
    swap_out: tuple[tuple[int, int], ...] = ()
    """(block, slot of the swap space) of each block that leaves the pool."""
    swap_in: tuple[tuple[int, int], ...] = ()
    """(slot of the swap space, block) of each block that comes back."""
    ended: tuple[SeqKey, ...] = ()
    """Attempts for which nothing kept is needed any more. One that was preempted and admitted again for this
    very step is among the items too, and begins anew there."""

    @property
    def token_count(self) -> int:
        return sum(len(item.tokens) for item in self.items)


class ItemResult(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...] = ()
    """Sampled tokens in order: none if the item did not ask, else one, and one more for each draft token that
    was accepted. None follows a token that ends the sequence."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per sampled token, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of the prompt tokens at positions first_position + 1 … first_position + len(item.tokens), as
    far as they belong to the prompt, if the request asks for them. The last one's id is
    `item.next_prompt_token`, unless the item reaches the prompt's end."""
    embedding: tuple[float, ...] = ()
    drafts: tuple[int, ...] = ()
    """Draft tokens that may follow the sampled ones, where a draft model runs."""


NOTHING_SAMPLED = ItemResult()


class StepResult(msgspec.Struct, frozen=True):
    step_number: int
    results: tuple[ItemResult, ...]
    """One result per item of the plan, in its order."""
    elapsed_s: float
    """Seconds between its beginning and its results."""
    overlap_s: float = 0.0
    """Those of them in which the step before was not done: other stages of the pipeline computed it."""
    context_rank_tokens: int = 0
    """Tokens of the step that context ranks beside the leader's have computed."""
    is_replayed: bool = False
    """Whether the step's kernels were those of a recording, called without the model's Python."""
