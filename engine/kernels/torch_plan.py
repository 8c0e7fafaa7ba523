"""Rows of the pool that a batch writes and reads, as indices for torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.core.geometry import KVGeometry
from engine.kernels.interface import BatchLayout, RopeTables, Span
from engine.kernels.torch_attention import AttentionReads, ChunkSpan, Decodes, Piece

_QUERIES_PER_PIECE = 64
"""Queries of a chunk whose scores are computed at once: causality is used per piece (keys after its
last query are not touched), and its scores mostly stay in cache."""
_SCORE_BYTES_MAX = 64 * 2**20
"""fp32 scores of one piece, at most: long contexts get smaller pieces."""
_PADDING_MAX = 1.5
"""Decodes share a product while the longest reads at most this multiple of the shortest's blocks."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    ropes: dict[int, tuple[Tensor, Tensor]]
    """cos and sin by rope id, float32 [T, 1, R] each. The first half of sin is negated."""
    write_rows: Tensor
    """int64 [T * K] position rows, see `torch_kv`."""
    reads: dict[int, AttentionReads]
    """Rows to read, by window."""


class TorchPlanner:
    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self._device = device
        self._heads, self._positions = geometry.kv_head_count, geometry.block_tokens
        self._rows_per_block = geometry.layer_count * geometry.planes * geometry.kv_head_count
        # Many query heads may share a key-value head; how many is not known here. 8 is above what models
        # with several key-value heads have, 128 what those with one latent have.
        self._score_rows = geometry.kv_head_count * (128 if geometry.planes == 1 else 8)

    def plan(self, layout: BatchLayout, ropes: RopeTables, windows: frozenset[int]) -> TorchPlan:
        return TorchPlan(
            ropes={
                rope: (torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None])
                for rope, (cos, sin) in ropes.items()
            },
            write_rows=self._write_rows(layout),
            reads={window: self._reads(layout, window) for window in windows},
        )

    def _to_device(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _write_rows(self, layout: BatchLayout) -> Tensor:
        blocks, offsets = zip(*(self._slots(span) for span in layout.spans), strict=True)
        heads = np.arange(self._heads, dtype=np.int64)
        first_head = np.concatenate(blocks) * self._rows_per_block
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
        rows = tables[:, None, :] * self._rows_per_block + heads[None, :, None]
        return self._to_device(rows.reshape(-1))

    def _reads(self, layout: BatchLayout, window: int) -> AttentionReads:
        decode_count = layout.decode_count
        decodes = [
            self._decodes(layout.spans[start:end], start, window)
            for start, end in _similar(
                [self._block_range(span, window) for span in layout.spans[:decode_count]]
            )
        ]
        chunks: list[ChunkSpan] = []
        row = decode_count
        for span in layout.spans[decode_count:]:
            chunks.append(self._chunk(span, row, window))
            row += span.token_count
        return AttentionReads(tuple(decodes), tuple(chunks))

    def _block_range(self, span: Span, window: int) -> tuple[int, int]:
        """The blocks of its table that a span's queries can see."""
        first = max(0, span.first_position + 1 - window) // self._positions if window else 0
        return first, -(-span.context_tokens // self._positions)

    def _decodes(self, spans: Sequence[Span], start: int, window: int) -> Decodes:
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
        return Decodes(
            start=start,
            end=start + len(spans),
            gather=self._gather_rows(tables),
            masked=self._to_device(masked[:, None, :]) if masked.any() else None,
        )

    def _chunk(self, span: Span, row: int, window: int) -> ChunkSpan:
        first, end = self._block_range(span, window)
        table = np.asarray([span.block_ids[first:end]], dtype=np.int64)
        return ChunkSpan(
            gather=self._gather_rows(table),
            pieces=tuple(self._pieces(span, row, first * self._positions, window)),
        )

    def _pieces(self, span: Span, row: int, base: int, window: int) -> Iterator[Piece]:
        """`base`: position of the first gathered key."""
        score_bytes = 4 * self._score_rows * span.context_tokens
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
            yield Piece(
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
