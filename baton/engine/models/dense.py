"""Forward pass of a dense decoder (Llama, Mistral, Qwen2, Qwen3) over a flat batch of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.interface import BatchLayout, Kernels, Plan
from baton.engine.models.rope import Frequencies
from baton.engine.models.spec import ModelSpec
from baton.engine.weights import Checkpoint

Progress = Callable[[int, int], None]
"""(layers loaded, layers in all)"""


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor
    """[out, in]"""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear
    window: int


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    """[vocab, hidden]; the embedding itself where they are tied."""


class _Loader:
    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self._checkpoint, self._dtype, self._device = spec, checkpoint, dtype, device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.tensor(f"{name}.weight", shape, dtype=self._dtype, device=self._device)

    def linear(self, name: str, out_size: int, in_size: int, *, bias: bool) -> Linear:
        weight = self.tensor(name, out_size, in_size)
        if not bias:
            return Linear(weight, None)
        values = self._checkpoint.tensor(f"{name}.bias", (out_size,), dtype=self._dtype, device=self._device)
        return Linear(weight, values)

    def layer(self, index: int) -> Layer:
        spec, at = self.spec, f"model.layers.{index}."
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        hidden, inner = spec.hidden_size, spec.intermediate_size
        q_size, kv_size = spec.head_count * spec.head_dim, spec.kv_head_count * spec.head_dim
        return Layer(
            attention_norm=self.tensor(f"{at}input_layernorm", hidden),
            q=self.linear(f"{attention}q_proj", q_size, hidden, bias=spec.qkv_bias),
            k=self.linear(f"{attention}k_proj", kv_size, hidden, bias=spec.qkv_bias),
            v=self.linear(f"{attention}v_proj", kv_size, hidden, bias=spec.qkv_bias),
            o=self.linear(f"{attention}o_proj", hidden, q_size, bias=spec.o_bias),
            q_norm=self.tensor(f"{attention}q_norm", spec.head_dim) if spec.qk_norm else None,
            k_norm=self.tensor(f"{attention}k_norm", spec.head_dim) if spec.qk_norm else None,
            mlp_norm=self.tensor(f"{at}post_attention_layernorm", hidden),
            gate=self.linear(f"{mlp}gate_proj", inner, hidden, bias=spec.mlp_bias),
            up=self.linear(f"{mlp}up_proj", inner, hidden, bias=spec.mlp_bias),
            down=self.linear(f"{mlp}down_proj", hidden, inner, bias=spec.mlp_bias),
            window=spec.windows[index],
        )


def load_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Weights:
    """Raises SetupError: a tensor is missing or has another shape than the spec asks for."""
    loader = _Loader(spec, checkpoint, dtype, device)
    embedding = loader.tensor("model.embed_tokens", spec.vocab_size, spec.hidden_size)
    layers: list[Layer] = []
    for index in range(spec.layer_count):
        layers.append(loader.layer(index))
        if progress is not None:
            progress(index + 1, spec.layer_count)
    tied = spec.tie_embeddings
    head = embedding if tied else loader.tensor("lm_head", spec.vocab_size, spec.hidden_size)
    return Weights(embedding, tuple(layers), loader.tensor("model.norm", spec.hidden_size), head)


class DenseModel(Generic[Plan]):
    def __init__(
        self, spec: ModelSpec, weights: Weights, kernels: Kernels[Plan, Any, Any], frequencies: Frequencies
    ) -> None:
        self._spec, self._weights = spec, weights
        self._kernels, self._frequencies = kernels, frequencies
        self._windows = frozenset(spec.windows)

    def forward(self, tokens: Tensor, layout: BatchLayout, logit_rows: Tensor) -> Tensor:
        """Write the KV of all tokens; return the logits [R, vocab] of some.

        tokens: int64 [T] in the layout's order. logit_rows: int64 [R], may be empty.
        """
        kernels, device = self._kernels, tokens.device
        positions = torch.from_numpy(layout.positions()).to(device)
        plan = kernels.plan(layout, *self._frequencies.cos_sin(positions), windows=self._windows)
        hidden = F.embedding(tokens, self._weights.embedding)
        *earlier, last = self._weights.layers
        for index, layer in enumerate(earlier):
            q = self._queries(layer, hidden, index, plan)
            attended = kernels.attention(q, layer=index, window=layer.window, plan=plan)
            hidden = self._after_attention(layer, hidden, attended)
        # After the last layer's KV is written, only the rows with logits matter.
        index = len(earlier)
        q = self._queries(last, hidden, index, plan)
        if not len(logit_rows):
            return hidden.new_empty((0, self._spec.vocab_size))
        attended = kernels.attention(q, layer=index, window=last.window, plan=plan)
        hidden = self._after_attention(last, hidden[logit_rows], attended[logit_rows])
        normed = kernels.rms_norm(hidden, self._weights.norm, self._spec.norm_eps)
        return F.linear(normed, self._weights.head)

    def _queries(self, layer: Layer, hidden: Tensor, index: int, plan: Plan) -> Tensor:
        """Store this layer's keys and values; return the rotated queries [T, heads, head dim]."""
        spec, kernels = self._spec, self._kernels
        x = kernels.rms_norm(hidden, layer.attention_norm, spec.norm_eps)
        count = x.shape[0]
        q = layer.q(x).view(count, spec.head_count, spec.head_dim)
        k = layer.k(x).view(count, spec.kv_head_count, spec.head_dim)
        v = layer.v(x).view(count, spec.kv_head_count, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, spec.norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, spec.norm_eps)
        return kernels.rotate_and_store(q, k, v, layer=index, plan=plan)

    def _after_attention(self, layer: Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        kernels = self._kernels
        hidden = hidden + layer.o(attended.reshape(attended.shape[0], -1))
        x = kernels.rms_norm(hidden, layer.mlp_norm, self._spec.norm_eps)
        return hidden + layer.down(kernels.silu_and_mul(layer.gate(x), layer.up(x)))
