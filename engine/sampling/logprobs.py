"""Log probabilities of tokens by the model's own distribution."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.core.steps import TokenLogprobs
from engine.sampling.ranking import largest


def logprobs_of(logits: Tensor, tokens: Sequence[int], top_counts: Sequence[int]) -> list[TokenLogprobs]:
    """logits float32 [R, vocab] as the model gave them; one token and one count of alternatives per row."""
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    totals = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(-1, ids)
    ranks = (logits > chosen).sum(dim=-1) + 1
    values = (chosen - totals)[:, 0].tolist()
    widest = min(max(top_counts), logits.shape[-1])
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if widest:
        top_ids, top_logits = largest(logits, widest)
        pairs = zip(top_ids.tolist(), (top_logits - totals).tolist(), strict=True)
        tops = [list(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
    return [
        TokenLogprobs(token, value, rank, tuple(top[:count]))
        for token, value, rank, top, count in zip(
            tokens, values, ranks.tolist(), tops, top_counts, strict=True
        )
    ]
