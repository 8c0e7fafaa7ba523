"""The numbers that change from one decode step to the next, in memory that stays where it is."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.execution.rope_rows import RopeRows, tables_of
from engine.kernels.interface import RopeTables, Span

_SHARING_MAX, _BLOCKS_MAX = 4, 2**20
_SLACK = 4
"""Blocks by which a sequence may grow before the tables are laid out anew."""


def table_blocks_max(pool_blocks: int) -> int:
    """Block ids that a step has room for: so many times the pool's blocks, since sequences share prefixes."""
    return min(_BLOCKS_MAX, _SHARING_MAX * pool_blocks)


class DecodeInputs:
    """Tokens, positions, block tables and rope rows of a step of decodes. What did not change since the step
    before is not written again: block tables mostly grow by a block now and then."""

    def __init__(
        self, *, sequences_max: int, blocks_max: int, block_tokens: int, pool_blocks: int, ropes: RopeRows
    ) -> None:
        """blocks_max: of all sequences of a step together. pool_blocks: ids are below it."""
        self._blocks_max, self._block_tokens, self._pool_blocks = blocks_max, block_tokens, pool_blocks
        self.tokens = torch.zeros(sequences_max, dtype=torch.int64)
        self.spans = np.zeros((sequences_max, 4), dtype=np.int32)
        self.spans[:, 1] = 1
        self.spans[:, 2] = np.arange(sequences_max)
        self.tables = np.zeros(blocks_max, dtype=np.int32)
        self._ropes = ropes
        self._tokens = self.tokens.numpy()
        self._rows = ropes.room(sequences_max)
        self._written: list[tuple[int, ...]] = []
        """Block ids of each row as they are in the tables."""
        self._room: list[int] = []
        """Blocks that each row's place has room for."""

    def ropes(self, count: int) -> RopeTables:
        """The tables of the first `count` rows, whose numbers `fill` writes."""
        return tables_of(self._rows, count)

    def fill(self, tokens: Sequence[int], spans: Sequence[Span]) -> bool:
        """False: the block tables are too many. Raises IndexError: a position or block that there is not,
        since the kernels write wherever they are told."""
        count = len(spans)
        positions = [span.first_position for span in spans]
        for span in spans:
            if not 0 <= span.first_position < len(span.block_ids) * self._block_tokens:
                raise IndexError(f"position {span.first_position} of {len(span.block_ids)} blocks")
        if not self._fill_tables(spans):
            return False
        self._tokens[:count] = tokens
        self.spans[:count, 0] = positions
        self._ropes.copy_to(positions, self._rows)
        return True

    def _fill_tables(self, spans: Sequence[Span]) -> bool:
        if len(spans) != len(self._written):
            return self._lay_out(spans)
        for row, span in enumerate(spans):
            written, ids = self._written[row], span.block_ids
            if ids is written or ids == written:
                continue
            known = len(written)
            if len(ids) > self._room[row] or ids[:known] != written:
                return self._lay_out(spans)
            start = int(self.spans[row, 3])
            self._write(start + known, ids[known:])
            self._written[row] = ids
        return True

    def _lay_out(self, spans: Sequence[Span]) -> bool:
        self._written, self._room = [], []
        start = 0
        for row, span in enumerate(spans):
            room = len(span.block_ids) + _SLACK
            if start + room > self._blocks_max:
                self._written, self._room = [], []
                return False
            self.spans[row, 3] = start
            self._write(start, span.block_ids)
            self._written.append(span.block_ids)
            self._room.append(room)
            start += room
        return True

    def _write(self, start: int, ids: tuple[int, ...]) -> None:
        if min(ids) < 0 or max(ids) >= self._pool_blocks:
            self._written, self._room = [], []
            raise IndexError(f"blocks {min(ids)} to {max(ids)} of {self._pool_blocks}")
        self.tables[start : start + len(ids)] = ids
