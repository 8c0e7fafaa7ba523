"""A prefix index of dictionaries and sets, with which `router.decisions.prefix_index` must agree."""

from collections import deque
from collections.abc import Sequence

from baton.core.ids import BlockHash, WorkerId
from baton.core.messages import BlockEvents
from router.decisions.prefix_index import EXPECTED_S, RESYNC_AGAIN_S


class _Holder:
    __slots__ = ("asked_at_s", "bit", "expected", "next_number", "stored")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.stored: set[BlockHash] = set()
        self.expected: dict[BlockHash, float] = {}
        """Unconfirmed blocks, with the time when each is given up."""
        self.next_number: int | None = None
        """Number of the next message; None: unknown until a snapshot comes."""
        self.asked_at_s: float | None = None


class DictIndex:
    def __init__(self) -> None:
        self._holders: dict[WorkerId, _Holder] = {}
        self._bits: dict[BlockHash, int] = {}
        self._worker_of_bit: dict[int, WorkerId] = {}
        self._expiries: deque[tuple[float, _Holder, WorkerId, Sequence[BlockHash]]] = deque()

    def add_worker(self, worker_id: WorkerId) -> None:
        """Begin a session. Nothing is known before its snapshot. The worker must not be known."""
        assert worker_id not in self._holders
        bit = 1
        while bit in self._worker_of_bit:
            bit <<= 1
        self._worker_of_bit[bit] = worker_id
        self._holders[worker_id] = _Holder(bit)

    def remove_worker(self, worker_id: WorkerId) -> None:
        holder = self._holders.pop(worker_id)
        for block in holder.stored | holder.expected.keys():
            self._clear(block, holder.bit)
        del self._worker_of_bit[holder.bit]

    def apply(self, worker_id: WorkerId, events: BlockEvents, *, now_s: float) -> bool:
        """Apply a message. Returns True when the router must ask the worker for a snapshot.

        After a gap the worker's blocks are unknown, which counts as none, until the snapshot comes. A
        repeated message changes nothing.
        """
        holder = self._holders[worker_id]
        number = events.sequence_number
        if events.is_snapshot:
            if holder.next_number is None or number >= holder.next_number:
                self._replace(holder, events, number)
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

    def expect(self, worker_id: WorkerId, hashes: Sequence[BlockHash], *, now_s: float) -> None:
        """Note that a sequence with these blocks was just placed there, so that its siblings find them."""
        holder = self._holders[worker_id]
        until_s = now_s + EXPECTED_S
        news = [h for h in hashes if h not in holder.stored and h not in holder.expected]
        if not news:
            return
        bit, bits = holder.bit, self._bits
        for block in news:
            holder.expected[block] = until_s
            bits[block] = bits.get(block, 0) | bit
        self._expiries.append((until_s, holder, worker_id, news))

    def expire(self, now_s: float) -> None:
        """Give up the expectations that nothing confirmed in time."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, holder, worker_id, hashes = self._expiries.popleft()
            if self._holders.get(worker_id) is not holder:
                continue
            for block in hashes:
                if block in holder.expected:
                    del holder.expected[block]
                    self._clear(block, holder.bit)

    @property
    def next_tick_s(self) -> float | None:
        return self._expiries[0][0] if self._expiries else None

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Return how many leading blocks of `hashes` each worker holds. Workers that hold none are left
        out."""
        found: dict[WorkerId, int] = {}
        bits = self._bits
        left = bits.get(hashes[0], 0) if hashes else 0
        depth = 0
        for block in hashes:
            still = left & bits.get(block, 0)
            if still != left:
                self._note(found, left & ~still, depth)
                left = still
            if not left:
                return found
            depth += 1
        self._note(found, left, depth)
        return found

    def block_count(self, worker_id: WorkerId) -> int:
        """Number of confirmed blocks."""
        return len(self._holders[worker_id].stored)

    def is_known(self, worker_id: WorkerId) -> bool:
        """Return whether the worker's snapshot has come."""
        return self._holders[worker_id].next_number is not None

    def check(self) -> None:
        """Check that the bit sets equal the workers' own sets."""
        bits: dict[BlockHash, int] = {}
        for worker_id, holder in self._holders.items():
            assert self._worker_of_bit[holder.bit] == worker_id
            assert holder.expected.keys().isdisjoint(holder.stored)
            for block in holder.stored | holder.expected.keys():
                bits[block] = bits.get(block, 0) | holder.bit
        assert bits == self._bits
        assert len(self._worker_of_bit) == len(self._holders)

    def _note(self, found: dict[WorkerId, int], left: int, depth: int) -> None:
        while left:
            bit = left & -left
            found[self._worker_of_bit[bit]] = depth
            left ^= bit

    def _ask(self, holder: _Holder, now_s: float) -> bool:
        if holder.asked_at_s is not None and now_s - holder.asked_at_s < RESYNC_AGAIN_S:
            return False
        holder.asked_at_s = now_s
        return True

    def _replace(self, holder: _Holder, events: BlockEvents, number: int) -> None:
        self._forget_stored(holder)
        self._store(holder, events.stored)
        holder.next_number = number + 1
        holder.asked_at_s = None

    def _store(self, holder: _Holder, hashes: Sequence[BlockHash]) -> None:
        for block in hashes:
            holder.expected.pop(block, None)
            holder.stored.add(block)
            self._bits[block] = self._bits.get(block, 0) | holder.bit

    def _remove(self, holder: _Holder, hashes: Sequence[BlockHash]) -> None:
        for block in hashes:
            if block in holder.stored:
                holder.stored.discard(block)
                self._clear(block, holder.bit)

    def _forget_stored(self, holder: _Holder) -> None:
        for block in holder.stored:
            self._clear(block, holder.bit)
        holder.stored.clear()

    def _clear(self, block: BlockHash, bit: int) -> None:
        rest = self._bits[block] & ~bit
        if rest:
            self._bits[block] = rest
        else:
            del self._bits[block]
