"""The kernels a model is built from, and the batch they work on.

A batch is flat: the tokens of all its sequences one after another, T in total, each sequence with
its own context length and block table. Single-token sequences (decodes) come first, ordered by
context length, then the chunks of several tokens; `BatchLayout.of` puts them so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's tokens in the batch."""

    first_position: int
    token_count: int
    block_ids: tuple[int, ...]
    """Exactly the blocks that cover positions 0 … first_position + token_count - 1."""

    @property
    def context_tokens(self) -> int:
        """Positions to attend to, from the last token's view."""
        return self.first_position + self.token_count


@dataclass(frozen=True, slots=True)
class BatchLayout:
    spans: tuple[Span, ...]
    order: tuple[int, ...]
    """spans[i] is the caller's item order[i]."""

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "BatchLayout":
        order = sorted(
            range(len(spans)), key=lambda i: (spans[i].token_count > 1, spans[i].context_tokens, i)
        )
        return cls(tuple(spans[i] for i in order), tuple(order))

    @property
    def decode_count(self) -> int:
        return sum(span.token_count == 1 for span in self.spans)

    @property
    def token_count(self) -> int:
        return sum(span.token_count for span in self.spans)

    def positions(self) -> npt.NDArray[np.int64]:
        """Of every token in its sequence, [T]."""
        ranges = [np.arange(s.first_position, s.context_tokens, dtype=np.int64) for s in self.spans]
        return np.concatenate(ranges)


Plan = TypeVar("Plan")


class Kernels(Protocol[Plan]):
    """Bound to one KV pool. Tensors are on the pool's device, in the model's dtype unless noted.

    T tokens, H query heads, K key-value heads, D head dim, P positions per block.
    """

    def plan(self, layout: BatchLayout, cos: Tensor, sin: Tensor, *, windows: frozenset[int]) -> Plan:
        """What all layers of one step need, computed once. cos, sin: float32 [T, D / 2], see
        `rope.Frequencies`. windows: those that occur in `ModelSpec.windows`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension; statistics in fp32."""
        ...

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up. May overwrite its arguments."""
        ...

    def rotate_and_store(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, plan: Plan) -> Tensor:
        """Rotate q [T, H, D] and k [T, K, D] (dimension i is paired with i + D / 2, as in GPT-NeoX),
        write k and v to their positions in the pool, return q ready for `attention`."""
        ...

    def attention(self, q: Tensor, *, layer: int, window: int, plan: Plan) -> Tensor:
        """Causal attention of q (from `rotate_and_store`) to its sequence's positions in the pool.
        Softmax in fp32. Returns [T, H, D]."""
        ...

    def gather_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """Copy whole blocks out: uint8 [n, block_bytes] on the pool's device."""
        ...

    def scatter_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        """The inverse of `gather_blocks`."""
        ...
