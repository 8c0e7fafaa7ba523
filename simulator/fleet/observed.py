"""What routers count of a fleet's requests for an autoscaler, interval by interval."""

from collections.abc import Mapping

from baton.core.demand import ClassLoad
from router.decisions.arrival_counters import ArrivalCounters
from simulator.fleet.workload import FleetRequest


class Observed:
    """Counts of one interval; `take` ends it."""

    def __init__(self, objectives: Mapping[str, tuple[float, float]]) -> None:
        """TTFT and TPOT objectives per class in seconds, 0 for none."""
        self._objectives = objectives
        self._arrivals = ArrivalCounters()

    def take(self) -> dict[str, ClassLoad]:
        offered, self._arrivals = self._arrivals, ArrivalCounters()
        return offered.totals()

    def arrived(self, demand: FleetRequest) -> None:
        self._arrivals.arrived(demand.slo_class, demand.input_tokens)

    def started(self, demand: FleetRequest, cached: int, first_s: float) -> None:
        self._arrivals.started(
            demand.slo_class,
            prompt_tokens=demand.input_tokens,
            cached_tokens=cached,
            ttft_s=first_s - demand.at_s,
            objective_s=self._objectives.get(demand.slo_class, (0.0, 0.0))[0],
        )

    def over(self, demand: FleetRequest, first_s: float, last_s: float, generated: int) -> None:
        if not generated:
            self._arrivals.gave_up(demand.slo_class)
            return
        self._arrivals.ended(
            demand.slo_class,
            prompt_tokens=demand.input_tokens,
            output_tokens=generated,
            span_s=last_s - first_s,
            objective_s=self._objectives.get(demand.slo_class, (0.0, 0.0))[1],
        )
