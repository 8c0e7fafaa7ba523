"""Fits the parameters of a trace: when requests arrive, how long they are, what they share. Pure."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from baton.core.errors import SetupError
from loadgen.arrivals import spread_ticks
from loadgen.formats.base import Trace
from loadgen.synth.fit_arrivals import fit_arrivals
from loadgen.synth.lineage import Descent, Kind, descents
from loadgen.synth.params import Branches, FitSource, Head, LengthModel, Quantiles, SynthParams, Turns

REQUESTS_MIN = 50
TURN_DEPTH = 6
LENGTH_BINS = 8
FIT_ROUNDS = 50


def spread_trace(trace: Trace, *, seed: int = 0) -> Trace:
    """The trace with its arrivals spread inside its ticks, as a replay sends them."""
    instants_s = spread_ticks([r.at_s for r in trace.requests], tick_s=trace.tick_s, seed=seed)
    requests = (replace(r, at_s=at_s) for r, at_s in zip(trace.requests, instants_s, strict=True))
    return replace(trace, requests=tuple(requests))


def fit(trace: Trace, *, source: FitSource | None = None) -> SynthParams:
    """Raises SetupError if the trace is too short to fit."""
    if len(trace.requests) < REQUESTS_MIN:
        raise SetupError(f"{len(trace.requests)} requests are too few to fit; at least {REQUESTS_MIN}")
    trace = spread_trace(trace)
    requests = trace.requests
    found, head_blocks = descents(trace)
    made = source or FitSource()
    span_s = requests[-1].at_s - requests[0].at_s
    fresh = [i for i, d in enumerate(found) if d.kind is Kind.FRESH]
    return SynthParams(
        source=replace(made, requests=len(requests), duration_s=round(span_s, 1)),
        arrivals=fit_arrivals([r.at_s for r in requests]),
        block_tokens=trace.hash_block_tokens,
        input_tokens_max=max(r.input_tokens for r in requests),
        heads=_heads(found, head_blocks),
        fresh=_lengths([requests[i].input_tokens for i in fresh], [requests[i].output_tokens for i in fresh]),
        turns=_turns(trace, found),
        branches=_branches(trace, found),
    )


def _heads(found: Sequence[Descent], head_blocks: Sequence[int]) -> tuple[Head, ...]:
    fresh = [d for d in found if d.kind is Kind.FRESH]
    counts = Counter(d.head for d in fresh)
    return tuple(
        Head(round(counts[number] / len(fresh), 4), blocks)
        for number, blocks in enumerate(head_blocks)
        if counts[number]
    )


def _lengths(inputs: Sequence[float], outputs: Sequence[float]) -> LengthModel:
    return LengthModel(Quantiles.of(inputs), Quantiles.of(outputs), _correlation(inputs, outputs))


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of the Gaussian copula with the same rank correlation (Pearson: 2 sin(pi/6 rank))."""
    if len(a) < 3:
        return 0.0
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    if ranks_a.std() == 0 or ranks_b.std() == 0:
        return 0.0
    rank = float(np.corrcoef(ranks_a, ranks_b)[0, 1])
    return round(2 * float(np.sin(np.pi / 6 * rank)), 4)


def _ranks(sample: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The ranks of a sample; ties have the mean of their ranks."""
    _, places, counts = np.unique(np.asarray(sample), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places]


def _share(trace: Trace, chosen: Sequence[int], lags_s: Sequence[float]) -> float:
    """A share of requests as in the middle of a long trace. Near the start of a trace there is nothing to go
    back to."""
    sorted_lags = np.sort(np.asarray(lags_s))
    at_s = np.array([r.at_s for r in trace.requests]) - trace.requests[0].at_s
    possible = np.searchsorted(sorted_lags, at_s, side="right").sum() / max(1, len(sorted_lags))
    return round(min(0.99, len(chosen) / max(1.0, float(possible))), 5)


def _turns(trace: Trace, found: Sequence[Descent]) -> Turns | None:
    """None if no request is continued."""
    requests = trace.requests
    turns = [i for i, d in enumerate(found) if d.kind is Kind.TURN]
    if len(turns) < 3:
        return None
    pairs = [(i, parent) for i in turns if (parent := found[i].parent) is not None]
    lags_s = [requests[i].at_s - requests[p].at_s for i, p in pairs]
    repeats = [i for i, p in pairs if _grown(trace, i, p) == 0]
    growing = [(i, p) for i, p in pairs if _grown(trace, i, p) > 0]
    parents = Counter(p for _, p in pairs)
    depth = [0] * len(requests)
    for i, p in pairs:
        depth[i] = depth[p] + 1
    blocks = [_blocks(trace, i) for i in range(len(requests))]
    ends = sorted(set(np.quantile(blocks, np.arange(1, LENGTH_BINS) / LENGTH_BINS).astype(int).tolist()))
    by_turn, by_length = _chances(
        [min(d, TURN_DEPTH - 1) for d in depth],
        [bisect_left(ends, b) for b in blocks],
        parents,
        len(ends) + 1,
    )
    return Turns(
        share=_share(trace, turns, lags_s),
        lag_s=Quantiles.of(lags_s),
        growth=_lengths(
            [_grown(trace, i, p) for i, p in growing], [requests[i].output_tokens for i, _ in growing]
        ),
        repeat=round(len(repeats) / len(turns), 5),
        shared=round(1 - len(parents) / len(pairs), 5),
        by_turn=by_turn,
        by_length=by_length,
        length_blocks=tuple(ends),
    )


def _grown(trace: Trace, i: int, parent: int) -> int:
    return max(0, trace.requests[i].input_tokens - trace.requests[parent].input_tokens)


def _blocks(trace: Trace, i: int) -> int:
    """Blocks of a prompt; without prefixes, units of 100 tokens, which describe a length just as well."""
    return -(-trace.requests[i].input_tokens // (trace.hash_block_tokens or 100))


def _chances(
    turns: Sequence[int], lengths: Sequence[int], parents: Counter[int], length_bins: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Chances to be continued, by turn and by length, whose product gives the measured shares of each bin of
    both (iterative proportional fitting). They are relative to the largest."""
    seen = np.zeros((TURN_DEPTH, length_bins))
    continued = np.zeros_like(seen)
    for i, cell in enumerate(zip(turns, lengths, strict=True)):
        seen[cell] += 1
        continued[cell] += i in parents
    # A bin with few requests is uncertain, so it is pulled towards the mean with the weight of ten requests.
    mean = continued.sum() / seen.sum()
    seen_t, seen_l = seen.sum(axis=1), seen.sum(axis=0)
    wanted_t = (continued.sum(axis=1) + 10 * mean) / (seen_t + 10) * seen_t
    wanted_l = (continued.sum(axis=0) + 10 * mean) / (seen_l + 10) * seen_l
    by_turn, by_length = np.ones(TURN_DEPTH), np.full(length_bins, mean)
    for _ in range(FIT_ROUNDS):
        by_turn *= wanted_t / np.maximum(by_turn * (seen @ by_length), 1e-12)
        by_length *= wanted_l / np.maximum(by_length * (by_turn @ seen), 1e-12)
    return _relative(by_turn), _relative(by_length)


def _relative(chances: "np.ndarray[Any, np.dtype[np.float64]]") -> tuple[float, ...]:
    known = np.where(chances > 0, chances, chances.max())  # a bin without requests
    return tuple(round(float(c), 4) for c in known / known.max())


def _branches(trace: Trace, found: Sequence[Descent]) -> Branches | None:
    """None if there are no branches."""
    requests = trace.requests
    chosen = [(i, d, p) for i, d in enumerate(found) if d.kind is Kind.BRANCH and (p := d.parent) is not None]
    if len(chosen) < 3:
        return None
    lags_s = [requests[i].at_s - requests[p].at_s for i, _, p in chosen]
    kept = [d.shared / max(1, found[p].blocks) for _, d, p in chosen]
    return Branches(
        share=_share(trace, [i for i, _, _ in chosen], lags_s),
        lag_s=Quantiles.of(lags_s),
        kept=Quantiles.of(kept),
        lengths=_lengths(
            [requests[i].input_tokens for i, _, _ in chosen],
            [requests[i].output_tokens for i, _, _ in chosen],
        ),
    )
