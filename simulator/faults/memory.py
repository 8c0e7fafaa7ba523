"""The memory of one device, or of the devices of a worker's ranks: the real bytes of small KV blocks.

A block holds a number, its *cell*, for every position, and each vector of the block is that number with the
place of the vector (layer, plane, head) added to it. So bytes that were copied from a wrong place of the
right block are as wrong as those of another block.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.core.ids import SeqKey
from kv_transfer.layout import Places, Ranges, part_geometry, whole_places
from kv_transfer.part_copies import PartCopies, Rows
from simulator.faults.scenario import GEOMETRY

Cells = npt.NDArray[np.int64]

WHOLE = (whole_places(GEOMETRY),)
"""The one part of a device that holds whole blocks."""
VECTOR_BYTES = GEOMETRY.block_bytes // GEOMETRY.vector_count
NEVER_WRITTEN, TORN = -1, -2

assert np.dtype(np.int64).itemsize == VECTOR_BYTES


class DeviceMemory:
    """The KV pools of one worker's ranks (the cells of each block, and who wrote them, for the history of a
    failure), its swap space, and what its executor keeps of sequences from step to step."""

    __slots__ = (
        "_copies",
        "_marks",
        "_parts",
        "_rows",
        "block_tokens",
        "histories",
        "places",
        "sampled",
        "step_number",
        "swap",
        "writers",
    )

    def __init__(self, block_count: int, places: Sequence[Places] = WHOLE) -> None:
        """`places` are what each rank holds of every block, by rank."""
        self.places = tuple(places)
        self.block_tokens = GEOMETRY.block_tokens
        self._marks = [_marks(one) for one in places]
        self._parts: list[Cells] = [
            np.full((block_count, len(marks), self.block_tokens), NEVER_WRITTEN, np.int64)
            for marks in self._marks
        ]
        self._rows: list[Rows] = [
            cells.reshape(block_count, -1).view(np.uint8).reshape(block_count, part_bytes(one))
            for cells, one in zip(self._parts, places, strict=True)
        ]
        self._copies: dict[DeviceMemory, PartCopies] = {}
        """Copies between these parts and the whole blocks of another memory."""
        self.writers: list[str] = ["nobody"] * block_count
        self.swap: dict[int, tuple[list[Cells], str]] = {}
        self.histories: dict[SeqKey, list[int]] = {}
        self.sampled: dict[SeqKey, int] = {}
        """The newest token of each sequence in the last step."""
        self.step_number = 0

    # --- the model ----------------------------------------------------------------------------------

    def write(self, part: int, block: int, offset: int, cell: int) -> None:
        """Write the cell of one position of a block, as the rank of a part does."""
        self._parts[part][block, :, offset] = self._marks[part] + cell

    def holds(self, part: int, block_ids: Sequence[int], cells: Cells) -> bool:
        """Return whether a part of these blocks has exactly these cells at the first positions."""
        found = self._vectors(part, block_ids, len(cells))
        return bool((found == self._marks[part][:, None] + cells).all())

    def read(self, part: int, block_ids: Sequence[int], cells: Sequence[int], count: int) -> list[int]:
        """Return `count` cells of the vectors that first differ from the expected ones."""
        found = self._vectors(part, block_ids, count) - self._marks[part][:, None]
        lists: list[list[int]] = found.tolist()
        return next((one for one in lists if one != list(cells[:count])), lists[0])

    def _vectors(self, part: int, block_ids: Sequence[int], count: int) -> Cells:
        """Return what is at the first positions: [vectors of a position, count]."""
        held = self._parts[part][list(block_ids[: -(-count // self.block_tokens)])]
        return held.transpose(1, 0, 2).reshape(held.shape[1], -1)[:, :count]

    # --- blocks -------------------------------------------------------------------------------------

    def move(self, source_block: int, block: int, part: int) -> None:
        """Copy a part of one block to another one of the same memory."""
        self._parts[part][block] = self._parts[part][source_block]

    def save(self, slot: int, block: int) -> None:
        """Copy a block to the swap space."""
        self.swap[slot] = ([cells[block].copy() for cells in self._parts], self.writers[block])

    def bring_back(self, slot: int, block: int, part: int) -> None:
        saved, self.writers[block] = self.swap[slot]
        self._parts[part][block] = saved[part]

    def copy_block(self, source: "DeviceMemory", source_block: int, local_block: int) -> None:
        """Copy a whole block. At least one of the two memories holds whole blocks, or both the same parts."""
        if self.places == source.places:
            for mine, theirs in zip(self._parts, source._parts, strict=True):
                mine[local_block] = theirs[source_block]
        elif source.places == WHOLE:
            self._copies_with(source).scatter(source_block, local_block)
        else:
            source._copies_with(self).gather(source_block, local_block)
        self.writers[local_block] = f"read of {source.writers[source_block]}"

    def copy_part(
        self, source: "DeviceMemory", parts: tuple[int, int], ranges: Ranges, blocks: tuple[int, int]
    ) -> None:
        """Copy the ranges, or all, of a part of a block. `parts` and `blocks` are (source, local)."""
        theirs, mine = source._rows[parts[0]][blocks[0]], self._rows[parts[1]][blocks[1]]
        if not ranges:
            mine[:] = theirs
        for piece in ranges:
            mine[piece.local : piece.local + piece.length] = theirs[
                piece.source : piece.source + piece.length
            ]
        self.writers[blocks[1]] = f"read of {source.writers[blocks[0]]}"

    def _copies_with(self, whole: "DeviceMemory") -> PartCopies:
        assert whole.places == WHOLE
        if whole not in self._copies:
            parts = list(zip(self.places, self._rows, strict=True))
            self._copies[whole] = PartCopies(GEOMETRY, whole._rows[0], parts)
        return self._copies[whole]

    def checksum_of(self, block: int) -> int:
        """Return a checksum that is never 0, because 0 means none. The memory holds whole blocks."""
        assert self.places == WHOLE
        return zlib.crc32(self._rows[0][block].tobytes()) | 1

    # --- faults -------------------------------------------------------------------------------------

    @property
    def written_blocks(self) -> list[int]:
        """Blocks that hold something."""
        return np.flatnonzero(self._parts[0][:, 0, 0] != NEVER_WRITTEN).tolist()

    def forget(self, block: int) -> None:
        for cells in self._parts:
            cells[block] = NEVER_WRITTEN

    def flip(self, block: int) -> None:
        self._parts[0][block, 0, 0] ^= 1

    def tear(self, block: int) -> None:
        self._parts[-1][block, -1, -1] = TORN


def part_bytes(places: Places) -> int:
    return part_geometry(GEOMETRY, places).block_bytes


def _marks(places: Places) -> Cells:
    """Return a number for each vector of a position: its place in the whole model."""
    planes, heads = GEOMETRY.planes, GEOMETRY.kv_head_count
    return np.array(
        [
            (layer * planes + plane) * heads + head
            for layer in places.layers
            for plane in range(planes)
            for head in places.heads
        ]
    )
