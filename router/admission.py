"""Who waits for a place, in which order, and who is refused at the door.

Order is by arrival; a sequence that was placed before and lost its worker keeps its old place in the
line, and does not count against the bound (its client is being served already).

A sequence that finds no place must not stop those behind it (it may need more blocks than a smaller
one), and must not starve either. So a look along the line tries `LOOK_AHEAD` sequences at most, and
once `OVERTAKEN_MAX` others went before a sequence, nothing goes before it any more: room is left to
build up until it is placed, or until its own wait is over.
"""

from bisect import bisect_left, insort

from baton.core.ids import SequenceId

LOOK_AHEAD = 16
OVERTAKEN_MAX = 64
RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1.0, 60.0
SMOOTHING = 0.1


class WaitLine:
    """Sequences that wait for a place."""

    def __init__(self, *, new_max: int) -> None:
        self._new_max = new_max
        self._line: list[tuple[int, SequenceId]] = []
        self._arrival: dict[SequenceId, int] = {}
        self._new: set[SequenceId] = set()
        self._overtaken: dict[SequenceId, int] = {}

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._arrival

    @property
    def has_room(self) -> bool:
        return len(self._new) < self._new_max

    def add(self, seq_id: SequenceId, *, arrival: int, is_new: bool) -> None:
        """`arrival` rises with every submitted sequence. A new one needs `has_room`."""
        assert seq_id not in self._arrival
        if is_new:
            assert self.has_room
            self._new.add(seq_id)
        self._arrival[seq_id] = arrival
        insort(self._line, (arrival, seq_id))

    def remove(self, seq_id: SequenceId) -> None:
        """Not in the line: nothing happens."""
        arrival = self._arrival.pop(seq_id, None)
        if arrival is None:
            return
        del self._line[bisect_left(self._line, (arrival, seq_id))]
        self._new.discard(seq_id)
        self._overtaken.pop(seq_id, None)

    def in_order(self) -> list[SequenceId]:
        return [seq_id for _, seq_id in self._line]

    def may_follow_all(self) -> bool:
        """Whether one that arrives now may be placed before all who wait."""
        return len(self._line) < LOOK_AHEAD and not any(map(self.is_starving, self._overtaken))

    def went_before(self, arrival: int) -> None:
        """A sequence that arrived then was placed: count it for those it overtook."""
        for waiting_since, seq_id in self._line:
            if waiting_since >= arrival:
                return
            self._overtaken[seq_id] = self._overtaken.get(seq_id, 0) + 1

    def is_starving(self, seq_id: SequenceId) -> bool:
        """Nothing may go before it any more."""
        return self._overtaken.get(seq_id, 0) >= OVERTAKEN_MAX

    def check(self) -> None:
        assert len(self._new) <= self._new_max
        assert self._line == sorted(self._line)
        assert {s: a for a, s in self._line} == self._arrival
        assert self._new <= self._arrival.keys()
        assert self._overtaken.keys() <= self._arrival.keys()


class Pace:
    """How fast places come free: what a refused client is told to wait."""

    def __init__(self) -> None:
        self._interval_s = 0.0
        self._last_s: float | None = None

    def freed(self, now_s: float) -> None:
        """A sequence ended."""
        if self._last_s is not None:
            self._interval_s += SMOOTHING * (now_s - self._last_s - self._interval_s)
        self._last_s = now_s

    def retry_after_s(self, waiting: int) -> float:
        """When a sequence behind `waiting` others may expect a place."""
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, (waiting + 1) * self._interval_s))
