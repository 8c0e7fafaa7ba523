"""Corrections and errors of the predictions for one worker, and for a fleet of workers."""

from router.decisions.prediction.correction import Correction, ErrorWindow
from router.decisions.prediction.regression import TimeRegression
from router.decisions.prediction.skill import Skill


class WorkerCorrections:
    __slots__ = (
        "compute",
        "hop_s",
        "store_load",
        "total",
        "tpot",
        "tpot_errors",
        "ttft_errors",
        "ttft_skill",
        "wait",
    )

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
        self.ttft_errors = ErrorWindow()
        self.tpot_errors = ErrorWindow()
        self.ttft_skill = Skill()

    @property
    def change_count(self) -> int:
        return sum(c.change_count for c in (self.wait, self.compute, self.tpot, self.total))


class FleetCorrections:
    """Corrections over all workers of one fingerprint, from which a new worker starts."""

    def __init__(self) -> None:
        self.wait, self.compute, self.store_load, self.tpot, self.total = (Correction() for _ in range(5))
        self.seen_tpot = TimeRegression()
        self.hop_s = 0.0
