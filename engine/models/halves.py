"""A batch as two halves that are computed in turn (two-batch overlap, as in DeepSeek-V3, arXiv 2412.19437
section 3.4): one half's attention runs while the other half's rows are with experts elsewhere."""

from typing import Generic

from torch import Tensor

from engine.kernels.interface import BatchLayout, Plan, Span
from engine.models.linear import StepContext
from engine.models.mlp import Finish

OVERLAP_ROWS_MIN = 32
"""Rows that each expert has to have on average. With few rows an expert's time is that of reading its
weights, which two halves read twice."""
PART_TOKENS_MIN = 2
"""Parts of chunks are chunks: a single token would have to come before them."""


class HalfBatch(Generic[Plan]):
    """One half between two layers."""

    def __init__(self, hidden: Tensor, step: StepContext[Plan], rows: Tensor) -> None:
        """hidden [T, hidden]: the half's rows. rows: those that are asked for after the last layer."""
        self._hidden, self.step, self.rows = hidden, step, rows
        self.rest: Finish | None = None
        """What is left of the layer that was begun last."""

    def collect(self) -> Tensor:
        """The hidden states after the layer that was begun last."""
        if self.rest is not None:
            self._hidden, self.rest = self.rest(), None
        return self._hidden


def halves_of(layout: BatchLayout, block_tokens: int) -> tuple[BatchLayout, BatchLayout] | None:
    """Divide a batch into two of about as many tokens, in the same order. A chunk may be divided too: its
    second part attends to the first, which is computed before it in every layer. None: it cannot be divided.
    """
    middle, done = layout.token_count // 2, 0
    first: list[Span] = []
    second: list[Span] = []
    for span in layout.spans:
        count = min(span.token_count, max(0, middle - done))
        done += span.token_count
        if 0 < count < span.token_count and min(count, span.token_count - count) < PART_TOKENS_MIN:
            count = 0 if first else span.token_count
        if count == span.token_count:
            first.append(span)
        elif not count:
            second.append(span)
        else:
            first.append(span.cut(0, count, block_tokens=block_tokens))
            second.append(span.cut(count, span.token_count, block_tokens=block_tokens))
    return (_in_order(first), _in_order(second)) if first and second else None


def _in_order(spans: list[Span]) -> BatchLayout:
    return BatchLayout(tuple(spans), tuple(range(len(spans))))
