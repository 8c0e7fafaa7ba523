"""The division of a step's tokens over the context ranks of a worker: plain arithmetic, alike on every rank.

The chunk of a long prompt is cut into twice as many pieces as there are ranks, and a rank computes the piece
that is as far from the front as its other one is from the end (zigzag, as in arXiv 2407.21783 section 3.3.2).
The cost of a token rises evenly with its position, so each rank has the same work in every layer, whatever a
token and a position cost there. Sequences that are too short for that stay whole: they are given out one by
one, the dearest first, to the rank with the least work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.core.costs import prompt_pairs
from engine.kernels.interface import BatchLayout, Span

Places = npt.NDArray[np.int64]
"""Indices of tokens, or of rows, in a step's batch."""

PIECE_TOKENS_MIN = 8
"""Fewest tokens of a piece: a shorter chunk stays whole."""
RANK_COST_MIN = 16.0
"""Least work, in tokens of a prompt, for each rank that takes part in a step. Every one of them reads the
weights, which costs about as much."""
KV_READ_TOKENS = 6
"""The KV before a sequence costs as much to read as this number of its tokens that attend to it. Fewer tokens
are bound by that."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """The tokens of a step that one rank computes."""

    layout: BatchLayout
    places: Places
    """Place of each of its tokens in the step's batch."""


@dataclass(frozen=True, slots=True)
class StepDivision:
    batches: tuple[RankBatch, ...]
    """One for each context rank, in order."""
    has_cuts: bool
    """True if ranks read KV in a layer that others write in the same step."""

    @property
    def is_divided(self) -> bool:
        """False if rank 0 computes everything."""
        return any(len(batch.places) for batch in self.batches[1:])

    @property
    def other_token_count(self) -> int:
        """Number of tokens that others than rank 0 compute."""
        return sum(len(batch.places) for batch in self.batches[1:])


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows of a step's batch that somebody wants, by the rank that computes them."""

    by_rank: tuple[Places, ...]
    """Their places in each rank's own batch."""
    order: Places
    """The ranks' rows one after another are rows order[0], order[1], … of those that are wanted."""


def divide_step(layout: BatchLayout, ranks: int, *, block_tokens: int, pair_cost: float) -> StepDivision:
    """pair_cost: cost of a token for each position before it, a token itself having the cost 1."""
    work = sum(_cost(span, pair_cost) for span in layout.spans)
    active = max(1, min(ranks, int(work / RANK_COST_MIN)))
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    firsts: list[list[int]] = [[] for _ in range(ranks)]
    costs = [0.0] * active
    whole: list[tuple[float, int, Span]] = []
    has_cuts = False
    first = 0
    for span in layout.spans:
        if active > 1 and span.token_count >= 2 * active * PIECE_TOKENS_MIN:
            has_cuts = True
            for rank, start, end in _pieces(span.token_count, active):
                piece = span.cut(start, end, block_tokens=block_tokens)
                spans[rank].append(piece)
                firsts[rank].append(first + start)
                costs[rank] += _cost(piece, pair_cost)
        else:
            whole.append((_cost(span, pair_cost), first, span))
        first += span.token_count
    for cost, place, span in sorted(whole, key=lambda one: (-one[0], one[1])):
        rank = costs.index(min(costs))
        spans[rank].append(span)
        firsts[rank].append(place)
        costs[rank] += cost
    batches = tuple(_batch(*one) for one in zip(spans, firsts, strict=True))
    return StepDivision(batches, has_cuts)


def wanted_rows(division: StepDivision, rows: Places) -> WantedRows:
    """rows: places in the step's batch."""
    token_count = sum(len(batch.places) for batch in division.batches)
    owners, own_places = np.empty((2, token_count), dtype=np.int64)
    for rank, batch in enumerate(division.batches):
        owners[batch.places] = rank
        own_places[batch.places] = np.arange(len(batch.places))
    row_owners = owners[rows]
    by_rank = tuple(own_places[rows[row_owners == rank]] for rank in range(len(division.batches)))
    return WantedRows(by_rank, np.argsort(row_owners, kind="stable"))


def _pieces(count: int, ranks: int) -> list[tuple[int, int, int]]:
    """(rank, start, end) of each piece of a chunk. The last rank's two are one."""
    cuts = [count * i // (2 * ranks) for i in range(2 * ranks + 1)]
    last = ranks - 1
    pieces = [(last, cuts[last], cuts[last + 2])]
    for rank in range(last):
        pieces += [(rank, cuts[rank], cuts[rank + 1]), (rank, cuts[-rank - 2], cuts[-rank - 1])]
    return pieces


def _cost(span: Span, pair_cost: float) -> float:
    pairs = prompt_pairs(span.first_position, span.context_tokens)
    return span.token_count + pair_cost * max(pairs, KV_READ_TOKENS * span.first_position)


def _batch(spans: Sequence[Span], firsts: Sequence[int]) -> RankBatch:
    layout = BatchLayout.of(spans)
    ranges = [
        np.arange(firsts[index], firsts[index] + spans[index].token_count, dtype=np.int64)
        for index in layout.order
    ]
    return RankBatch(layout, np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64))
