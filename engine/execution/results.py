"""This module turns the rows that a step computed into the results of its items."""

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from baton.core.ids import SeqKey
from baton.core.steps import NOTHING_SAMPLED, ItemResult, StepItem
from engine.execution.prompt_rows import pieces, prompt_logprobs
from engine.execution.step_batch import AheadStep, StepBatch
from engine.sampling.sampler import Sampler

Logits = Callable[[Tensor], Tensor]
"""Final hidden states [n, hidden] -> float32 [n, vocab]."""


def item_results(
    sampler: Sampler, logits: Logits, item_count: int, batch: StepBatch, hidden: Tensor, vocab: int
) -> tuple[ItemResult, ...]:
    """Sample, and collect what else the items ask for. hidden: the batch's rows."""
    results = [NOTHING_SAMPLED] * item_count
    sampled_end = batch.sampled_row_count
    embedded_end = sampled_end + len(batch.embedding_items)
    if batch.sampling:
        rows = hidden if sampled_end == len(hidden) else hidden[:sampled_end]
        sampled = sampler.sample(logits(rows), [request for _, request in batch.sampling])
        for (item, _), one in zip(batch.sampling, sampled, strict=True):
            results[item] = ItemResult(one.tokens, one.logprobs)
    if batch.embedding_items:
        vectors = hidden[sampled_end:embedded_end].float().tolist()
        for item, vector in zip(batch.embedding_items, vectors, strict=True):
            results[item] = ItemResult(embedding=tuple(vector))
    start = embedded_end
    for prompt in batch.prompts:
        end = start + len(prompt.tokens)
        logprobs = prompt_logprobs(logits, hidden[start:end], prompt, vocab)
        results[prompt.item] = msgspec.structs.replace(results[prompt.item], prompt_logprobs=logprobs)
        start = end
    return tuple(results)


def ahead_results(
    items: Sequence[StepItem], batch: StepBatch, step: AheadStep
) -> tuple[tuple[ItemResult, ...], dict[SeqKey, int]]:
    """Wait for a step that was begun ahead. Returns the results, and the token of each sequence that
    sampled."""
    results = [NOTHING_SAMPLED] * len(items)
    last: dict[SeqKey, int] = {}
    for (index, _), token in zip(batch.sampling, step.tokens(), strict=True):
        results[index] = ItemResult((token,))
        last[items[index].key] = token
    return tuple(results), last


def follow(logits: Logits, batch: StepBatch, hidden: Tensor, vocab: int) -> None:
    """Compute this rank's part of the logits that the leader asks for in `item_results`, in its order."""
    start = batch.sampled_row_count
    if batch.sampling:
        logits(hidden[:start])
    start += len(batch.embedding_items)
    for prompt in batch.prompts:
        for rows in pieces(len(prompt.tokens), vocab):
            logits(hidden[start + rows.start : start + rows.stop])
        start += len(prompt.tokens)
