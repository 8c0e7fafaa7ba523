"""Pure arithmetic on block lists and byte ranges: fewer, longer copies for the same bytes, and which bytes
of whose block a rank needs where the two workers of a hand-over are of different shapes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
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


# --- parts of one block -----------------------------------------------------------------------------


class Places(NamedTuple):
    """What a part of a block holds: some layers of the whole model, and some key-value heads of each."""

    layers: range
    heads: range


class PartRead(NamedTuple):
    """What one part of a block takes of one part of the other worker's block."""

    source_part: int
    ranges: Ranges
    """Empty: the two are the same part, and are copied whole."""


def whole_places(geometry: KVGeometry) -> Places:
    return Places(range(geometry.layer_count), range(geometry.kv_head_count))


def check_places(whole: KVGeometry, places: Places) -> None:
    """Raises ValueError: a part that is empty, or reaches outside the model."""
    pairs = (("layers", places.layers, whole.layer_count), ("heads", places.heads, whole.kv_head_count))
    for name, held, count in pairs:
        if not held or held.step != 1 or held.start < 0 or held.stop > count:
            raise ValueError(f"a part with {name} {held.start}..{held.stop - 1} of a model with {count}")


def part_geometry(whole: KVGeometry, places: Places) -> KVGeometry:
    """Geometry of a part's own block. The model's layout holds for it, with its own layers and heads only."""
    return msgspec.structs.replace(whole, layer_count=len(places.layers), kv_head_count=len(places.heads))


def part_reads(
    whole: KVGeometry, sources: Sequence[Places], target: Places, *, spread: int = 0
) -> list[PartRead]:
    """What the part `target` takes of every block from the parts of another worker, so that its block is what
    its rank would have computed itself. Every byte is taken once.

    `whole` is the geometry of the whole model. Where several source parts hold the same bytes, `spread`
    chooses among them, so that several readers do not all read the same one. Raises ValueError for bytes that
    no source part holds.
    """
    same = [part for part, places in enumerate(sources) if places == target]
    if same:
        return [PartRead(same[spread % len(same)], ())]
    pieces: dict[int, list[RangeCopy]] = {}
    for cell in _cells(sources, target):
        holders = [part for part, places in enumerate(sources) if _holds(places, cell)]
        if not holders:
            raise ValueError(
                f"no part holds layers {cell.layers.start}..{cell.layers.stop - 1}, "
                f"heads {cell.heads.start}..{cell.heads.stop - 1}"
            )
        part = holders[spread % len(holders)]
        there, here = (_offsets(whole, places, cell) for places in (sources[part], target))
        pairs = zip(there, here, strict=True)
        pieces.setdefault(part, []).extend(RangeCopy(at, to, length) for (at, length), (to, _) in pairs)
    return [PartRead(part, coalesced(found)) for part, found in sorted(pieces.items())]


def _cells(sources: Sequence[Places], target: Places) -> Iterator[Places]:
    """Pieces of `target`, none of which a source holds in part."""
    for layers in _cut(target.layers, [places.layers for places in sources]):
        for heads in _cut(target.heads, [places.heads for places in sources]):
            yield Places(layers, heads)


def _cut(whole: range, others: Sequence[range]) -> Iterator[range]:
    cuts = {whole.start, whole.stop}
    cuts |= {at for other in others for at in (other.start, other.stop) if at in whole}
    return (range(first, end) for first, end in pairwise(sorted(cuts)))


def _holds(places: Places, cell: Places) -> bool:
    """Whether `places` holds a cell, of which it holds all or nothing."""
    return cell.layers.start in places.layers and cell.heads.start in places.heads


def _offsets(whole: KVGeometry, places: Places, cell: Places) -> Iterator[tuple[int, int]]:
    """(offset, length) in the block of the part `places` of the cell's values in each layer and plane, and
    then of their scales."""
    geometry = part_geometry(whole, places)
    vector_bytes = whole.head_dim * STORED_BYTES[whole.stored_dtype]
    bases = [(0, vector_bytes)]
    if whole.is_quantized:
        bases.append((geometry.values_bytes, SCALE_BYTES))
    for base, entry_bytes in bases:
        head_bytes = whole.block_tokens * entry_bytes
        for layer in cell.layers:
            for plane in range(whole.planes):
                row = (layer - places.layers.start) * whole.planes + plane
                first = row * len(places.heads) + cell.heads.start - places.heads.start
                yield base + first * head_bytes, len(cell.heads) * head_bytes
