"""What was learnt of one worker: how far predictions for it are off, and how well the latest ones did."""

from router.decisions.prediction.correction import Correction, ErrorWindow


class WorkerCorrections:
    __slots__ = ("compute", "hop_s", "store_load", "total", "tpot", "tpot_errors", "ttft_errors", "wait")

    def __init__(self) -> None:
        self.wait = Correction()
        self.compute = Correction()
        self.store_load = Correction()
        """Bringing blocks of the store."""
        self.tpot = Correction()
        self.total = Correction()
        """The whole TTFT, after its parts were corrected: its spread is the spread of the TTFT."""
        self.hop_s = 0.0
        """Messages both ways, smoothed."""
        self.ttft_errors = ErrorWindow()
        self.tpot_errors = ErrorWindow()

    @property
    def change_count(self) -> int:
        return sum(c.change_count for c in (self.wait, self.compute, self.tpot, self.total))


class FleetCorrections:
    """What the workers of one fingerprint have in common: where one that has seen nothing starts."""

    def __init__(self) -> None:
        self.wait, self.compute, self.store_load, self.tpot, self.total = (Correction() for _ in range(5))
        self.hop_s = 0.0
