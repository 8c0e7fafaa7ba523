"""The kernels in plain torch, for any device.

Attention is written out as matrix products instead of calling scaled_dot_product_attention: with one
query in bf16 torch's CPU version is an order of magnitude slower than the products (it does not use
the matrix units), and in chunks of queries 3 times. Queries that share a key-value head are rows of
one product; decodes of similar length share one batched product over padded gathers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.interface import BatchLayout, Span
from baton.engine.kv_pool import KVPool

_QUERIES_PER_PIECE = 64
"""Queries of a chunk whose scores are computed at once: causality is used per piece (keys after its
last query are not touched), and its scores mostly stay in cache."""
_SCORE_BYTES_MAX = 64 * 2**20
"""fp32 scores of one piece, at most: long contexts get smaller pieces."""
_PADDING_MAX = 1.5
"""Decodes share a product while the longest reads at most this multiple of the shortest's blocks."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Rows start … end-1 of the batch, one query each."""

    start: int
    end: int
    gather: Tensor
    """int64 [n * K * blocks] rows of `TorchKernels._block_rows`, layer 0's keys."""
    masked: Tensor | None
    """bool [n, 1, blocks * P], True where the query must not look; None: nowhere. (Cutting the keys
    to the longest sequence instead would make them non-contiguous, and bf16 products copy such.)"""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries start … end-1 of the batch against gathered keys key_start … key_end-1."""

    start: int
    end: int
    key_start: int
    key_end: int
    masked: Tensor
    """bool [n, 1, m]: over the last m of those keys."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The tokens of one sequence, several of them."""

    gather: Tensor
    """int64 [K * blocks]"""
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Reads:
    """What attention reads, for one window."""

    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    cos: Tensor
    """float32 [T, 1, D]"""
    sin: Tensor
    """float32 [T, 1, D], the first half negated."""
    write_rows: Tensor
    """int64 [T * K] rows of `TorchKernels._position_rows`, layer 0's keys."""
    reads: dict[int, _Reads]
    """By window."""


class TorchKernels:
    """Implements `baton.engine.kernels.interface.Kernels`."""

    def __init__(self, pool: KVPool) -> None:
        geometry = pool.geometry
        self._pool = pool
        self._layers = geometry.layer_count
        self._heads, self._positions = geometry.kv_head_count, geometry.block_tokens
        self._scale = geometry.head_dim**-0.5
        # Two views of the pool as rows. Layer l's keys of a block lie 2·l·K rows (or 2·l·K·P) after
        # layer 0's, its values K rows further, so one set of indices serves all layers.
        self._block_rows = pool.blocks.view(-1, self._positions * geometry.head_dim)
        self._position_rows = pool.blocks.view(-1, geometry.head_dim)
        # Kept from call to call: fresh memory of this size costs more in page faults than the copy.
        self._gathered = self._block_rows.new_empty((2, 0, self._block_rows.shape[1]))

    def plan(self, layout: BatchLayout, cos: Tensor, sin: Tensor, *, windows: frozenset[int]) -> TorchPlan:
        return TorchPlan(
            cos=torch.cat((cos, cos), dim=-1)[:, None],
            sin=torch.cat((-sin, sin), dim=-1)[:, None],
            write_rows=self._write_rows(layout),
            reads={window: self._reads(layout, window) for window in windows},
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate, inplace=True).mul_(up)

    def rotate_and_store(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, plan: TorchPlan) -> Tensor:
        head_count, head_dim = q.shape[1], q.shape[2]
        both = torch.cat((q, k), dim=1)
        rotated = torch.addcmul(both * plan.cos, both.roll(head_dim // 2, -1), plan.sin)
        # The softmax scale goes in here, in fp32, where it costs least.
        rotated[:, :head_count].mul_(self._scale)
        rotated = rotated.to(q.dtype)
        rows_per_half = self._heads * self._positions
        keys = self._position_rows[2 * layer * rows_per_half :]
        values = self._position_rows[(2 * layer + 1) * rows_per_half :]
        keys.index_copy_(0, plan.write_rows, rotated[:, head_count:].reshape(-1, head_dim))
        values.index_copy_(0, plan.write_rows, v.reshape(-1, head_dim))
        return rotated[:, :head_count]

    def attention(self, q: Tensor, *, layer: int, window: int, plan: TorchPlan) -> Tensor:
        reads = plan.reads[window]
        if len(reads.decodes) == 1 and not reads.chunks:
            return self._attend_decodes(q, reads.decodes[0], layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in reads.decodes:
            out[group.start : group.end] = self._attend_decodes(q, group, layer)
        for chunk in reads.chunks:
            self._attend_chunk(q, out, chunk, layer)
        return out

    def gather_blocks(self, block_ids: Sequence[int]) -> Tensor:
        return torch.stack([self._pool.block_view(block_id) for block_id in block_ids])

    def scatter_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        for block_id, block in zip(block_ids, data, strict=True):
            self._pool.block_view(block_id).copy_(block)

    # --- computing ---

    def _keys_values(self, gather: Tensor, layer: int, head_count: int) -> tuple[Tensor, Tensor]:
        """Gathered keys and values [head_count (of one or all sequences), positions, D], valid until
        the next call."""
        shape = (head_count, -1, self._position_rows.shape[1])
        first = 2 * layer * self._heads
        if self._gathered.shape[1] < len(gather):
            self._gathered = self._block_rows.new_empty((2, len(gather), self._block_rows.shape[1]))
        keys, values = self._gathered[0, : len(gather)], self._gathered[1, : len(gather)]
        torch.index_select(self._block_rows[first:], 0, gather, out=keys)
        torch.index_select(self._block_rows[first + self._heads :], 0, gather, out=values)
        return keys.view(shape), values.view(shape)

    def _attend_decodes(self, q: Tensor, group: _Decodes, layer: int) -> Tensor:
        count, head_dim = group.end - group.start, q.shape[2]
        keys, values = self._keys_values(group.gather, layer, count * self._heads)
        grouped = q[group.start : group.end].reshape(count * self._heads, -1, head_dim)
        scores = torch.bmm(grouped, keys.transpose(1, 2)).float()
        if group.masked is not None:
            by_sequence = scores.view(count, -1, scores.shape[-1])
            by_sequence.masked_fill_(group.masked, float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype)
        return torch.bmm(weights, values).view(count, -1, head_dim)

    def _attend_chunk(self, q: Tensor, out: Tensor, chunk: _Chunk, layer: int) -> None:
        heads, head_dim = self._heads, q.shape[2]
        keys, values = self._keys_values(chunk.gather, layer, heads)
        for piece in chunk.pieces:
            count = piece.end - piece.start
            # [n, K·G, D] -> [K, n·G, D]: the queries that share keys are rows of one product.
            grouped = q[piece.start : piece.end].reshape(count, heads, -1, head_dim).transpose(0, 1)
            key_range = slice(piece.key_start, piece.key_end)
            seen = keys[:, key_range].transpose(1, 2)
            scores = torch.bmm(grouped.reshape(heads, -1, head_dim), seen).float()
            by_query = scores.view(heads, count, -1, scores.shape[-1])
            by_query[..., -piece.masked.shape[-1] :].masked_fill_(piece.masked, float("-inf"))
            weights = torch.softmax(scores, -1).to(q.dtype)
            result = torch.bmm(weights, values[:, key_range])
            out[piece.start : piece.end] = (
                result.view(heads, count, -1, head_dim).transpose(0, 1).reshape(count, -1, head_dim)
            )

    # --- planning ---

    def _to_device(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self._pool.device)

    def _write_rows(self, layout: BatchLayout) -> Tensor:
        blocks, offsets = zip(*(self._slots(span) for span in layout.spans), strict=True)
        heads = np.arange(self._heads, dtype=np.int64)
        first_head = np.concatenate(blocks) * (self._layers * 2 * self._heads)
        rows = (first_head[:, None] + heads) * self._positions + np.concatenate(offsets)[:, None]
        return self._to_device(rows.reshape(-1))

    def _slots(self, span: Span) -> tuple[IntArray, IntArray]:
        """(block id, position in block) of each of the span's tokens."""
        positions = np.arange(span.first_position, span.context_tokens, dtype=np.int64)
        table = np.asarray(span.block_ids, dtype=np.int64)
        return table[positions // self._positions], positions % self._positions

    def _gather_rows(self, tables: IntArray) -> Tensor:
        """tables [n, blocks] -> rows [n * K * blocks]: each head's blocks follow one another."""
        heads = np.arange(self._heads, dtype=np.int64)
        rows = tables[:, None, :] * (self._layers * 2 * self._heads) + heads[None, :, None]
        return self._to_device(rows.reshape(-1))

    def _reads(self, layout: BatchLayout, window: int) -> _Reads:
        decode_count = layout.decode_count
        decodes = [
            self._decodes(layout.spans[start:end], start, window)
            for start, end in _similar(
                [self._block_range(span, window) for span in layout.spans[:decode_count]]
            )
        ]
        chunks: list[_Chunk] = []
        row = decode_count
        for span in layout.spans[decode_count:]:
            chunks.append(self._chunk(span, row, window))
            row += span.token_count
        return _Reads(tuple(decodes), tuple(chunks))

    def _block_range(self, span: Span, window: int) -> tuple[int, int]:
        """The blocks of its table that a span's queries can see."""
        first = max(0, span.first_position + 1 - window) // self._positions if window else 0
        return first, -(-span.context_tokens // self._positions)

    def _decodes(self, spans: Sequence[Span], start: int, window: int) -> _Decodes:
        ranges = [self._block_range(span, window) for span in spans]
        width = max(end - first for first, end in ranges)
        tables = np.empty((len(spans), width), dtype=np.int64)
        for row, (span, (first, end)) in enumerate(zip(spans, ranges, strict=True)):
            tables[row, : end - first] = span.block_ids[first:end]
            # Padding must be finite numbers, and the sequence's own are as good as its result.
            tables[row, end - first :] = span.block_ids[end - 1]
        bases = np.asarray([first * self._positions for first, _ in ranges], dtype=np.int64)
        newest = np.asarray([span.first_position for span in spans], dtype=np.int64) - bases
        keys = np.arange(width * self._positions, dtype=np.int64)
        masked = keys > newest[:, None]
        if window:
            masked |= keys <= newest[:, None] - window
        return _Decodes(
            start=start,
            end=start + len(spans),
            gather=self._gather_rows(tables),
            masked=self._to_device(masked[:, None, :]) if masked.any() else None,
        )

    def _chunk(self, span: Span, row: int, window: int) -> _Chunk:
        first, end = self._block_range(span, window)
        table = np.asarray([span.block_ids[first:end]], dtype=np.int64)
        return _Chunk(
            gather=self._gather_rows(table),
            pieces=tuple(self._pieces(span, row, first * self._positions, window)),
        )

    def _pieces(self, span: Span, row: int, base: int, window: int) -> Iterator[_Piece]:
        """`base`: position of the first gathered key."""
        # Query heads per key-value head are not known here; 8 is above what the supported models have.
        score_bytes = 4 * 8 * self._heads * span.context_tokens
        size = max(1, min(_QUERIES_PER_PIECE, _SCORE_BYTES_MAX // score_bytes))
        for offset in range(0, span.token_count, size):
            count = min(size, span.token_count - offset)
            newest = span.first_position + offset + np.arange(count, dtype=np.int64)
            key_end = int(newest[-1]) + 1
            key_start = max(base, int(newest[0]) + 1 - window) if window else base
            keys = np.arange(key_start if window else key_end - count, key_end, dtype=np.int64)
            masked = keys > newest[:, None]
            if window:
                masked |= keys <= newest[:, None] - window
            yield _Piece(
                start=row + offset,
                end=row + offset + count,
                key_start=key_start - base,
                key_end=key_end - base,
                masked=self._to_device(masked[:, None, :]),
            )


def _similar(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Cut decodes, ordered by context, into runs of similar block count: (start, end) of each."""
    start = 0
    shortest = longest = 0
    for i, (first, end) in enumerate(ranges):
        count = end - first
        if i > start and max(longest, count) > _PADDING_MAX * min(shortest, count) + 1:
            yield start, i
            start = i
        if i == start:
            shortest = longest = count
        shortest, longest = min(shortest, count), max(longest, count)
    if ranges:
        yield start, len(ranges)
