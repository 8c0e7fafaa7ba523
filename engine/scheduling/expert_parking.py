"""Parking: a worker whose rows no expert rank can take waits, says so, and goes on when ranks are back. Pure.

The step under way keeps its place and its KV, so that it goes on with the same tokens. A worker that waits
for `experts.park_after_s` takes no new sequences until every expert can be reached again, or until its rows
have not waited for that long.
"""


class ExpertParking:
    """Whether one caller is parked. The one who calls it has the clock; it calls `look` when something
    changes, and every now and then."""

    def __init__(self, park_after_s: float) -> None:
        self._park_after_s = park_after_s
        self._missing_since_s: float | None = None
        """Since when rows wait, or no rank is connected at all."""
        self._served_since_s: float | None = None
        """Since when neither is so."""
        self._waited_s = 0.0
        self._rows_since_s: float | None = None
        self._is_complete = True
        self._stalled_since_s: float | None = None
        self._stalled_s = 0.0
        self.is_parked = False

    def rows_wait(self, *, now_s: float) -> None:
        """Rows wait for an expert that no rank holds."""
        if self._rows_since_s is None:
            self._rows_since_s = now_s
        self._note_stall(now_s)

    def rows_are_sent(self, *, now_s: float) -> None:
        """No row waits any more."""
        if self._rows_since_s is not None:
            self._waited_s += now_s - self._rows_since_s
            self._rows_since_s = None
        self._note_stall(now_s)

    def waited_s(self, *, now_s: float) -> float:
        """Return the time for which rows have waited since the start, the present wait included."""
        since_s = now_s if self._rows_since_s is None else self._rows_since_s
        return self._waited_s + now_s - since_s

    def stalled_s(self, *, now_s: float) -> float:
        """Return the time since the start in which rows waited, or might have: some expert could not be
        reached. Rows of the worker's other processes are not seen here, and wait for the same ranks."""
        since_s = now_s if self._stalled_since_s is None else self._stalled_since_s
        return self._stalled_s + now_s - since_s

    def _note_stall(self, now_s: float) -> None:
        is_stalled = self._rows_since_s is not None or not self._is_complete
        if is_stalled and self._stalled_since_s is None:
            self._stalled_since_s = now_s
        elif not is_stalled and self._stalled_since_s is not None:
            self._stalled_s += now_s - self._stalled_since_s
            self._stalled_since_s = None

    def look(self, *, has_ranks: bool, is_complete: bool, now_s: float) -> bool:
        """Take note of the present table: whether it names any rank, and one for every expert. Return whether
        `is_parked` changed."""
        was_parked, self._is_complete = self.is_parked, is_complete
        self._note_stall(now_s)
        if has_ranks and self._rows_since_s is None:
            self._missing_since_s = None
            if self._served_since_s is None:
                self._served_since_s = now_s
            if is_complete or now_s >= self._served_since_s + self._park_after_s:
                self.is_parked = False
        else:
            self._served_since_s = None
            if self._missing_since_s is None:
                self._missing_since_s = now_s if self._rows_since_s is None else self._rows_since_s
            if now_s >= self._missing_since_s + self._park_after_s:
                self.is_parked = True
        return self.is_parked != was_parked
