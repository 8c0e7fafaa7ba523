"""Pure arithmetic on block lists: fewer, longer copies for the same bytes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """`block_count` consecutive source blocks that go to as many consecutive local blocks."""

    source: int
    local: int
    block_count: int


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
