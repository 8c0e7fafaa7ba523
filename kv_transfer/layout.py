"""Pure arithmetic on block lists and byte ranges: fewer, longer copies for the same bytes, and which bytes
of whose block a rank needs when prefill and decode are of different tensor-parallel widths."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from baton.core.geometry import SCALE_BYTES, STORED_BYTES, KVGeometry


class BlockRun(NamedTuple):
    """`block_count` consecutive source blocks that go to as many consecutive local blocks."""

    source: int
    local: int
    block_count: int


class RangeCopy(NamedTuple):
    """`length` bytes at `source` within each source block go to `local` within its local block."""

    source: int
    local: int
    length: int


Ranges = tuple[RangeCopy, ...]
"""What one read takes of every block; empty: the whole block."""


def coalesced(ranges: Iterable[RangeCopy]) -> Ranges:
    """The same bytes as the fewest ranges, ascending by their place in the source."""
    merged: list[RangeCopy] = []
    for piece in sorted(piece for piece in ranges if piece.length):
        if merged:
            last = merged[-1]
            if (piece.source, piece.local) == (last.source + last.length, last.local + last.length):
                merged[-1] = RangeCopy(last.source, last.local, last.length + piece.length)
                continue
        merged.append(piece)
    return tuple(merged)


def check_ranges(ranges: Ranges, *, source_bytes: int, local_bytes: int) -> None:
    """Raises ValueError: a range outside the source's block of `source_bytes` or our own of
    `local_bytes`; or none, where blocks of different sizes cannot be read whole."""
    if not ranges and source_bytes != local_bytes:
        raise ValueError(f"blocks of {source_bytes} B cannot be read whole into blocks of {local_bytes} B")
    for piece in ranges:
        is_inside = (
            piece.length > 0
            and 0 <= piece.source <= source_bytes - piece.length
            and 0 <= piece.local <= local_bytes - piece.length
        )
        if not is_inside:
            raise ValueError(f"{piece} is outside a block of {source_bytes} B or of {local_bytes} B")


def runs(source_blocks: Sequence[int], local_blocks: Sequence[int]) -> Iterator[BlockRun]:
    """The pairs (source_blocks[i], local_blocks[i]), in order, as the fewest runs that keep the order."""
    start = 0
    pairs = list(zip(source_blocks, local_blocks, strict=True))
    for i in range(1, len(pairs) + 1):
        is_end = i == len(pairs) or pairs[i] != (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1)
        if is_end:
            yield BlockRun(*pairs[start], i - start)
            start = i


def ascending_runs(blocks: Sequence[int]) -> Iterator[range]:
    """`blocks`, in order, as the fewest ranges of consecutive ids."""
    return (range(run.source, run.source + run.block_count) for run in runs(blocks, blocks))


def cover(blocks: Iterable[int], *, gap_max: int) -> list[range]:
    """Ascending, disjoint ranges that contain all `blocks`; two with at most `gap_max` others between
    them share a range. For tables whose entries cost less to copy than another descriptor does."""
    ranges: list[range] = []
    for block in sorted(set(blocks)):
        if ranges and block - ranges[-1].stop <= gap_max:
            ranges[-1] = range(ranges[-1].start, block + 1)
        else:
            ranges.append(range(block, block + 1))
    return ranges


# --- tensor parallelism: shards of one block -------------------------------------------------------


class ShardRead(NamedTuple):
    """What one rank reads of each block from one rank of the other side."""

    source_rank: int
    ranges: Ranges


def head_range(kv_head_count: int, width: int, rank: int) -> range:
    """The model's KV heads that `rank` of `width` holds: an equal part of them in order; where there are
    fewer heads than ranks, one, and so many ranks in a row hold the same. Raises ValueError: neither
    divides the other."""
    if not 0 <= rank < width:
        raise ValueError(f"rank {rank} of {width}")
    if kv_head_count % width == 0:
        count = kv_head_count // width
        return range(rank * count, (rank + 1) * count)
    if width % kv_head_count == 0:
        head = rank // (width // kv_head_count)
        return range(head, head + 1)
    raise ValueError(f"{kv_head_count} KV heads cannot be split over {width} ranks")


def shard_geometry(geometry: KVGeometry, width: int) -> KVGeometry:
    """Geometry of one rank's pool, where `geometry` is the whole model's. Raises ValueError as `head_range`
    does."""
    return msgspec.structs.replace(
        geometry, kv_head_count=len(head_range(geometry.kv_head_count, width, rank=0))
    )


def shard_reads(
    geometry: KVGeometry, *, source_width: int, target_width: int, target_rank: int
) -> list[ShardRead]:
    """What the rank `target_rank` of a decode of `target_width` reads of every block, and from which ranks of
    a prefill of `source_width`, so that its block is what it would have computed itself.

    `geometry`: of the whole model; a shard's block is laid out as `KVGeometry` says, with its own heads
    only. Ranges that touch on both sides are one; equal shards are one range, the block. Heads that
    several source ranks hold are read from different ones by different targets. Raises ValueError as
    `head_range` does.
    """
    wanted = head_range(geometry.kv_head_count, target_width, target_rank)
    by_rank: dict[int, list[int]] = {}
    for head in wanted:
        rank = _holder(geometry.kv_head_count, source_width, head, spread=target_rank)
        by_rank.setdefault(rank, []).append(head)
    reads: list[ShardRead] = []
    for rank, heads in sorted(by_rank.items()):
        held = head_range(geometry.kv_head_count, source_width, rank)
        # A rank's heads are consecutive, so those wanted of it are too.
        source = _Shard(shard_geometry(geometry, source_width), heads[0] - held.start)
        target = _Shard(shard_geometry(geometry, target_width), heads[0] - wanted.start)
        pairs = zip(source.places(len(heads)), target.places(len(heads)), strict=True)
        ranges = coalesced(RangeCopy(there, here, length) for (there, length), (here, _) in pairs)
        reads.append(ShardRead(rank, ranges))
    return reads


def _holder(kv_head_count: int, width: int, head: int, *, spread: int) -> int:
    if kv_head_count % width == 0:
        return head // (kv_head_count // width)
    copies = width // kv_head_count
    return head * copies + spread % copies


class _Shard(NamedTuple):
    geometry: KVGeometry
    first_head: int

    def places(self, head_count: int) -> Iterator[tuple[int, int]]:
        """(offset, length) of `head_count` heads' values in each layer and plane, then of their scales."""
        g = self.geometry
        vector_bytes = g.head_dim * STORED_BYTES[g.stored_dtype]
        yield from self._places(0, vector_bytes, head_count)
        if g.is_quantized:
            yield from self._places(g.values_bytes, SCALE_BYTES, head_count)

    def _places(self, base: int, entry_bytes: int, head_count: int) -> Iterator[tuple[int, int]]:
        g = self.geometry
        head_bytes = g.block_tokens * entry_bytes
        for plane in range(g.layer_count * g.planes):
            yield base + (plane * g.kv_head_count + self.first_head) * head_bytes, head_count * head_bytes
