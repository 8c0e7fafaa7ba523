"""Paged attention in plain torch, for any device.

Written out as matrix products instead of calling scaled_dot_product_attention: with one query in bf16
torch's CPU version is an order of magnitude slower than the products (it does not use the matrix
units), and in chunks of queries 3 times. Queries that share a key-value head are rows of one product;
decodes of similar length share one batched product over padded gathers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.geometry import KVGeometry
from engine.kernels.interface import AttentionSpec
from engine.kernels.torch_kv import KVRows


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows start … end-1 of the batch, one query each."""

    start: int
    end: int
    gather: Tensor
    """int64 [n * K * blocks] block rows, see `torch_kv`."""
    masked: Tensor | None
    """bool [n, 1, blocks * P], True where the query must not look; None: nowhere. (Cutting the keys
    to the longest sequence instead would make them non-contiguous, and bf16 products copy such.)"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries start … end-1 of the batch against gathered keys key_start … key_end-1."""

    start: int
    end: int
    key_start: int
    key_end: int
    masked: Tensor
    """bool [n, 1, m]: over the last m of those keys."""


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """The tokens of one sequence, several of them."""

    gather: Tensor
    """int64 [K * blocks]"""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class AttentionReads:
    """Rows that attention reads, for one window."""

    decodes: tuple[Decodes, ...]
    chunks: tuple[ChunkSpan, ...]


class TorchAttention:
    """Attention to the positions of one KV pool."""

    def __init__(self, geometry: KVGeometry, rows: KVRows) -> None:
        self._heads, self._planes = geometry.kv_head_count, geometry.planes
        self._head_dim = geometry.head_dim
        self._value_dim = geometry.value_dim if geometry.planes == 1 else geometry.head_dim
        self._rows = rows

    def __call__(self, q: Tensor, spec: AttentionSpec, reads: AttentionReads) -> Tensor:
        if len(reads.decodes) == 1 and not reads.chunks:
            return self._decodes(q, reads.decodes[0], spec)
        out = q.new_empty((*q.shape[:2], self._value_dim))
        for group in reads.decodes:
            out[group.start : group.end] = self._decodes(q, group, spec)
        for chunk in reads.chunks:
            self._chunk(q, out, chunk, spec)
        return out

    def _keys_values(self, gather: Tensor, layer: int, head_count: int) -> tuple[Tensor, Tensor]:
        """Gathered keys and values [head_count (of one or all sequences), positions, D], valid until
        the next call."""
        shape = (head_count, -1, self._head_dim)
        keys = self._rows.gather(layer, 0, gather).view(shape)
        values = keys if self._planes == 1 else self._rows.gather(layer, 1, gather).view(shape)
        return keys, values[..., : self._value_dim]

    def _decodes(self, q: Tensor, group: Decodes, spec: AttentionSpec) -> Tensor:
        count, head_count, head_dim = group.end - group.start, *q.shape[1:]
        keys, values = self._keys_values(group.gather, spec.layer, count * self._heads)
        grouped = q[group.start : group.end].reshape(count * self._heads, -1, head_dim)
        scores = self._scores(grouped, keys.transpose(1, 2), spec)
        by_sequence = scores.view(count, head_count, -1)
        if group.masked is not None:
            by_sequence.masked_fill_(group.masked, float("-inf"))
        weights = _softmax(by_sequence, spec.sinks).to(q.dtype).view(scores.shape)
        return torch.bmm(weights, values).view(count, head_count, -1)

    def _chunk(self, q: Tensor, out: Tensor, chunk: ChunkSpan, spec: AttentionSpec) -> None:
        heads, head_dim = self._heads, q.shape[2]
        keys, values = self._keys_values(chunk.gather, spec.layer, heads)
        sinks = None if spec.sinks is None else spec.sinks.view(heads, 1, -1)
        for piece in chunk.pieces:
            count = piece.end - piece.start
            # [n, K·G, D] -> [K, n·G, D]: the queries that share keys are rows of one product.
            grouped = q[piece.start : piece.end].reshape(count, heads, -1, head_dim).transpose(0, 1)
            key_range = slice(piece.key_start, piece.key_end)
            seen = keys[:, key_range].transpose(1, 2)
            scores = self._scores(grouped.reshape(heads, -1, head_dim), seen, spec)
            by_query = scores.view(heads, count, -1, scores.shape[-1])
            by_query[..., -piece.masked.shape[-1] :].masked_fill_(piece.masked, float("-inf"))
            weights = _softmax(by_query, sinks).to(q.dtype).view(scores.shape)
            result = torch.bmm(weights, values[:, key_range])
            out[piece.start : piece.end] = (
                result.view(heads, count, -1, self._value_dim)
                .transpose(0, 1)
                .reshape(count, -1, self._value_dim)
            )

    def _scores(self, q: Tensor, keys: Tensor, spec: AttentionSpec) -> Tensor:
        """Before the mask, fp32. The scale is in q already, except for latents (`planes` = 1)."""
        scores = torch.bmm(q, keys).float()
        if self._planes == 1:
            scores.mul_(spec.scale)
        if spec.softcap:
            scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
        return scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """scores [..., n], sinks as scores without the last dimension, or fewer leading ones."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sink = sinks.expand(scores.shape[:-1])[..., None]
    return torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1].contiguous()
