"""Copies between whole blocks in one piece of host memory and their parts in others.

numpy moves a part of a block with one call, however many pieces it has, and lets go of the GIL meanwhile.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.core.geometry import KVGeometry
from kv_transfer.layout import Places, part_geometry

Rows = npt.NDArray[np.uint8]
"""Blocks, or parts of blocks, one a row: [count, bytes]. A row may be longer than what it holds."""


def rows_at(address: int, row_bytes: int, count: int) -> Rows:
    """Memory as rows. The caller keeps it mapped for as long as they are used."""
    raw = (ctypes.c_uint8 * (row_bytes * count)).from_address(address)
    return np.frombuffer(memoryview(raw), np.uint8).reshape(count, row_bytes)


class PartCopies:
    """Copies between rows of whole blocks and rows of their parts. All rows are views of memory that others
    own, and which must stay mapped."""

    def __init__(self, whole: KVGeometry, wholes: Rows, parts: Sequence[tuple[Places, Rows]]) -> None:
        """`whole` is the geometry of the whole model, in which `parts` say their places."""
        self._pairs = [
            list(
                zip(
                    [_cut(values, places) for values in _values(wholes, whole)],
                    _values(rows, part_geometry(whole, places)),
                    strict=True,
                )
            )
            for places, rows in parts
        ]
        held = sum(len(places.layers) * len(places.heads) for places, _ in parts)
        self._has_replicas = held > whole.layer_count * whole.kv_head_count

    def gather(self, row: int, whole_row: int) -> None:
        """Copy row `row` of every part to its places in the whole block `whole_row`."""
        for pairs in self._pairs:
            for of_whole, of_part in pairs:
                of_whole[whole_row] = of_part[row]

    def scatter(self, whole_row: int, row: int) -> None:
        """Copy the places of every part in the whole block `whole_row` to row `row` of the part."""
        for pairs in self._pairs:
            for of_whole, of_part in pairs:
                of_part[row] = of_whole[whole_row]

    def agree(self, row: int, whole_row: int) -> bool:
        """Whether parts that hold the same places have the same bytes there, after `gather`."""
        return not self._has_replicas or all(
            np.array_equal(of_whole[whole_row], of_part[row])
            for pairs in self._pairs
            for of_whole, of_part in pairs
        )


def _values(rows: Rows, geometry: KVGeometry) -> list[Rows]:
    """Values of each block, and its scales if there are any: [count, layers, planes, heads, bytes]."""
    shape = (len(rows), geometry.layer_count, geometry.planes, geometry.kv_head_count, -1)
    ends = (geometry.values_bytes, geometry.block_bytes) if geometry.is_quantized else (geometry.block_bytes,)
    starts = (0, *ends[:-1])
    return [rows[:, start:end].reshape(shape) for start, end in zip(starts, ends, strict=True)]


def _cut(values: Rows, places: Places) -> Rows:
    layers, heads = places
    return values[:, layers.start : layers.stop, :, heads.start : heads.stop]
