"""The leader's table of generations, for a worker some of whose parts are on other hosts.

Those have tables of their own. An entry must rise there before anything new is written into the block, so the
leader sends those that rose in front of every order, and in front of every read into such a part.
"""

from collections.abc import Iterable, MutableSequence
from typing import SupportsIndex, overload

import numpy as np
import numpy.typing as npt


class NotedGenerations(MutableSequence[int]):
    """A table that notes which entries rise. One thread writes, and another may take the notes."""

    def __init__(self, table: npt.NDArray[np.uint64]) -> None:
        self._table = table
        self._risen: dict[int, None] = {}

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> MutableSequence[int]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | MutableSequence[int]:
        return self._table[index].tolist()

    @overload
    def __setitem__(self, index: SupportsIndex, value: int) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[int]) -> None: ...
    def __setitem__(self, index: SupportsIndex | slice, value: int | Iterable[int]) -> None:
        if isinstance(index, slice) or not isinstance(value, int):
            raise TypeError("generations are written one by one")
        self._table[index] = value
        # Noted after the write, so that whoever takes the note reads this value or a later one.
        self._risen[int(index)] = None

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        raise TypeError("the table has one entry per block, always")

    def insert(self, index: int, value: int) -> None:
        raise TypeError("the table has one entry per block, always")

    def __len__(self) -> int:
        return len(self._table)

    def take(self) -> dict[int, int]:
        """Entries that rose since they were last taken, as they are now: block -> generation."""
        taken: dict[int, int] = {}
        while self._risen:
            block, _ = self._risen.popitem()
            taken[block] = int(self._table[block])
        return taken
