"""Cosines and sines of positions, kept from step to step."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.interface import RopeTables

_CHUNK = 256
"""Positions that are computed at once, in some tenths of a millisecond."""
_BYTES_MAX = 16 * 2**20

Rows = npt.NDArray[np.float32]
RowsOfRopes = dict[int, tuple[Rows, Rows]]
"""Cosines and sines of some positions, [n, half], by rope."""


def tables_of(rows: RowsOfRopes, count: int) -> RopeTables:
    """The first `count` rows as kernels take them."""
    return {
        rope: (torch.from_numpy(cos[:count]), torch.from_numpy(sin[:count]))
        for rope, (cos, sin) in rows.items()
    }


class RopeRows:
    """Rows of the rope tables for the positions up to some bound on memory, computed when they are first
    asked for; positions beyond it are computed each time."""

    def __init__(self, ropes: Callable[[Tensor], RopeTables], positions_max: int) -> None:
        """ropes: int64 [n] positions to their rows."""
        self._ropes = ropes
        sample = ropes(torch.zeros(1, dtype=torch.int64))
        self.halves = {rope: cos.shape[1] for rope, (cos, _) in sample.items()}
        row_bytes = sum(8 * half for half in self.halves.values())
        self._count = min(positions_max, _BYTES_MAX // max(1, row_bytes)) // _CHUNK * _CHUNK
        self._filled: set[int] = set()
        self._tables: RowsOfRopes = {
            rope: (self._empty(half), self._empty(half)) for rope, half in self.halves.items()
        }

    def room(self, count: int) -> RowsOfRopes:
        """Memory for so many rows, all zeros."""
        return {rope: (_zeros(count, half), _zeros(count, half)) for rope, half in self.halves.items()}

    def _empty(self, half: int) -> Rows:
        return np.empty((self._count, half), dtype=np.float32)  # memory is taken when it is written

    def copy_to(self, positions: list[int], out: RowsOfRopes) -> None:
        """Write the rows of the positions to the first rows of `out`."""
        count = len(positions)
        if max(positions) >= self._count:
            for rope, tables in self._ropes(torch.tensor(positions, dtype=torch.int64)).items():
                for table, to in zip(tables, out[rope], strict=True):
                    to[:count] = table.numpy()
            return
        for position in positions:
            if position // _CHUNK not in self._filled:
                self._fill(position // _CHUNK)
        for rope, tables in self._tables.items():
            for table, to in zip(tables, out[rope], strict=True):
                if count == 1:
                    to[0] = table[positions[0]]
                else:
                    table.take(positions, axis=0, out=to[:count])

    def copy_ranges(self, ranges: Sequence[range], out: RowsOfRopes) -> None:
        """Write the rows of ranges of positions to the first rows of `out`, one range after another."""
        start = 0
        for positions in ranges:
            end = start + len(positions)
            if positions.stop > self._count:
                found = self._ropes(torch.arange(positions.start, positions.stop, dtype=torch.int64))
                for rope, tables in found.items():
                    for table, to in zip(tables, out[rope], strict=True):
                        to[start:end] = table.numpy()
            else:
                self._fill_chunks(positions)
                for rope, own in self._tables.items():
                    for rows, to in zip(own, out[rope], strict=True):
                        to[start:end] = rows[positions.start : positions.stop]
            start = end

    def _fill_chunks(self, positions: range) -> None:
        for chunk in range(positions.start // _CHUNK, (positions.stop - 1) // _CHUNK + 1):
            if chunk not in self._filled:
                self._fill(chunk)

    def _fill(self, chunk: int) -> None:
        first = chunk * _CHUNK
        own = slice(first, first + _CHUNK)
        computed = self._ropes(torch.arange(first, first + _CHUNK, dtype=torch.int64))
        for rope, (cos, sin) in computed.items():
            to_cos, to_sin = self._tables[rope]
            to_cos[own], to_sin[own] = cos.numpy(), sin.numpy()
        self._filled.add(chunk)


def _zeros(rows: int, columns: int) -> Rows:
    return np.zeros((rows, columns), dtype=np.float32)
