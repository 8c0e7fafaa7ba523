"""Millions of block hashes in one array: an open-addressing table from hash to set of holders.

An entry is one 64-bit number: `KEY_BITS` of the block's hash and the id of the set. Two blocks with the
same key count as one; a block that is not there is taken for another one with a chance of 3 in 10**7 at 10
million blocks, which costs a recomputation and nothing else. Linear probing, at most `LOAD_MAX` full: 12
to 25 bytes per block, and 37 for a moment while it grows.

It grows while it is used: every operation moves some entries, so that none waits for all. Entries are
never taken out of an array: those that nobody holds any more are left behind when it grows.
"""

import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton.core.ids import BlockHash
from router.decisions.holder_sets import SETS_MAX, HolderSets

LOAD_MAX = 0.65
SLOTS_FIRST = 1024
SCALAR_MAX = 96
"""Up to here a loop in Python is quicker than what arrays cost to begin with."""

MOVED_MIN, MOVED_PER_KEY = 1024, 4
ID_BITS = 18
KEY_BITS = 63 - ID_BITS
ID_MASK = (1 << ID_BITS) - 1
assert SETS_MAX <= ID_MASK

Numbers = npt.NDArray[np.int64]
_WINDOW: Numbers = np.arange(1, 9)


def keys_of(hashes: Sequence[BlockHash]) -> Numbers:
    words = np.frombuffer(b"".join(hashes), np.dtype("<u8"))[::2]
    return np.maximum((words >> np.uint64(64 - KEY_BITS)).astype(np.int64), 1)  # 0: the slot is empty


def key_of(block_hash: BlockHash) -> int:
    """As `keys_of`, for few."""
    return int.from_bytes(block_hash[:8], "little") >> 64 - KEY_BITS or 1


class _Slots:
    """The array. Memory that was never written costs nothing, and can be given back piece by piece. Of
    small pages: the kernel was seen to stop for half a second to make a huge one."""

    def __init__(self, size: int) -> None:
        """`size`: a power of two."""
        self.size, self.mask = size, size - 1
        self.used = 0
        """Slots with a key."""
        self._given_back = 0
        self._map = mmap.mmap(-1, 8 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.entries: Numbers = np.frombuffer(self._map, np.int64)
        # Single items of a view cost a third of an array's.
        self.entry_at: Any = memoryview(self._map).cast("q")

    def find_one(self, key: int) -> int:
        """Where the key is, or ~(where it would go)."""
        entry_at, mask = self.entry_at, self.mask
        at = key & mask
        while (entry := entry_at[at]) >> ID_BITS != key:
            if not entry:
                return ~at
            at = (at + 1) & mask
        return at

    def find(self, keys: Numbers) -> Numbers:
        """Where the keys are; -1: not there."""
        at = keys & self.mask
        entries = self.entries[at]
        is_hit = entries >> ID_BITS == keys
        found = np.where(is_hit, at, -1)
        left = np.flatnonzero(~is_hit & (entries != 0))
        at = at[left]
        while len(left):
            wanted = keys[left]
            slots = (at[:, None] + _WINDOW) & self.mask
            entries = self.entries[slots]
            is_hit = entries >> ID_BITS == wanted[:, None]
            rows, first = self._first(is_hit | (entries == 0))
            hits = is_hit[rows, first]
            found[left[hits]] = slots[rows, first][hits]
            goes_on = ~hits & (entries[rows, first] != 0)
            left, at = left[goes_on], slots[goes_on, -1]
        return found

    def insert(self, keys: Numbers, ids: Numbers) -> None:
        """Make rows for keys that are not there, each once."""
        self.used += len(keys)
        entries = keys << ID_BITS | ids
        at = keys & self.mask
        while len(at):
            is_free = self.entries[at] == 0
            self.entries[at[is_free]] = entries[is_free]  # of several with one slot, the last gets it
            goes_on = self.entries[at] != entries
            entries, at = entries[goes_on], at[goes_on]
            slots = (at[:, None] + _WINDOW) & self.mask
            at = slots[self._first(self.entries[slots] == 0)]

    @staticmethod
    def _first(is_so: npt.NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
        """(row, column of the first that is true, else of the last) per row; an index of all rows."""
        columns = is_so.argmax(axis=1)
        rows = np.arange(len(is_so))
        return rows, np.where(is_so[rows, columns], columns, is_so.shape[1] - 1)

    def give_back(self, end: int) -> None:
        """The memory of slots before `end`, which are empty from now on."""
        self.entries[self._given_back : end] &= ~ID_MASK
        end -= end % (mmap.PAGESIZE // 8)
        if end > self._given_back:
            start = 8 * self._given_back
            self._map.madvise(mmap.MADV_DONTNEED, start, 8 * end - start)
            self._given_back = end

    @property
    def byte_count(self) -> int:
        return 8 * (self.size - self._given_back)


class Update(NamedTuple):
    steps: list[tuple[int, int, int]]
    """(bits before, bits after, number of blocks)"""
    changed: Numbers
    """The rows of the blocks whose holders changed."""


class _Step:
    """What becomes of all blocks with one set."""

    __slots__ = ("after", "before", "blocks", "id_after")

    def __init__(self, before: int, after: int, id_after: int) -> None:
        self.before, self.after, self.id_after = before, after, id_after
        self.blocks = 0


class PrefixTable:
    def __init__(self, sets: HolderSets) -> None:
        self._sets = sets
        self._slots = _Slots(SLOTS_FIRST)
        self._old: _Slots | None = None
        """What is being moved: from `_moved` on its entries count, unless `_slots` has them."""
        self._moved = 0
        self._halves: tuple[_Slots, ...] = (self._slots,)
        self.block_count = 0
        """Rows with a holder, or left behind by a worker that was lost."""

    def get_one(self, key: int) -> int:
        """Id of the holders of one block."""
        for slots in self._halves:
            if (at := slots.find_one(key)) >= 0 and (set_id := slots.entry_at[at] & ID_MASK):
                return set_id
        return 0

    def get(self, keys: Numbers) -> Numbers:
        """Ids of the holders of many blocks."""
        _, ids = self._look_up(self._slots, keys)
        if self._old is not None and len(missing := np.flatnonzero(ids == 0)):
            _, ids[missing] = self._look_up(self._old, keys[missing])
        return ids

    def update(self, keys: Numbers, change: Callable[[int], int]) -> Update:
        """Change the holders of blocks; `change` makes new bits of old ones."""
        self._make_room(len(keys))
        if len(keys) <= SCALAR_MAX:
            return self._update_some(dict.fromkeys(keys.tolist()), change)
        return self._update_many(np.unique(keys), change)

    def update_blocks(self, hashes: Sequence[BlockHash], change: Callable[[int], int]) -> Update:
        """The same, of blocks by their hashes."""
        if len(hashes) > SCALAR_MAX:
            return self.update(keys_of(hashes), change)
        self._make_room(len(hashes))
        return self._update_some(dict.fromkeys(map(key_of, hashes)), change)

    def move_some(self, count: int = MOVED_MIN) -> None:
        """A step of growing, if that is under way."""
        old = self._old
        if old is None:
            return
        start, end = self._moved, min(old.size, self._moved + count)
        while end < old.size and old.entry_at[end - 1]:
            end += 1  # a run of entries goes as a whole: half of it would not be found
        entries = old.entries[start:end]
        entries = entries[entries & ID_MASK != 0]
        ids = entries & ID_MASK
        is_empty = self._sets.are_empty(ids)
        self._drop(ids[is_empty])
        self._slots.insert(entries[~is_empty] >> ID_BITS, ids[~is_empty])
        self._moved = end
        old.give_back(end)
        if end == old.size:
            self._set_halves(self._slots, None)

    @property
    def byte_count(self) -> int:
        """Memory of the arrays."""
        return self._slots.byte_count + (self._old.byte_count if self._old is not None else 0)

    def check(self) -> None:
        """Raises AssertionError if the array disagrees with itself or with the sets' counts."""
        assert self._slots.used == np.count_nonzero(self._slots.entries)
        for slots in self._halves:
            there = np.flatnonzero(slots.entries & ID_MASK)
            assert (slots.find(slots.entries[there] >> ID_BITS) == there).all()
        keys = np.concatenate([x.entries[x.entries & ID_MASK != 0] >> ID_BITS for x in self._halves])
        assert len(np.unique(keys)) == len(keys) == self.block_count
        self._sets.check(self._all_ids())

    def counts_by_bits(self) -> Counter[int]:
        """How many blocks have which bits. Costs as much as the table is large."""
        counts: Counter[int] = Counter()
        for set_id, count in zip(*np.unique(self._all_ids(), return_counts=True), strict=True):
            counts[self._sets.bits(int(set_id))] += int(count)
        return counts

    def _all_ids(self) -> Numbers:
        ids = np.concatenate([slots.entries & ID_MASK for slots in self._halves])
        return ids[ids != 0]

    def _look_up(self, slots: _Slots, keys: Numbers) -> tuple[Numbers, Numbers]:
        """(where, or -1; id of the holders, or 0) of each key."""
        at = slots.find(keys)
        return at, np.where(at >= 0, slots.entries[at] & ID_MASK, 0)

    def _set_halves(self, slots: _Slots, old: _Slots | None) -> None:
        self._slots, self._old, self._moved = slots, old, 0
        self._halves = (slots,) if old is None else (slots, old)

    # --- growing ----------------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        if self._old is not None:
            self.move_some(max(MOVED_MIN, MOVED_PER_KEY * count))
        while self._slots.used + count > LOAD_MAX * self._slots.size:
            if self._old is not None:
                self.move_some(self._old.size)
            else:
                self._begin_to_grow(count)

    def _begin_to_grow(self, count: int) -> None:
        """Begin to move to a table that will hold all present entries, and those that come while they are
        moved."""
        meanwhile = count + self._slots.size // MOVED_PER_KEY
        wanted = (self.block_count + meanwhile) / (LOAD_MAX - 0.05)
        self._set_halves(_Slots(max(SLOTS_FIRST, 1 << int(wanted).bit_length())), self._slots)

    def _drop(self, ids: Numbers) -> None:
        """Blocks with these sets are gone."""
        self.block_count -= len(ids)
        for set_id, count in zip(*np.unique(ids, return_counts=True), strict=True):
            self._sets.count(int(set_id), -int(count))

    # --- changing ---------------------------------------------------------------------------------

    def _update_some(self, keys: Iterable[int], change: Callable[[int], int]) -> Update:
        slots, old, sets = self._slots, self._old, self._sets
        steps: dict[int, _Step] = {}
        changed: list[int] = []
        for key in keys:
            at = slots.find_one(key)
            set_id = slots.entry_at[at] & ID_MASK if at >= 0 else 0
            if old is not None and not set_id and (old_at := old.find_one(key)) >= 0:
                set_id = old.entry_at[old_at] & ID_MASK
                old.entry_at[old_at] = key << ID_BITS
            step = steps.get(set_id)
            if step is None:
                step = steps[set_id] = self._step(set_id, change)
                sets.count(step.id_after, 1)  # held while others are made
            step.blocks += 1
            if step.id_after != set_id:
                changed.append(key)
            if at >= 0:
                slots.entry_at[at] = key << ID_BITS | step.id_after
            elif step.id_after:
                slots.entry_at[~at] = key << ID_BITS | step.id_after
                slots.used += 1
        for set_id, step in steps.items():
            sets.count(step.id_after, step.blocks - 1)
            sets.count(set_id, -step.blocks)
        return self._updated(steps, np.array(changed, np.int64))

    def _update_many(self, keys: Numbers, change: Callable[[int], int]) -> Update:
        slots, sets = self._slots, self._sets
        at, ids = self._look_up(slots, keys)
        if self._old is not None:
            missing = np.flatnonzero(ids == 0)
            old_at, ids[missing] = self._look_up(self._old, keys[missing])
            self._old.entries[old_at[old_at >= 0]] &= ~ID_MASK
        befores, which, counts = np.unique(ids, return_inverse=True, return_counts=True)
        steps: dict[int, _Step] = {}
        for set_id, count in zip(befores.tolist(), counts.tolist(), strict=True):
            step = steps[set_id] = self._step(set_id, change)
            step.blocks = count
            sets.count(step.id_after, count)
        for set_id, step in steps.items():
            sets.count(set_id, -step.blocks)
        afters = np.array([step.id_after for step in steps.values()], np.int64)[which]
        is_known = at >= 0
        slots.entries[at[is_known]] = (keys << ID_BITS | afters)[is_known]
        is_new = ~is_known & (afters != 0)
        slots.insert(keys[is_new], afters[is_new])
        return self._updated(steps, keys[afters != ids])

    def _step(self, set_id: int, change: Callable[[int], int]) -> _Step:
        before = self._sets.bits(set_id)
        after = change(before)
        id_after = self._sets.id_of(after, or_else=set_id) if after != before or not after else set_id
        return _Step(before, self._sets.bits(id_after) if id_after == set_id else after, id_after)

    def _updated(self, steps: dict[int, _Step], changed: Numbers) -> Update:
        for set_id, step in steps.items():
            self.block_count += ((step.id_after != 0) - (set_id != 0)) * step.blocks
        return Update([(step.before, step.after, step.blocks) for step in steps.values()], changed)
