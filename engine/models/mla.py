"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1) in its absorbed form.

Per position the KV cache has one vector for all heads: the compressed latent c of keys and values, and
one rotated key part k. A head's key is (W_k c, k) and its value W_v c. Instead of decompressing every
cached position, W_k is applied to the query: q · W_k c = (W_k^T q) · c, and W_v to the attended sum of
latents. So attention runs over `kv_lora_rank` + `rope_dim` dimensions with a single key-value head.
"""

from typing import Any, Generic

import torch
from torch import Tensor

from engine.kernels.interface import AttentionSpec, Kernels, Packed, PackedExperts, Plan
from engine.kernels.weights import DenseMatrix, Matrix, select_rows, to_dense
from engine.model_files.spec import MlaSpec, ModelSpec
from engine.models.linear import Linear, Loader, Norm, StepContext

_LORA_NORM_EPS = 1e-6
"""Epsilon of the norms of compressed queries and latents, whatever config.json says of the other norms."""


class LatentAttention(Generic[Packed]):
    """Implements `engine.models.attention.Attention`."""

    def __init__(
        self, spec: ModelSpec, loader: Loader[Plan, Packed, PackedExperts], layer: int, name: str
    ) -> None:
        """name: the module's in the checkpoint. Raises SetupError, see `MatrixSource`."""
        assert spec.mla is not None
        self._spec, self._kernels, self._head_count = spec.mla, loader.kernels, spec.head_count
        self._rope = spec.layer_ropes[layer]
        self._attention = AttentionSpec(
            layer, spec.attention_scale, window=spec.windows[layer], rope=self._rope
        )
        mla, hidden = spec.mla, spec.hidden_size
        order = _rope_order(mla, loader)
        heads_size = spec.head_count * mla.head_dim
        self._latent_parts = (mla.q_lora_rank or heads_size, mla.kv_lora_rank, mla.rope_dim)
        self._q_norm: Norm | None = None
        self._q_b: Linear[Packed] | None = None
        q_order = _per_head(order, spec.head_count, mla)
        if mla.q_lora_rank:
            q_name, q_size, first_order = f"{name}.q_a_proj", mla.q_lora_rank, None
            self._q_norm = loader.norm(f"{name}.q_a_layernorm", mla.q_lora_rank, _LORA_NORM_EPS)
            q_b = loader.source.matrix(f"{name}.q_b_proj", heads_size, mla.q_lora_rank)
            q_b = select_rows(q_b, q_order, loader.source.dtype)
            self._q_b = loader.joined([q_b], [(f"{name}.q_b_proj", heads_size)])
        else:
            q_name, q_size, first_order = f"{name}.q_proj", heads_size, q_order
        kv_name, kv_size = f"{name}.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.rope_dim
        first = loader.source.matrix(q_name, q_size, hidden)
        if first_order is not None:
            first = select_rows(first, first_order, loader.source.dtype)
        latent = loader.source.matrix(kv_name, kv_size, hidden)
        kept = torch.arange(mla.kv_lora_rank, device=order.device)
        latent = select_rows(latent, torch.cat((kept, mla.kv_lora_rank + order)), loader.source.dtype)
        self._down = loader.joined([first, latent], [(q_name, q_size), (kv_name, kv_size)])
        self._kv_norm = loader.norm(f"{name}.kv_a_layernorm", mla.kv_lora_rank, _LORA_NORM_EPS)
        self._absorb_k, self._up_v = _load_decompression(spec, mla, loader, name)
        self._o: Linear[Packed] = loader.linear(
            (f"{name}.o_proj", hidden), in_size=spec.head_count * mla.value_dim
        )

    def queries(self, x: Tensor, step: StepContext[Any]) -> Tensor:
        mla, kernels = self._spec, self._kernels
        q, latent, key = self._down(x, step).split(self._latent_parts, dim=-1)
        if self._q_norm is not None and self._q_b is not None:
            q = self._q_b(self._q_norm(q.contiguous()), step)
        key = kernels.rotate(key.contiguous()[:, None], rope=self._rope, plan=step.plan)
        latent = self._kv_norm(latent.contiguous())
        kernels.store_latent(torch.cat((latent, key[:, 0]), -1), layer=self._attention.layer, plan=step.plan)
        q_nope, q_rope = q.view(len(x), self._head_count, -1).split((mla.nope_dim, mla.rope_dim), dim=-1)
        q_rope = kernels.rotate(q_rope.contiguous(), rope=self._rope, plan=step.plan)
        return torch.cat((self._absorb_k(q_nope), q_rope), -1)

    def attend(self, q: Tensor, step: StepContext[Any]) -> Tensor:
        return self._kernels.attention(q, spec=self._attention, plan=step.plan)

    def output(self, attended: Tensor, step: StepContext[Any], *, residual: Tensor | None = None) -> Tensor:
        values = self._up_v(attended)
        return self._o(values.flatten(1), step, residual=residual)


class HeadProducts(Generic[Packed]):
    """One matrix per head: y[t, h] = W[h] x[t, h]."""

    def __init__(self, loader: Loader[Any, Packed, Any], weights: Tensor) -> None:
        """weights [H, out, in]."""
        self._kernels: Kernels[Any, Packed, Any] = loader.kernels
        # Torch's batched product sums in another order for another number of tokens.
        self._packed: list[Packed] = []
        self._weights: Tensor | None = None
        if loader.kernels.is_batch_invariant:
            self._packed = [loader.pack(DenseMatrix(weight.contiguous())) for weight in weights]
        else:
            self._weights = weights.transpose(1, 2)
            loader.uses(self._weights)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, in] -> [T, H, out]"""
        if self._weights is not None:
            return torch.bmm(x.transpose(0, 1), self._weights).transpose(0, 1)
        heads = [self._kernels.linear(x[:, h].contiguous(), packed) for h, packed in enumerate(self._packed)]
        return torch.stack(heads, dim=1)


def _rope_order(mla: MlaSpec, loader: Loader[Any, Any, Any]) -> Tensor:
    """The checkpoint's rotated dimensions in the kernels' order: the first of each pair, then the second."""
    device = loader.source.device
    if not mla.is_interleaved:
        return torch.arange(mla.rope_dim, device=device)
    return torch.arange(mla.rope_dim, device=device).view(-1, 2).T.reshape(-1)


def _per_head(order: Tensor, head_count: int, mla: MlaSpec) -> Tensor:
    """Rows of a query matrix with the rotated rows of each head in `order`."""
    one = torch.cat((torch.arange(mla.nope_dim, device=order.device), mla.nope_dim + order))
    firsts = torch.arange(head_count, device=order.device) * mla.head_dim
    return (firsts[:, None] + one).reshape(-1)


def _load_decompression(
    spec: ModelSpec, mla: MlaSpec, loader: Loader[Any, Packed, Any], name: str
) -> tuple[HeadProducts[Packed], HeadProducts[Packed]]:
    """W_k transposed, to be applied to queries, and W_v."""
    rows = spec.head_count * (mla.nope_dim + mla.value_dim)
    matrix: Matrix = loader.source.matrix(f"{name}.kv_b_proj", rows, mla.kv_lora_rank)
    weight = to_dense(matrix, loader.source.dtype).weight.view(spec.head_count, -1, mla.kv_lora_rank)
    keys, values = weight.split((mla.nope_dim, mla.value_dim), dim=1)
    return (
        HeadProducts(loader, keys.transpose(1, 2).contiguous()),
        HeadProducts(loader, values.contiguous()),
    )
