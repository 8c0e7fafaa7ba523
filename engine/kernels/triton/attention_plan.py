"""Tiles of queries and the keys that they meet: pure, in numpy.

Splitting keys trades partial sums (written and read again) for programs that run at once. The length of a
split is the shortest of a ladder with which the step has no more programs than `PROGRAMS_PER_SM` times the
device's multiprocessors. When even whole sequences give more, nothing is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kernels.interface import Span
from engine.kernels.triton.tiles import AttentionTile, Breadth

PROGRAMS_PER_SM: dict[Breadth, int] = {"decode": 4, "few": 4, "chunk": 2}
"""What fits at once. On an H200 64 decodes at 4k took 2 to 6 % longer with 8 to 32, short ones up to 40 %.
Chunks are worth splitting only where most of the device would idle."""
SPLIT_KEYS_MIN: dict[Breadth, int] = {"decode": 128, "few": 512, "chunk": 1024}
"""Fewest keys of a split. At 4 heads to a group, a decode's split of 128 keys reads 16 times what its partial
sums take."""
_FEW_ROWS = 64
TASK_FIELDS, MERGE_FIELDS = 8, 4
"""Sizes of the records that the kernel `attention` reads."""

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tasks:
    tasks: Int32Array
    """[n, TASK_FIELDS], longest first."""
    merges: Int32Array
    """[tiles, MERGE_FIELDS]"""
    slot_count: int
    """Partial sums; 0: no tile is split."""


def breadth_of(span: Span, group: int) -> Breadth:
    if span.token_count == 1:
        return "decode"
    return "few" if span.token_count * group <= _FEW_ROWS else "chunk"


def program_budget(breadth: Breadth, sm_count: int, pairs: int, warps: int = 4) -> int:
    """Tasks at which splitting ends. pairs: programs per task (key-value heads, times tiles of heads).
    warps: of a program; twice as many fit of small ones."""
    return max(1, PROGRAMS_PER_SM[breadth] * (1 if warps >= 4 else 2) * sm_count // pairs)


def make_tasks(
    spans: Sequence[Span],
    rows: Sequence[int],
    table_starts: Sequence[int],
    *,
    tile: AttentionTile,
    breadth: Breadth,
    window: int,
    budget: int,
) -> Tasks:
    """rows: of each span's first token in the batch. table_starts: of its block ids in the flat table."""
    tiles = _tiles(spans, rows, table_starts, tile.tokens)
    first_row, tokens, position, _ = tiles.T
    ends = np.maximum(position + tokens, 0)
    begins = np.maximum(position + 1 - window, 0) if window else np.zeros_like(ends)
    # Tiles of keys start at multiples of block_n, so that no two splits share one.
    begins = begins // tile.block_n * tile.block_n
    step = _split_keys(ends - begins, max(SPLIT_KEYS_MIN[breadth], tile.block_n), budget)
    counts = np.maximum(-(-(ends - begins) // step), 1)
    which = np.repeat(np.arange(len(tiles)), counts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    split = counts > 1
    slots = np.cumsum(np.where(split, counts, 0)) - np.where(split, counts, 0)
    tasks = np.empty((len(which), TASK_FIELDS), dtype=np.int32)
    tasks[:, :4] = tiles[which]
    tasks[:, 4] = begins[which] + part * step
    tasks[:, 5] = np.minimum(tasks[:, 4] + step, ends[which])
    tasks[:, 6] = np.where(split[which], slots[which] + part, -1)
    tasks[:, 7] = part == 0
    longest_first = np.argsort(tasks[:, 4] - tasks[:, 5], kind="stable")
    merges = np.stack((first_row, tokens, slots, np.where(split, counts, 0)), axis=1)
    return Tasks(tasks[longest_first], merges.astype(np.int32), int(counts[split].sum()))


def _tiles(
    spans: Sequence[Span], rows: Sequence[int], table_starts: Sequence[int], size: int
) -> npt.NDArray[np.int64]:
    """[tiles, 4]: first row, tokens, position of the first, start in the table."""
    counts = np.fromiter((span.token_count for span in spans), np.int64, len(spans))
    firsts = np.fromiter((span.first_position for span in spans), np.int64, len(spans))
    per_span = -(-counts // size)
    which = np.repeat(np.arange(len(spans)), per_span)
    offset = (np.arange(len(which)) - np.repeat(np.cumsum(per_span) - per_span, per_span)) * size
    tokens = np.minimum(counts[which] - offset, size)
    starts = np.asarray(table_starts, dtype=np.int64)[which]
    return np.stack((np.asarray(rows)[which] + offset, tokens, firsts[which] + offset, starts), axis=1)


def _split_keys(lengths: npt.NDArray[np.int64], least: int, budget: int) -> int:
    """Keys of a split: `least` times a power of two, or no less than any length."""
    longest = max(int(lengths.max(initial=1)), 1)
    step = least
    while step < longest:
        if int((-(-lengths // step)).clip(min=1).sum()) <= budget:
            return step
        step *= 2
    return step
