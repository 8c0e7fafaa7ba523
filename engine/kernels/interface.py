"""The kernels a model is built from, and the batch they work on.

A batch is flat: the tokens of all its sequences one after another, T in total, each sequence with
its own context length and block table. Single-token sequences (decodes) come first, ordered by
context length, then the chunks of several tokens; `BatchLayout.of` puts them so.

Three implementations: `torch_ref` (any device; the reference the others are tested against), `native`
(C++ for the CPU), `triton` (CUDA). A model runs on all three unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from baton.core.geometry import blocks_for
from engine.kernels.movable import MovableWeights
from engine.kernels.weights import ExpertMatrices, Matrix

Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]
"""The activation of a gated MLP: act(gate) * up. swiglu_oai is gpt-oss' clamped (up + 1) * gate *
sigmoid(1.702 gate), with gate <= 7 and -7 <= up <= 7."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's tokens in the batch."""

    first_position: int
    token_count: int
    block_ids: tuple[int, ...]
    """Exactly the blocks that cover positions 0 … first_position + token_count - 1."""
    adapter_slot: int = -1
    """Slot of the LoRA adapter; -1 if there is none."""

    @property
    def context_tokens(self) -> int:
        """Positions to attend to, from the last token's view."""
        return self.first_position + self.token_count

    def cut(self, start: int, end: int, *, block_tokens: int) -> "Span":
        """The part of tokens `start` to `end` of these."""
        first, count = self.first_position + start, end - start
        blocks = blocks_for(first + count, block_tokens)
        return Span(first, count, self.block_ids[:blocks], self.adapter_slot)


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
        """Position of every token in its sequence, [T]."""
        ranges = [np.arange(s.first_position, s.context_tokens, dtype=np.int64) for s in self.spans]
        return np.concatenate(ranges)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention, made once at load."""

    layer: int
    scale: float
    """Scores are q·k times this."""
    window: int = 0
    """Number of positions that a token attends to, its own included; 0 means all before it."""
    softcap: float = 0.0
    """c > 0: scores become c * tanh(scores / c) (Gemma 2)."""
    sinks: Tensor | None = None
    """float32 [H]: one more score per head, in the softmax's denominator only (gpt-oss)."""
    rope: int = 0
    """Index of the table in the `ropes` that `Kernels.plan` is given."""


RopeTables = Mapping[int, tuple[Tensor, Tensor]]
"""cos and sin by rope id, float32 [T, R / 2] each. The first R dimensions of a head are rotated."""

Plan = TypeVar("Plan")
Packed = TypeVar("Packed")
"""A matrix as this implementation wants it in memory."""
PackedExperts = TypeVar("PackedExperts")


class Kernels(Protocol[Plan, Packed, PackedExperts]):
    """Bound to one KV pool. Tensors are on the pool's device, in the model's dtype unless noted, rows
    contiguous. A returned tensor may be overwritten by a later call within the same step only if it
    was passed to that call.

    T tokens, H query heads, K key-value heads, D head dim, P positions per block, E experts.

    Batch invariance: what is computed for a token depends bitwise on that token's own sequence alone,
    not on what else is in the batch nor on how the prompt was cut into chunks. `native` promises it in
    every dtype; the others in float32 as far as their libraries do.
    """

    is_batch_invariant: bool
    block_tokens: int
    """Positions of a block of the pool."""

    # --- weights, at load ---

    def pack(self, matrix: Matrix) -> Packed:
        """Any of the kinds in `weights.Matrix`. The argument's memory is not referred to afterwards,
        unless the implementation uses it as it is."""
        ...

    def pack_experts(self, experts: ExpertMatrices) -> PackedExperts: ...

    def movable(self, packed: Sequence[object]) -> MovableWeights:
        """The memory of these packed weights, all that were packed since the last call, as one image. Tensors
        that are used as they are may be among them."""
        ...

    # --- per step ---

    def plan(self, layout: BatchLayout, ropes: RopeTables, *, windows: frozenset[int]) -> Plan:
        """Compute once what all layers of one step need. `windows` are those that occur in the model."""
        ...

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """tokens int64 [T], table [vocab, hidden] -> [T, hidden]."""
        ...

    def linear(self, x: Tensor, matrix: Packed, *, residual: Tensor | None = None) -> Tensor:
        """x @ W.T + bias (+ residual): [T, in] -> [T, out]. fp32 accumulation. May overwrite `residual`
        and return it."""
        ...

    def gated_linear(self, x: Tensor, matrix: Packed, activation: Activation) -> Tensor:
        """act(x @ gate.T) * (x @ up.T): [T, in] -> [T, I]; `matrix` is packed from the rows of gate
        followed by those of up, [2 I, in]."""
        ...

    def logits(self, x: Tensor, matrix: Packed) -> Tensor:
        """Product like `linear`, but float32 [T, vocab]."""
        ...

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """act(gate) * up, where the two could not come out of one matrix. May overwrite its arguments."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension of x [..., n]. Statistics and the product with weight are in fp32
        and rounded once. (Gemma's 1 + weight is added at load, in fp32: `weight` may be float32 whatever x
        is.)"""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """sum = x + residual, rounded to the dtype; returns (rms_norm(sum), sum). May overwrite both."""
        ...

    def rotate_and_store(self, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, plan: Plan) -> Tensor:
        """Rotate q [T, H, D] and k [T, K, D] (of the first R dimensions, i is paired with i + R / 2, as
        in GPT-NeoX), write k and v [T, K, D] to their positions in the pool (quantised, if it is), return
        q ready for `attention`: a new tensor, or `q` rotated in place, so the argument must not be used
        afterwards. May be views of one [T, (H + 2 K) D] matrix; heads are contiguous."""
        ...

    def rotate(self, x: Tensor, *, rope: int, plan: Plan) -> Tensor:
        """x [T, N, R] wholly rotated. May overwrite it."""
        ...

    def store_latent(self, latent: Tensor, *, layer: int, plan: Plan) -> None:
        """planes=1: write [T, D] to the single head of the pool."""
        ...

    def attention(self, q: Tensor, *, spec: AttentionSpec, plan: Plan) -> Tensor:
        """Causal attention of q [T, H, D] to its sequence's positions in the pool. Softmax in fp32.
        Returns [T, H, D]; with planes=1 [T, H, value_dim]."""
        ...

    def experts(
        self, x: Tensor, experts: PackedExperts, chosen: Tensor, weights: Tensor, activation: Activation
    ) -> Tensor:
        """Mixture of experts: sum over j of weights[t, j] * MLP_{chosen[t, j]}(x[t]).

        x [T, hidden], chosen int64 [T, k], weights float32 [T, k] -> [T, hidden]. The sum runs over j in
        order, in fp32.
        """
        ...

    # --- blocks ---

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, destination): whole blocks within the pool, one after another."""
        ...

    def gather_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """Copy whole blocks out: uint8 [n, block_bytes] on the pool's device."""
        ...

    def scatter_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        """The inverse of `gather_blocks`."""
        ...
