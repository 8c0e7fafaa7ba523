"""Corrections and errors of the predictions for one worker, and for a fleet of workers."""

from math import inf

from router.decisions.prediction.correction import Correction, ErrorWindow
from router.decisions.prediction.regression import TimeRegression
from router.decisions.prediction.skill import Skill

TTFT_TOLERANCE_S, TPOT_TOLERANCE_S = 0.05, 0.005
"""Errors this small do not count, since no placement depends on them."""


class QuantityErrors:
    """The errors of one quantity's predictions for one worker."""

    __slots__ = ("_skill", "_tolerance_s", "window")

    def __init__(self, tolerance_s: float) -> None:
        self._tolerance_s, self.window, self._skill = tolerance_s, ErrorWindow(), Skill()

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Add a prediction and what happened. What is no time says nothing."""
        if 0.0 <= predicted_s < inf and 0.0 <= actual_s < inf:
            self.window.observe(predicted_s, actual_s, tolerance_s=self._tolerance_s)
            self._skill.observe(predicted_s, actual_s, tolerance_s=self._tolerance_s)

    @property
    def excess(self) -> float:
        """Mean relative error beyond the tolerance."""
        return self.window.excess

    @property
    def doubt(self) -> float:
        """The excess, where the predictions say no more than a constant would; else 0."""
        return 0.0 if self._skill.is_enough else self.window.excess


class WorkerCorrections:
    __slots__ = ("compute", "hop_s", "store_load", "total", "tpot", "tpot_errors", "ttft_errors", "wait")

    def __init__(self) -> None:
        self.wait = Correction()
        self.compute = Correction()
        self.store_load = Correction()
        """Loading blocks from the store."""
        self.tpot = Correction()
        self.total = Correction()
        """The whole TTFT after its parts were corrected. Its spread is the spread of the TTFT."""
        self.hop_s = 0.0
        """Smoothed seconds of messages both ways."""
        self.ttft_errors = QuantityErrors(TTFT_TOLERANCE_S)
        self.tpot_errors = QuantityErrors(TPOT_TOLERANCE_S)

    @property
    def change_count(self) -> int:
        return sum(c.change_count for c in (self.wait, self.compute, self.tpot, self.total))


class FleetCorrections:
    """Corrections over all workers of one fingerprint, from which a new worker starts."""

    def __init__(self) -> None:
        self.wait, self.compute, self.store_load, self.tpot, self.total = (Correction() for _ in range(5))
        self.seen_tpot = TimeRegression()
        self.hop_s = 0.0
