"""What a worker remembers of sequence attempts: those it runs, and which epochs it has seen."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from baton.core.ids import RouterId, SeqKey, SequenceId
from baton.core.messages import StartSequence
from engine.scheduling.sequence import Sequence
from worker.phase_clock import PhaseClock

EPOCHS_REMEMBERED_MAX = 16_384
"""The number of sequences whose highest epoch is remembered after they ended, so that late messages are
refused."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An accepted attempt whose terminal answer the router has not had yet."""

    key: SeqKey
    router_id: RouterId
    start: StartSequence
    deadline_s: float
    clock: PhaseClock
    sequence: Sequence | None = None
    """The scheduler's sequence; None while the KV of a decode phase is on its way."""
    has_output: bool = False


class Attempts:
    """Live attempts by key, in order of arrival, with their deadlines."""

    def __init__(self) -> None:
        self._by_key: dict[SeqKey, Attempt] = {}
        self._deadlines: list[tuple[float, SeqKey]] = []
        self.preparing: set[SeqKey] = set()
        """Attempts that are made ready. They were taken before a drain, so they start in spite of it."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._by_key.values())

    def keys(self) -> Set[SeqKey]:
        return self._by_key.keys()

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs and nothing is made ready."""
        return not self._by_key and not self.preparing

    def get(self, key: SeqKey) -> Attempt | None:
        return self._by_key.get(key)

    def add(self, attempt: Attempt) -> None:
        assert attempt.key not in self._by_key
        self._by_key[attempt.key] = attempt
        heapq.heappush(self._deadlines, (attempt.deadline_s, attempt.key))

    def pop(self, key: SeqKey) -> Attempt:
        return self._by_key.pop(key)

    def adapters(self) -> set[str]:
        """`AdapterRef.key` of the adapters that live attempts name."""
        return {a.start.adapter.key for a in self._by_key.values() if a.start.adapter is not None}

    def of(self, router_id: RouterId) -> list[Attempt]:
        return [attempt for attempt in self._by_key.values() if attempt.router_id == router_id]

    @property
    def next_tick_s(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._by_key:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def overdue(self, now_s: float) -> list[Attempt]:
        """Attempts whose deadline is over, earliest first."""
        found: list[Attempt] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            attempt = self._by_key.get(heapq.heappop(self._deadlines)[1])
            if attempt is not None:
                found.append(attempt)
        return found


class Epochs:
    """The highest epoch seen of each sequence, and whether it was started here.

    A KV request may name an epoch before its StartSequence arrives. The table is bounded. Sequences that were
    not mentioned for longest are forgotten first. What is live is never forgotten, however long it runs: a
    late or repeated message would start it a second time.
    """

    def __init__(self, is_live: Callable[[SeqKey], bool], count_max: int = EPOCHS_REMEMBERED_MAX) -> None:
        """`is_live` tells whether anything is held for an attempt."""
        self._is_live, self._count_max = is_live, count_max
        self._seen: OrderedDict[SequenceId, tuple[int, bool]] = OrderedDict()

    def highest(self, seq_id: SequenceId) -> int:
        """The highest epoch of the sequence; -1 if it was never mentioned."""
        return self._seen.get(seq_id, (-1, False))[0]

    def was_started(self, key: SeqKey) -> bool:
        return self._seen.get(key.seq_id) == (key.epoch, True)

    def is_stale(self, key: SeqKey) -> bool:
        """Whether a start of this attempt would change nothing any more."""
        return key.epoch < self.highest(key.seq_id) or self.was_started(key)

    def observe(self, key: SeqKey, *, is_start: bool) -> None:
        """Note that `key` has the highest epoch of its sequence."""
        assert key.epoch >= self.highest(key.seq_id)
        self._seen[key.seq_id] = (key.epoch, is_start or self.was_started(key))
        self._seen.move_to_end(key.seq_id)
        if len(self._seen) > self._count_max:
            self._forget_one()

    def _forget_one(self) -> None:
        for _ in range(len(self._seen) - 1):
            seq_id = next(iter(self._seen))
            if not self._is_live(SeqKey(seq_id, self._seen[seq_id][0])):
                del self._seen[seq_id]
                return
            # It counts as mentioned just now, so that the next search does not meet it again.
            self._seen.move_to_end(seq_id)
