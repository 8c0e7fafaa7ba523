"""The prefix index: which worker holds which prefix, from block events and from recent placements.

An inverted index: block hash -> set of workers, in `prefix_table` and `holder_sets`.
Hashes are chained, so the longest cached prefix over all workers is one walk along the prompt's hashes
that ends where no worker is left.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from baton.core.ids import BlockHash, WorkerId
from baton.core.messages import BlockEvents
from router.decisions.holder_sets import HolderSets
from router.decisions.prefix_table import SCALAR_MAX, Numbers, PrefixTable, Update, key_of, keys_of

EXPECTED_S = 10.0
"""How long blocks that a placed sequence will leave behind count as cached without being confirmed. A
block that is confirmed, removed and expected again meanwhile counts until the earlier time."""

RESYNC_AGAIN_S = 5.0
"""A requested snapshot that has not come within this time is requested again."""

EXPIRED_AT_ONCE_MAX = 4096
"""Largest number of blocks that expire in one call. The rest is due at once."""

FIRST_BLOCKS = 8
"""First blocks of a long prompt, which are looked at one by one: most prompts that nobody holds end there."""

PROBED_MIN = 32
"""The end of what anybody holds is searched until so few blocks are left in doubt, since arrays look at these
in less time than further probes take."""


class _Holder:
    __slots__ = ("asked_at_s", "expected_bit", "next_number", "slot", "stored_bit", "stored_count")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.stored_bit, self.expected_bit = 1 << 2 * slot, 2 << 2 * slot
        self.stored_count = 0
        self.next_number: int | None = None
        """None: unknown until a snapshot comes."""
        self.asked_at_s: float | None = None


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: dict[WorkerId, _Holder] = {}
        self._worker_of_slot: dict[int, WorkerId] = {}
        self._sets = HolderSets()
        self._table = PrefixTable(self._sets)
        self._stored_bits = 0
        """Those of all slots."""
        self.on_placed: Callable[[WorkerId, Sequence[BlockHash]], None] | None = None
        """Called with the blocks that this router's own sequences will leave behind."""
        self._placed: list[tuple[WorkerId, _Holder, Sequence[BlockHash], float]] = []
        """Not noted yet."""
        self._expiries: deque[tuple[float, WorkerId, _Holder, Numbers]] = deque()

    def add_worker(self, worker_id: WorkerId) -> None:
        """A new session: nothing is known before its snapshot. The worker must not be known.

        Raises SetupError if there are too many.
        """
        assert worker_id not in self._holders
        holder = self._holders[worker_id] = _Holder(self._sets.open_slot())
        self._worker_of_slot[holder.slot] = worker_id
        self._stored_bits |= holder.stored_bit

    def remove_worker(self, worker_id: WorkerId) -> None:
        holder = self._holders.pop(worker_id)
        del self._worker_of_slot[holder.slot]
        self._stored_bits &= ~holder.stored_bit
        self._sets.close_slot(holder.slot)

    def apply(self, worker_id: WorkerId, events: BlockEvents, *, now_s: float) -> bool:
        """Returns True when the router must ask the worker for a snapshot.

        After a gap the worker's blocks are unknown, which counts as none, until the snapshot comes.
        A repeated message changes nothing.
        """
        self.note_placed()
        holder = self._holders[worker_id]
        number = events.sequence_number
        if events.is_snapshot:
            if holder.next_number is None or number >= holder.next_number:
                self._forget_stored(holder)
                self._store(holder, events.stored)
                holder.next_number = number + 1
                holder.asked_at_s = None
            return False
        if holder.next_number is None:
            return self._ask(holder, now_s)
        if number < holder.next_number:
            return False
        if number > holder.next_number:
            self._forget_stored(holder)
            holder.next_number = None
            return self._ask(holder, now_s)
        holder.next_number += 1
        self._remove(holder, events.removed)
        self._store(holder, events.stored)
        return False

    def placed(self, worker_id: WorkerId, hashes: Sequence[BlockHash], *, now_s: float) -> None:
        """As `expect`, for a sequence that this router placed, whose workers should not wait for it: it is
        noted before the next event, or the next look at the index."""
        if hashes:
            self._placed.append((worker_id, self._holders[worker_id], hashes, now_s))

    def note_placed(self) -> None:
        """Apply what `placed` put off."""
        placed, self._placed = self._placed, []
        for worker_id, holder, hashes, now_s in placed:
            if self._holders.get(worker_id) is holder:
                if self.on_placed is not None:
                    self.on_placed(worker_id, hashes)
                self.expect(worker_id, hashes, now_s=now_s)

    def expect(self, worker_id: WorkerId, hashes: Sequence[BlockHash], *, now_s: float) -> None:
        """Expect these blocks at the worker, where a sequence with them was just placed, so that its siblings
        match."""
        if not hashes:
            return
        holder = self._holders[worker_id]
        known, expected = holder.stored_bit | holder.expected_bit, holder.expected_bit
        update = self._table.update_blocks(hashes, lambda bits: bits if bits & known else bits | expected)
        if len(update.changed):
            self._expiries.append((now_s + EXPECTED_S, worker_id, holder, update.changed))

    def expire(self, now_s: float) -> None:
        """Give up the expectations that nothing confirmed in time, and go on with what is spread over
        time."""
        if self._placed:
            self.note_placed()
        count = 0
        while self._expiries and self._expiries[0][0] <= now_s and count < EXPIRED_AT_ONCE_MAX:
            _, worker_id, holder, keys = self._expiries.popleft()
            if self._holders.get(worker_id) is holder:
                count += len(keys)
                self._table.update(keys, _without(holder.expected_bit))
        self._table.move_some()

    @property
    def next_tick_s(self) -> float | None:
        if self._expiries:
            return self._expiries[0][0]
        return self._placed[0][3] + EXPECTED_S if self._placed else None

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Leading blocks of `hashes` that each worker holds; workers that hold none are left out."""
        if self._placed:
            self.note_placed()
        found: dict[WorkerId, int] = {}
        left = self._stored_bits
        start = last_id = 0
        for set_id, end in self._runs(hashes):
            if set_id == last_id and start:
                start = end
                continue
            last_id = set_id
            bits = self._sets.bits(set_id)
            still = left & (bits | bits >> 1)
            if still != left:
                self._note(found, left & ~still, start)
                left = still
                if not left:
                    return found
            start = end
        self._note(found, left, start)
        return found

    def block_count(self, worker_id: WorkerId) -> int:
        """Return the number of confirmed blocks of the worker."""
        return self._holders[worker_id].stored_count

    def is_known(self, worker_id: WorkerId) -> bool:
        """Whether the worker's snapshot has come."""
        return self._holders[worker_id].next_number is not None

    @property
    def byte_count(self) -> int:
        """Memory of all blocks together."""
        return self._table.byte_count + self._sets.byte_count

    @property
    def total_blocks(self) -> int:
        """Different blocks, with those that lost workers left behind."""
        return self._table.block_count

    def check(self) -> None:
        """Raises AssertionError if the parts disagree. Costs as much as everything is large."""
        self.note_placed()
        self._table.check()
        counts = self._table.counts_by_bits()
        for worker_id, holder in self._holders.items():
            assert self._worker_of_slot[holder.slot] == worker_id
            stored = sum(count for bits, count in counts.items() if bits & holder.stored_bit)
            assert holder.stored_count == stored
            both = holder.stored_bit | holder.expected_bit
            assert all(bits & both != both for bits in counts)
        assert len(self._worker_of_slot) == len(self._holders)
        known = sum(3 << 2 * slot for slot in self._worker_of_slot)
        assert not any(bits & ~known for bits in counts)

    def _runs(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """(set of holders, first block that has another one) along the prompt, as far as anybody holds it."""
        table, count = self._table, len(hashes)
        first = count if count <= SCALAR_MAX else min(FIRST_BLOCKS, SCALAR_MAX)
        for depth, block_hash in enumerate(hashes[:first], 1):
            yield table.get_one(key_of(block_hash)), depth
        if first == count:
            return
        end = self._end_of_held(hashes, first)
        if end > first:
            ids = table.get(keys_of(hashes[first:end]))
            ends = [*(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
            for run_end in ends:
                yield int(ids[run_end - 1]), first + run_end

    def _end_of_held(self, hashes: Sequence[BlockHash], start: int) -> int:
        """Return a number of leading blocks, at least `start`, beyond which nobody's run of blocks goes.

        A block that nobody holds ends every run before it, whatever else is held. Where the held blocks come
        first, as they nearly always do, the search finds their end in a few probes."""
        low, end = start, len(hashes)
        while end - low > PROBED_MIN:
            middle = (low + end) // 2
            if self._table.get_one(key_of(hashes[middle])):
                low = middle + 1
            else:
                end = middle
        return end

    def _note(self, found: dict[WorkerId, int], left: int, depth: int) -> None:
        while left and depth:
            bit = left & -left
            found[self._worker_of_slot[bit.bit_length() // 2]] = depth
            left ^= bit

    def _ask(self, holder: _Holder, now_s: float) -> bool:
        if holder.asked_at_s is not None and now_s - holder.asked_at_s < RESYNC_AGAIN_S:
            return False
        holder.asked_at_s = now_s
        return True

    def _store(self, holder: _Holder, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            stored, expected = holder.stored_bit, holder.expected_bit
            update = self._table.update_blocks(hashes, lambda bits: (bits | stored) & ~expected)
            self._recount(holder, update)

    def _remove(self, holder: _Holder, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            self._recount(holder, self._table.update_blocks(hashes, _without(holder.stored_bit)))

    def _recount(self, holder: _Holder, update: Update) -> None:
        stored = holder.stored_bit
        for before, after, blocks in update.steps:
            holder.stored_count += ((after & stored != 0) - (before & stored != 0)) * blocks

    def _forget_stored(self, holder: _Holder) -> None:
        self._sets.clear(holder.stored_bit)
        holder.stored_count = 0


def _without(bit: int) -> Callable[[int], int]:
    return lambda bits: bits & ~bit
