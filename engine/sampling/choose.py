"""One token per row of logits: greedy, or drawn from the filtered distribution."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.core.sampling import SamplingParams
from engine.devices import to_device
from engine.sampling.ranking import argmax, largest, sorted_rows
from engine.sampling.uniform import uniforms

_CANDIDATES_START = 1024
"""Most likely tokens looked at first by top-p; all of them if their mass is not enough."""
_FLOAT32 = torch.finfo(torch.float32)
_BLOCK_TOKENS = 64
"""The inverse of the cumulative distribution is looked for in sums of so many tokens first."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Values that decide one token, apart from its logits."""

    params: SamplingParams
    index: int
    """Generated index of the token."""


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """logits float32 [R, vocab]; one draw per row. Each row's token depends on that row and its draw
    alone. A row of no numbers gives some valid token."""
    return choose_tokens(logits, draws).tolist()


def choose_tokens(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`choose`, with the tokens int64 [R] on the logits' device."""
    assert logits.shape[0] == len(draws)
    random_rows = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if not random_rows:
        return argmax(logits)
    if len(random_rows) == len(draws):
        return _choose_random(logits, draws)
    chosen = argmax(logits)
    rows = to_device(torch.tensor(random_rows), logits.device)
    return chosen.index_copy(0, rows, _choose_random(logits[rows], [draws[row] for row in random_rows]))


def _choose_random(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Inverse of the cumulative distribution, tokens in order of their id: with ids rather than ranks
    as the order, a logit that moves in its last bit moves the result only at the edge of an interval."""
    vocab, device = logits.shape[-1], logits.device
    temperatures = to_device(torch.tensor([[_in_float32(draw.params.temperature)] for draw in draws]), device)
    # The largest weight is 1 whatever the temperature, so nothing overflows.
    weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures).exp_()
    numbers = to_device(torch.from_numpy(uniforms((draw.params.seed, draw.index) for draw in draws)), device)
    filtered = [row for row, draw in enumerate(draws) if _is_filtered(draw.params, vocab)]
    if not filtered:
        return _invert_blocks(weights, numbers)
    if len(filtered) == len(draws):
        return _invert_filtered(weights, numbers, [draw.params for draw in draws])
    chosen = _invert_blocks(weights, numbers)
    params = [draws[row].params for row in filtered]
    rows = to_device(torch.tensor(filtered), device)
    return chosen.index_copy(0, rows, _invert_filtered(weights[rows], numbers[rows], params))


def _in_float32(temperature: float) -> float:
    """The temperature clamped for float32, in which 0 / 0 and -inf / inf would be no numbers. At these bounds
    the limits are long reached."""
    return min(max(temperature, _FLOAT32.tiny), _FLOAT32.max)


def _is_filtered(params: SamplingParams, vocab: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab or params.min_p > 0.0


def _invert(weights: Tensor, targets: Tensor) -> Tensor:
    """int64 [R]: where the running sum of weights [R, N] passes targets float64 [R]."""
    cumulative = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    totals = cumulative[:, -1]
    # Rounding must not lead past the last weight that is not zero.
    targets = torch.minimum(targets, torch.nextafter(totals, torch.zeros_like(totals)))
    found = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    return found.clamp(max=weights.shape[-1] - 1)


def _invert_blocks(weights: Tensor, numbers: Tensor) -> Tensor:
    """The result of `_invert` at numbers [R] in [0, 1) times the row's sum, found in two levels."""
    row_count, vocab = weights.shape
    missing = -vocab % _BLOCK_TOKENS
    padded = F.pad(weights, (0, missing)) if missing else weights
    blocks = padded.view(row_count, -1, _BLOCK_TOKENS)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    ends = torch.cumsum(sums, dim=-1)
    targets = numbers * ends[:, -1]
    block = _invert(sums, targets)
    rows = torch.arange(row_count, device=weights.device)
    within = _invert(blocks[rows, block], targets - (ends[rows, block] - sums[rows, block]))
    return (block * _BLOCK_TOKENS + within).clamp(max=vocab - 1)


def _invert_filtered(weights: Tensor, numbers: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    ids, kept = _filter(weights, params)
    # Back into the order of ids. No weight is negative, so its bits fit the lower half without the sign.
    bits = kept.view(torch.int32).long() & 0x7FFF_FFFF
    by_id = sorted_rows(ids * 2**32 + bits)
    ordered = (by_id & 0x7FFF_FFFF).int().view(torch.float32)
    found = _invert(ordered, numbers * ordered.sum(dim=-1, dtype=torch.float64))
    return (by_id >> 32).gather(-1, found[:, None])[:, 0]


def _filter(weights: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """(ids int64, weights float32) [R, n] of the most likely tokens, zero where one is left out: more
    than top_k, beyond the fewest whose mass reaches top_p, less likely than min_p of the first.

    Equally likely tokens are ranked by id, lower first, so exactly top_k are left.
    """
    vocab, device = weights.shape[-1], weights.device
    ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    top_k = to_device(torch.tensor([[k] for k in ks]), device)
    shares = [[p.top_p if p.top_p < 1.0 else 2.0] for p in params]
    top_p = to_device(torch.tensor(shares, dtype=torch.float64), device)
    min_p = to_device(torch.tensor([[p.min_p] for p in params]), device)
    totals = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    count = max(k if k < vocab else min(vocab, _CANDIDATES_START) for k in ks)
    while True:
        ids, found = largest(weights, count)
        ranks = torch.arange(count, device=device)
        ends = torch.cumsum(torch.where(ranks < top_k, found, 0.0), dim=-1, dtype=torch.float64)
        # Of how much top_p is a share: what top_k leaves.
        mass = torch.where(top_k <= count, ends[:, -1:], totals)
        is_enough = (top_k <= count) | (ends[:, -1:] >= top_p * totals) | (found[:, -1:] < min_p)
        # The last question is the only one that waits for the device.
        if count == vocab or max(ks) <= count or bool(is_enough.all()):
            break
        count = vocab
    # A token stays while the mass of those before it has not reached top_p; the first always does.
    stays = (ranks < top_k) & ((ends - found) < top_p * mass) & (found >= min_p)
    stays[:, 0] = True
    return ids, torch.where(stays, found, 0.0)
