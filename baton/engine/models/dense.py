"""Forward pass of a dense decoder (Llama, Mistral, Qwen2, Qwen3) over a flat batch of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from baton.engine.kernels.interface import AttentionSpec, BatchLayout, Kernels, Packed, PackedExperts, Plan
from baton.engine.kernels.weights import DenseMatrix
from baton.engine.models.linear import Linear, Loader, StepContext
from baton.engine.models.rope import Frequencies
from baton.engine.models.spec import ModelSpec

Progress = Callable[[int, int], None]
"""(layers loaded, layers in all)"""


@dataclass(frozen=True, slots=True)
class Layer(Generic[Packed]):
    attention: AttentionSpec
    attention_norm: Tensor
    qkv: Linear[Packed]
    o: Linear[Packed]
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear[Packed]
    down: Linear[Packed]


@dataclass(frozen=True, slots=True)
class Weights(Generic[Packed]):
    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[Layer[Packed], ...]
    norm: Tensor
    head: Linear[Packed]


def _load_layer(spec: ModelSpec, loader: Loader[Plan, Packed, PackedExperts], index: int) -> Layer[Packed]:
    at = f"model.layers.{index}."
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.head_count * spec.head_dim, spec.kv_head_count * spec.head_dim
    qkv = ((f"{attention}{name}_proj", q_size if name == "q" else kv_size) for name in "qkv")
    gate_up = ((f"{mlp}{name}_proj", inner) for name in ("gate", "up"))
    tensor = loader.source.tensor
    return Layer(
        attention=AttentionSpec(index, spec.head_dim**-0.5, spec.windows[index]),
        attention_norm=tensor(f"{at}input_layernorm.weight", hidden),
        qkv=loader.linear(*qkv, in_size=hidden, bias=spec.qkv_bias),
        o=loader.linear((f"{attention}o_proj", hidden), in_size=q_size, bias=spec.o_bias),
        q_norm=tensor(f"{attention}q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        k_norm=tensor(f"{attention}k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        mlp_norm=tensor(f"{at}post_attention_layernorm.weight", hidden),
        gate_up=loader.linear(*gate_up, in_size=hidden, bias=spec.mlp_bias),
        down=loader.linear((f"{mlp}down_proj", hidden), in_size=inner, bias=spec.mlp_bias),
    )


def load_weights(
    spec: ModelSpec, loader: Loader[Plan, Packed, PackedExperts], *, progress: Progress | None = None
) -> Weights[Packed]:
    """Raises SetupError: a tensor is missing or has another shape than the spec asks for."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    embedding = loader.source.tensor("model.embed_tokens.weight", vocab, hidden)
    layers: list[Layer[Packed]] = []
    for index in range(spec.layer_count):
        layers.append(_load_layer(spec, loader, index))
        if progress is not None:
            progress(index + 1, spec.layer_count)
    tied = DenseMatrix(embedding) if spec.tie_embeddings else None
    head = loader.head("lm_head", vocab, hidden, tied=tied)
    return Weights(embedding, tuple(layers), loader.source.tensor("model.norm.weight", hidden), head)


class DenseModel(Generic[Plan, Packed, PackedExperts]):
    """Implements `baton.engine.models.model.LanguageModel`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights[Packed],
        kernels: Kernels[Plan, Packed, PackedExperts],
        frequencies: Frequencies,
    ) -> None:
        self._spec, self._weights = spec, weights
        self._kernels, self._frequencies = kernels, frequencies
        self._windows = frozenset(spec.windows)

    def forward(self, tokens: Tensor, layout: BatchLayout, rows: Tensor) -> Tensor:
        kernels, device = self._kernels, tokens.device
        step = self._step_context(layout, device)
        hidden = kernels.embed(tokens, self._weights.embedding)
        *earlier, last = self._weights.layers
        for layer in earlier:
            q = self._queries(layer, hidden, step)
            attended = kernels.attention(q, spec=layer.attention, plan=step.plan)
            hidden = self._after_attention(layer, hidden, attended, step)
        # After the last layer's KV is written, only the rows that are asked for matter.
        q = self._queries(last, hidden, step)
        if not len(rows):
            return hidden[:0]
        attended = kernels.attention(q, spec=last.attention, plan=step.plan)
        hidden = self._after_attention(last, hidden[rows], attended[rows], step.rows(rows))
        return kernels.rms_norm(hidden, self._weights.norm, self._spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._weights.head.logits(hidden)

    def _step_context(self, layout: BatchLayout, device: torch.device) -> StepContext[Plan]:
        positions = torch.from_numpy(layout.positions()).to(device)
        ropes = {0: self._frequencies.cos_sin(positions)}
        plan = self._kernels.plan(layout, ropes, windows=self._windows)
        slots = [span.adapter_slot for span in layout.spans for _ in range(span.token_count)]
        if max(slots) < 0:
            return StepContext(plan)
        return StepContext(plan, torch.tensor(slots, dtype=torch.int64, device=device))

    def _queries(self, layer: Layer[Packed], hidden: Tensor, step: StepContext[Plan]) -> Tensor:
        """Store this layer's keys and values; return the rotated queries [T, heads, head dim]."""
        spec, kernels = self._spec, self._kernels
        x = kernels.rms_norm(hidden, layer.attention_norm, spec.norm_eps)
        heads = layer.qkv(x, step).view(len(x), -1, spec.head_dim)
        q, k, v = heads.split((spec.head_count, spec.kv_head_count, spec.kv_head_count), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, spec.norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, spec.norm_eps)
        return kernels.rotate_and_store(q, k, v, spec=layer.attention, plan=step.plan)

    def _after_attention(
        self, layer: Layer[Packed], hidden: Tensor, attended: Tensor, step: StepContext[Plan]
    ) -> Tensor:
        hidden = layer.o(attended.flatten(1), step, residual=hidden)
        x = self._kernels.rms_norm(hidden, layer.mlp_norm, self._spec.norm_eps)
        return layer.down(layer.gate_up.gated(x, step, "silu"), step, residual=hidden)
