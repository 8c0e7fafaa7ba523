"""What routers would count for an autoscaler: arrivals when they come, the rest when it is known."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.sim.fleet.workload import Demand
from control_plane.autoscaler.values import Bin, ClassLoad, bin_of


@dataclass(slots=True)
class _Sums:
    bins: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    started: int = 0
    started_prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_missed: int = 0
    ended: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    tpot_missed: int = 0

    def load(self) -> ClassLoad:
        return ClassLoad(
            {at: Bin(n, tokens) for at, (n, tokens) in self.bins.items()},
            self.started,
            self.started_prompt_tokens,
            self.cached_tokens,
            self.ttft_missed,
            self.ended,
            self.output_tokens,
            self.context_tokens,
            self.tpot_missed,
        )


class Observed:
    """Of one interval; `take` ends it."""

    def __init__(self, objectives: Mapping[str, tuple[float, float]]) -> None:
        """Name of a class -> TTFT and TPOT, seconds, 0 for none."""
        self._objectives = objectives
        self._classes: dict[str, _Sums] = {}

    def take(self) -> dict[str, ClassLoad]:
        classes, self._classes = self._classes, {}
        return {name: sums.load() for name, sums in classes.items()}

    def _of(self, demand: Demand) -> _Sums:
        return self._classes.setdefault(demand.slo_class, _Sums())

    def arrived(self, demand: Demand) -> None:
        bins = self._of(demand).bins
        at = bin_of(demand.input_tokens)
        n, tokens = bins.get(at, (0, 0))
        bins[at] = (n + 1, tokens + demand.input_tokens)

    def started(self, demand: Demand, cached: int, first_s: float) -> None:
        sums = self._of(demand)
        sums.started += 1
        sums.started_prompt_tokens += demand.input_tokens
        sums.cached_tokens += max(0, cached)
        ttft_s = self._objectives.get(demand.slo_class, (0.0, 0.0))[0]
        sums.ttft_missed += 0 < ttft_s < first_s - demand.at_s

    def over(self, demand: Demand, first_s: float, last_s: float, generated: int) -> None:
        sums = self._of(demand)
        if not generated:
            sums.started += 1
            sums.ttft_missed += 1
        if generated < 2:
            return
        tpot_s = self._objectives.get(demand.slo_class, (0.0, 0.0))[1]
        sums.ended += 1
        sums.output_tokens += generated
        sums.context_tokens += generated * demand.input_tokens + generated * (generated - 1) // 2
        sums.tpot_missed += 0 < tpot_s < (last_s - first_s) / (generated - 1)
