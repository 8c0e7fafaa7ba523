"""The workers that hold a block, as a number: sets of workers that are met often, each kept once.

A block's entry in the prefix table is the id of its set, so that millions of blocks share a few
thousand sets. A set is a row of bits, two for each worker's slot: it said that it holds the block, or
it is expected to. Losing a worker clears its column in all rows and touches no block.
"""

import numpy as np
import numpy.typing as npt

from baton.core.errors import SetupError

SETS_MAX = 200_000
"""Different sets at once. While there are as many, a block that would need another keeps the one it has:
what the index says are hints, and a wrong one costs a recomputation."""

SLOTS_MAX = 4096
SETS_FIRST = 256

Ids = npt.NDArray[np.int64]


class HolderSets:
    """Id 0 is the empty set. An id that no block has is given out again."""

    def __init__(self) -> None:
        self._rows = np.zeros((SETS_FIRST, 1), np.uint64)
        self._counts = np.zeros(SETS_FIRST, np.int64)
        """Blocks that have the set."""
        self._ids: dict[int, int] = {0: 0}
        """A set with these bits. Others with the same bits may exist since a column was cleared."""
        self._unused: list[int] = []
        self._next = 1
        self._has_garbage = False
        self._free_slots: list[int] = []
        self._slot_count = 0

    # --- slots ------------------------------------------------------------------------------------

    def open_slot(self) -> int:
        """Raises SetupError if there are too many workers."""
        if self._free_slots:
            return self._free_slots.pop()
        if self._slot_count >= SLOTS_MAX:
            raise SetupError(f"a router follows at most {SLOTS_MAX} workers")
        self._slot_count += 1
        words = self._rows.shape[1]
        if 2 * self._slot_count > 64 * words:
            wider = np.zeros((len(self._rows), 2 * words), np.uint64)
            wider[:, :words] = self._rows
            self._rows = wider
        return self._slot_count - 1

    def close_slot(self, slot: int) -> None:
        self.clear(3 << 2 * slot)
        self._free_slots.append(slot)

    def clear(self, bits: int) -> None:
        """Take these bits, of one slot, out of all sets."""
        word = (bits.bit_length() - 1) // 64
        self._rows[: self._next, word] &= ~np.uint64(bits >> 64 * word)
        self._ids = {0: 0}

    # --- sets -------------------------------------------------------------------------------------

    def bits(self, set_id: int) -> int:
        return int.from_bytes(self._rows[set_id].tobytes(), "little")

    def are_empty(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return np.bitwise_or.reduce(self._rows[ids], axis=1) == 0

    def id_of(self, bits: int, *, or_else: int) -> int:
        """The number of the set with these bits; `or_else` if there is no room for one more. A new one must
        be counted before the next is asked for."""
        found = self._ids.get(bits)
        return self._add(bits, or_else=or_else) if found is None else found

    def count(self, set_id: int, by: int) -> None:
        """So many more blocks have this set."""
        if set_id:
            self._counts[set_id] += by
            if not self._counts[set_id]:
                self._has_garbage = True

    def _add(self, bits: int, *, or_else: int) -> int:
        set_id = self._unused.pop() if self._unused else self._another_id()
        if set_id is None:
            return or_else
        row = bits.to_bytes(8 * self._rows.shape[1], "little")
        self._rows[set_id] = np.frombuffer(row, np.uint64)
        self._ids[bits] = set_id
        return set_id

    def _another_id(self) -> int | None:
        if self._next == len(self._rows):
            if self._has_garbage:
                self._collect()
            if self._unused:
                return self._unused.pop()
            if not self._grow():
                return None
        self._next += 1
        return self._next - 1

    def _collect(self) -> None:
        """Find the ids that no block has."""
        self._has_garbage = False
        for set_id in (np.flatnonzero(self._counts[1 : self._next] == 0) + 1).tolist():
            bits = self.bits(set_id)
            if self._ids.get(bits) == set_id:
                del self._ids[bits]
            self._unused.append(set_id)

    def _grow(self) -> bool:
        size, words = self._rows.shape
        more = min(SETS_MAX, 2 * size) - size
        self._rows = np.concatenate([self._rows, np.zeros((more, words), np.uint64)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        return more > 0

    @property
    def byte_count(self) -> int:
        """Memory of all sets, of the dictionary by estimate."""
        words = self._rows.shape[1]
        return self._rows.nbytes + self._counts.nbytes + len(self._ids) * (140 + 8 * words)

    def check(self, ids: Ids) -> None:
        """`ids`: of all blocks."""
        counts = np.bincount(ids, minlength=len(self._counts))
        assert (counts[1:] == self._counts[1:]).all()
        assert not self._rows[0].any()
        assert all(self.bits(set_id) == bits for bits, set_id in self._ids.items())
        assert not self._counts[self._unused].any()
