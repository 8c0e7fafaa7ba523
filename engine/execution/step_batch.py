"""One step's items as the model takes them: a flat batch of tokens, and the rows somebody wants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from baton.core.ids import SeqKey
from baton.core.steps import PENDING_TOKEN, StepItem, StepPlan
from engine.kernels.interface import BatchLayout, Span
from engine.sampling.sampler import SampleRequest


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows whose next token is known and part of the prompt."""

    item: int
    tokens: tuple[int, ...]
    """The token that follows each of the rows."""
    top_count: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Rows come in this order: those that are sampled from, those of embeddings, those of prompts."""

    layout: BatchLayout
    tokens: list[int]
    """Tokens of the step, in the layout's order."""
    rows: list[int]
    sampling: list[tuple[int, SampleRequest]]
    """(item, request); 1 + len(drafts) rows each."""
    embedding_items: list[int]
    """One row each."""
    prompts: list[PromptRows]

    @property
    def sampled_row_count(self) -> int:
        return sum(1 + len(request.drafts) for _, request in self.sampling)

    @classmethod
    def of(
        cls,
        items: Sequence[StepItem],
        spans: Sequence[Span],
        last_sampled: Callable[[SeqKey], int],
    ) -> "StepBatch":
        layout = BatchLayout.of(spans)
        batch = cls(layout, [], [], [], [], [])
        embedding_rows: list[int] = []
        prompt_rows: list[int] = []
        for index in layout.order:
            item = items[index]
            start = len(batch.tokens)
            tokens = item.tokens
            if tokens[0] == PENDING_TOKEN:
                tokens = (last_sampled(item.key), *tokens[1:])
            batch.tokens.extend(tokens)
            end = len(batch.tokens)
            if item.wants_embedding:
                batch.embedding_items.append(index)
                embedding_rows.append(end - 1)
            elif item.sample_index is not None:
                batch.rows.extend(range(end - 1 - item.draft_count, end))
                batch.sampling.append((index, _request(item, tokens, item.sample_index)))
            if item.sampling.prompt_logprobs is not None:
                following = _following(item, tokens)
                if following:
                    batch.prompts.append(PromptRows(index, following, item.sampling.prompt_logprobs))
                    prompt_rows.extend(range(start, start + len(following)))
        batch.rows.extend(embedding_rows)
        batch.rows.extend(prompt_rows)
        return batch


def _request(item: StepItem, tokens: tuple[int, ...], index: int) -> SampleRequest:
    drafts = tokens[len(tokens) - item.draft_count :] if item.draft_count else ()
    return SampleRequest(item.key, item.sampling, index, drafts, item.history, item.prompt_token_count)


def _following(item: StepItem, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The prompt tokens after each of the item's, as far as they are known."""
    known = tokens[1:] if item.next_prompt_token is None else (*tokens[1:], item.next_prompt_token)
    return known[: max(0, item.prompt_token_count - item.first_position - 1)]


@dataclass(frozen=True, slots=True)
class AheadStep:
    """The tokens of a step that the device may still compute."""

    chosen: Tensor
    """int64 [n], in host memory: the tokens of those that sample, once `done` has happened."""
    done: Any
    """The event after the step's last kernel and copy; None where the host itself computed it."""

    def tokens(self) -> list[int]:
        """Wait for the step's end. Any thread may call."""
        if self.done is not None:
            self.done.synchronize()
        return self.chosen.tolist()


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step that this stage has computed."""

    plan: StepPlan
    batch: StepBatch | None
    """None: there are no items, or all is `sampled`."""
    hidden: Tensor | None
    """The rows of the batch."""
    started_s: float
    context_rank_tokens: int
    sampled: tuple[int, ...] | None = None
    """The next token of each item of a step that was replayed to its end; none at a follower."""
    is_replayed: bool = False
    ahead: AheadStep | None = None
    """Set where the device may still compute the step."""
