"""The attention of a layer: grouped queries, keys and values (`mla` has the other kind)."""

from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from engine.kernels.interface import AttentionSpec, Packed, PackedExperts, Plan
from engine.model_files.spec import ModelSpec
from engine.models.linear import Linear, Loader, Norm, StepContext


class Attention(Protocol):
    """Attention of one layer, in three parts, so that the last layer can leave out rows after its KV is
    written."""

    def queries(self, x: Tensor, step: StepContext[Any]) -> Tensor:
        """x [T, hidden], normed: write the tokens' KV, return what `attend` wants."""
        ...

    def attend(self, q: Tensor, step: StepContext[Any]) -> Tensor:
        """[T, …]"""
        ...

    def output(self, attended: Tensor, step: StepContext[Any], *, residual: Tensor | None = None) -> Tensor:
        """[T, hidden]; may overwrite `residual` and return it."""
        ...


class GroupedAttention(Generic[Packed]):
    """Grouped-query attention (arXiv 2305.13245); with as many key-value heads as heads the classic one."""

    def __init__(
        self, spec: ModelSpec, loader: Loader[Plan, Packed, PackedExperts], layer: int, name: str
    ) -> None:
        """name: the module's in the checkpoint. Raises SetupError, see `MatrixSource`."""
        self._kernels = loader.kernels
        self._head_dim = spec.head_dim
        self._heads = (spec.head_count, spec.kv_head_count, spec.kv_head_count)
        sinks = None
        if spec.sinks:
            sinks = loader.source.tensor(f"{name}.sinks", spec.head_count, dtype=torch.float32)
        self._attention = AttentionSpec(
            layer=layer,
            scale=spec.attention_scale,
            window=spec.windows[layer],
            softcap=spec.attention_softcap,
            sinks=sinks,
            rope=spec.layer_ropes[layer],
        )
        q_size = spec.head_count * spec.head_dim
        self._qkv = _load_qkv(spec, loader, name)
        self._o: Linear[Packed] = loader.linear(
            (f"{name}.o_proj", spec.hidden_size), in_size=q_size, bias=spec.o_bias
        )
        self._q_norm: Norm | None = None
        self._k_norm: Norm | None = None
        if spec.qk_norm:
            self._q_norm, self._k_norm = (
                loader.norm(f"{name}.{part}_norm", spec.head_dim, spec.norm_eps, offset=spec.norm_offset)
                for part in "qk"
            )

    def queries(self, x: Tensor, step: StepContext[Any]) -> Tensor:
        heads = self._qkv(x, step).view(len(x), -1, self._head_dim)
        q, k, v = heads.split(self._heads, dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        return self._kernels.rotate_and_store(q, k, v, spec=self._attention, plan=step.plan)

    def attend(self, q: Tensor, step: StepContext[Any]) -> Tensor:
        return self._kernels.attention(q, spec=self._attention, plan=step.plan)

    def output(self, attended: Tensor, step: StepContext[Any], *, residual: Tensor | None = None) -> Tensor:
        return self._o(attended.flatten(1), step, residual=residual)


def _load_qkv(spec: ModelSpec, loader: Loader[Plan, Packed, PackedExperts], name: str) -> Linear[Packed]:
    q_size, kv_size = spec.head_count * spec.head_dim, spec.kv_head_count * spec.head_dim
    if spec.fused_projections:
        parts = ((f"{name}.qkv_proj", q_size + 2 * kv_size),)
    else:
        parts = ((f"{name}.q_proj", q_size), (f"{name}.k_proj", kv_size), (f"{name}.v_proj", kv_size))
    return loader.linear(*parts, in_size=spec.hidden_size, bias=spec.qkv_bias)
