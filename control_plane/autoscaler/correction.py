"""What sizing promised and what came of it, in one factor per role."""

from math import exp, sqrt

UP, UP_MAX, DOWN = 0.04, 0.12, 0.005
LOW, HIGH = 0.75, 1.5
JUDGED_MISSES = 10.0
"""As many requests are judged together as miss so often when exactly as many miss as may."""
SURE_SIGMAS = 2.0
"""Misses come in clusters: chance alone makes more of them than of independent ones."""
FADE_S = 300.0
STRAINED = 0.5
"""Of what may be missed, predicted: only then is it news that less was."""
QUIET_S, QUIET_MAX_S = 900.0, 7200.0


class DemandCorrection:
    """A factor on demand, learnt. It rises when more requests miss than may though sizing saw enough
    replicas, and falls slowly when sizing predicts misses that do not come; after each rise it waits longer
    before it falls, so that it settles. A pool with room to spare teaches nothing."""

    def __init__(self, *, missed_max: float) -> None:
        self._missed_max = missed_max
        self.factor = 1.0
        self._judged = self._missed = 0.0
        self._quiet_s = QUIET_S
        self._falls_after_s = 0.0

    @property
    def is_good(self) -> bool:
        """No more missed lately than may be."""
        return self._missed <= self._judged * self._missed_max

    def forget(self) -> None:
        """Replicas come or go: what was missed until now says nothing of what will be."""
        self._judged = self._missed = 0.0

    def observe(self, *, at_s: float, interval_s: float, judged: int, missed: int, strain: float) -> None:
        """`strain`: misses that sizing predicts for the replicas there are, as a share of those that may be;
        above 1: fewer than are needed."""
        keep = exp(-interval_s / FADE_S)
        self._judged, self._missed = self._judged * keep + judged, self._missed * keep + missed
        if self._judged * self._missed_max < JUDGED_MISSES:
            return
        allowed = self._judged * self._missed_max
        if strain <= 1 and self._missed > allowed + SURE_SIGMAS * sqrt(allowed):
            self.factor = min(HIGH, self.factor + min(UP_MAX, UP * self._missed / allowed))
            self._falls_after_s = at_s + self._quiet_s
            self._quiet_s = min(QUIET_MAX_S, 2 * self._quiet_s)
            self.forget()
        elif strain > STRAINED and self._missed < allowed / 4 and at_s >= self._falls_after_s:
            self.factor = max(LOW, self.factor - DOWN)
