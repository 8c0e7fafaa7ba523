"""A factor on demand per role, learnt from how well earlier sizes met the objectives."""

from math import exp, sqrt

UP, UP_MAX, DOWN = 0.04, 0.12, 0.005
LOW, HIGH = 0.75, 1.5
JUDGED_MISSES = 10.0
"""Requests are judged in groups so large that this many of them may miss their objective."""
SURE_SIGMAS = 2.0
"""Standard deviations above the allowed number of misses that count as evidence. Misses come in clusters, so
chance makes more of them than independent misses would."""
FADE_S = 300.0
STRAINED = 0.5
"""The factor falls only while sizing predicts at least this part of the allowed misses. A pool with room to
spare teaches nothing."""
QUIET_S, QUIET_MAX_S = 900.0, 7200.0


class DemandCorrection:
    """The learnt factor of one role. It rises when more requests miss their objective than may, although
    sizing saw enough replicas. It falls slowly when predicted misses do not come, and after each rise it
    waits longer before it falls, so that it settles."""

    def __init__(self, *, missed_max: float) -> None:
        self._missed_max = missed_max
        self.factor = 1.0
        self._judged = self._missed = 0.0
        self._quiet_s = QUIET_S
        self._falls_after_s = 0.0

    @property
    def is_good(self) -> bool:
        """True while no more requests missed their objective lately than may."""
        return self._missed <= self._judged * self._missed_max

    def forget(self) -> None:
        """Forget the misses counted so far. They say nothing about the pool that replicas now join or
        leave."""
        self._judged = self._missed = 0.0

    def observe(self, *, at_s: float, interval_s: float, judged: int, missed: int, strain: float) -> None:
        """Count one interval. `strain` is the number of misses that sizing predicts for the current replicas,
        as a part of those allowed; above 1 there are fewer replicas than needed."""
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
