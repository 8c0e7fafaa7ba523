"""From logits to tokens.

Randomness is counter based: the uniform number for generated token i of a sequence with seed s is a
hash of (s, i). Nothing else enters, so a sequence continues identically in another batch, on another
worker and after a crash.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.sampling import SamplingParams

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CANDIDATES_START = 1024
"""Most likely tokens looked at first by top-p; all of them if their mass is not enough."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides one token, apart from its logits."""

    params: SamplingParams
    index: int
    """Generated index of the token."""


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit numbers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """In [0, 1): output number `index` of a SplitMix64 generator whose state is the hashed seed."""
    state = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((state + (index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """logits [R, vocab] in any float dtype; one draw per row. Each row's token depends on that row
    and its draw alone."""
    assert logits.shape[0] == len(draws)
    # In fp32: the CPU's argmax is scalar in bf16.
    logits = logits.float()
    chosen = torch.argmax(logits, dim=-1)
    random_rows = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if random_rows:
        picked = logits if len(random_rows) == len(draws) else logits[random_rows]
        chosen[random_rows] = _sample_random(picked, [draws[row] for row in random_rows])
    return chosen.tolist()


def _sample_random(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Inverse of the cumulative distribution, tokens in order of their id: with ids rather than ranks
    as the order, a logit that moves in its last bit moves the result only at the edge of an interval."""
    device = logits.device
    temperatures = torch.tensor(
        [draw.params.temperature for draw in draws], dtype=torch.float64, device=device
    )
    # The largest is 1, so no temperature overflows.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(shifted.double() / temperatures[:, None]).float()
    filtered = [
        row
        for row, draw in enumerate(draws)
        if draw.params.top_p < 1.0 or 0 < draw.params.top_k < logits.shape[-1]
    ]
    if filtered:
        kept = _keep(weights[filtered], [draws[row].params for row in filtered])
        weights[filtered] = weights[filtered] * kept
    cumulative = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    totals = cumulative[:, -1]
    numbers = [uniform(draw.params.seed, draw.index) for draw in draws]
    targets = torch.tensor(numbers, dtype=torch.float64, device=device) * totals
    targets = torch.minimum(targets, torch.nextafter(totals, torch.zeros_like(totals)))
    # Beyond the last token only if a logit is not a number; then any valid token will do.
    return torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def _keep(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """bool [R, vocab]: the top_k most likely tokens, and of those the fewest whose mass reaches top_p.

    Equally likely tokens are ranked by id, lower first, so exactly top_k are left.
    """
    row_count, vocab = weights.shape
    device = weights.device
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    totals = weights.sum(dim=-1, dtype=torch.float64)
    needs_mass = any(p.top_k <= 0 or p.top_k > _CANDIDATES_START for p in params)
    count = min(vocab, _CANDIDATES_START if needs_mass else max(p.top_k for p in params))
    while True:
        ids, sorted_weights = _most_likely(weights, count)
        ranks = torch.arange(count, device=device)
        sorted_weights = torch.where(ranks < top_k[:, None], sorted_weights.double(), 0.0)
        before = torch.cumsum(sorted_weights, dim=-1) - sorted_weights
        mass = torch.where(top_k <= count, sorted_weights.sum(dim=-1), totals)
        enough = (top_k <= count) | (before[:, -1] + sorted_weights[:, -1] >= top_p * totals)
        if count == vocab or bool(enough.all()):
            break
        count = vocab
    # A token stays while the mass of those before it has not reached top_p; the first always does.
    stays = ((before < (top_p * mass)[:, None]) | (top_p >= 1.0)[:, None]) & (ranks < top_k[:, None])
    stays[:, 0] = True
    return torch.zeros(row_count, vocab, dtype=torch.bool, device=device).scatter_(1, ids, stays)


def _most_likely(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids, weights) [R, count], by falling weight, then by rising id."""
    vocab = weights.shape[-1]
    # The bits of non-negative floats order like integers: one integer key holds weight and id.
    descending_ids = torch.arange(vocab - 1, -1, -1, device=weights.device)
    keys = (weights.view(torch.int32).long() << 32) | descending_ids
    ids = torch.topk(keys, count, dim=-1).indices
    return ids, weights.gather(1, ids)
