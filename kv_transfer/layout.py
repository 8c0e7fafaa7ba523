"""Pure arithmetic on block lists and byte ranges: fewer, longer copies for the same bytes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
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


def runs(source_blocks: Sequence[int], local_blocks: Sequence[int]) -> Iterator[Run]:
    """The pairs (source_blocks[i], local_blocks[i]), in order, as the fewest runs that keep the order."""
    start = 0
    pairs = list(zip(source_blocks, local_blocks, strict=True))
    for i in range(1, len(pairs) + 1):
        is_end = i == len(pairs) or pairs[i] != (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1)
        if is_end:
            yield Run(*pairs[start], i - start)
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
