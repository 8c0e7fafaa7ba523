"""How fast one worker is: what it says its steps cost, and how what happened there compared."""

from collections.abc import Iterable
from statistics import median

from baton.core.costs import StepCosts
from router.decisions.prediction.correction import Correction, ErrorWindow

COLD = StepCosts(base_s=0.005, prompt_token_s=2e-4, decode_s=1e-3, context_token_s=1e-7, pair_s=1e-8)
"""Of a worker that says nothing, in a fleet where nobody does: slow rather than fast."""


class Speed:
    __slots__ = (
        "bring",
        "compute",
        "costs",
        "hop_s",
        "is_told",
        "tokens_per_step",
        "total",
        "tpot",
        "tpot_errors",
        "ttft_errors",
        "wait",
    )

    def __init__(self, costs: StepCosts | None, fleet: "Iterable[Speed]") -> None:
        """`fleet`: of the same fingerprint."""
        self.is_told = costs is not None
        """False: `costs` are others', or a guess."""
        self.costs = costs or median_costs(s.costs for s in fleet if s.is_told) or COLD
        self.tokens_per_step = 1.0
        self.wait = Correction()
        self.compute = Correction()
        self.bring = Correction()
        """Bringing blocks of the store."""
        self.tpot = Correction()
        self.total = Correction()
        """Of the whole TTFT, parts corrected: its spread is the TTFT's."""
        self.hop_s = 0.0
        """Smoothed: messages both ways."""
        self.ttft_errors = ErrorWindow()
        self.tpot_errors = ErrorWindow()

    def told(self, costs: StepCosts | None, tokens_per_step: float) -> None:
        if costs is not None:
            self.costs, self.is_told = costs, True
        self.tokens_per_step = max(1.0, tokens_per_step)

    @property
    def change_count(self) -> int:
        return sum(c.change_count for c in (self.wait, self.compute, self.tpot, self.total))


def median_costs(all_costs: Iterable[StepCosts]) -> StepCosts | None:
    """Of each coefficient; None: there are none."""
    listed = list(all_costs)
    if not listed:
        return None
    return StepCosts(
        median(c.base_s for c in listed),
        median(c.prompt_token_s for c in listed),
        median(c.decode_s for c in listed),
        median(c.context_token_s for c in listed),
        median(c.pair_s for c in listed),
    )
