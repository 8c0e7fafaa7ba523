"""Budgets for retries and backup attempts, as a fraction of the ordinary work. Pure.

A budget keeps what tries to help from becoming the load that hurts: when everything fails, everything is
retried, and a cluster at its limit gets several times the work (Google SRE, "Handling Overload"; Finagle's
RetryBudget and Envoy's retry_budget are the same idea).
"""

import math
from collections import deque

WINDOW_S = 10.0
SLICE_S = 0.5


class _Slice:
    __slots__ = ("earned", "ends_s", "spent")

    def __init__(self, ends_s: float) -> None:
        self.ends_s = ends_s
        self.earned = self.spent = 0


class WindowBudget:
    """`floor` plus `share` of what was earned, both in the last `WINDOW_S`."""

    def __init__(self, *, share: float, floor: int) -> None:
        self._share, self._floor = share, floor
        self._slices: deque[_Slice] = deque()
        self._earned = self._spent = 0
        self.refused_count = 0
        """Since the start."""

    def earn(self, now_s: float) -> None:
        self._now(now_s).earned += 1
        self._earned += 1

    def take(self, now_s: float, *, must: bool = False) -> bool:
        """Take one unit if there is one. With `must` it is taken in any case, at the cost of later ones."""
        current = self._now(now_s)
        if self.left <= 0 and not must:
            self.refused_count += 1
            return False
        current.spent += 1
        self._spent += 1
        return True

    @property
    def left(self) -> int:
        """The units left as of the last call with a time."""
        return math.floor(self._floor + self._share * self._earned) - self._spent

    def retry_after_s(self, now_s: float) -> float:
        """Return the seconds until spent units come back."""
        first = next((s for s in self._slices if s.spent), None)
        return 1.0 if first is None else max(1.0, first.ends_s + WINDOW_S - now_s)

    def _now(self, now_s: float) -> _Slice:
        slices = self._slices
        while slices and slices[0].ends_s + WINDOW_S <= now_s:
            gone = slices.popleft()
            self._earned -= gone.earned
            self._spent -= gone.spent
        if not slices or slices[-1].ends_s <= now_s:
            slices.append(_Slice(now_s + SLICE_S))
        return slices[-1]


class CreditBudget:
    """`share` of all that was earned, however long ago, and at most `saved_max` at once."""

    def __init__(self, *, share: float, saved_max: float) -> None:
        self._share, self._saved_max = share, saved_max
        self._credit = 0.0

    @property
    def has_credit(self) -> bool:
        return self._credit >= 1.0

    def earn(self) -> None:
        self._credit = min(self._saved_max, self._credit + self._share)

    def take(self) -> None:
        """Take one unit of credit, which must be there."""
        assert self.has_credit
        self._credit -= 1.0
