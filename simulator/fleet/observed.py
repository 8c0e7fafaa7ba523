"""The counts that routers make of a fleet's requests for an autoscaler, interval by interval."""

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
        arrivals, self._arrivals = self._arrivals, ArrivalCounters()
        return arrivals.totals()

    def arrived(self, request: FleetRequest) -> None:
        self._arrivals.arrived(request.slo_class, request.input_tokens)

    def started(self, request: FleetRequest, cached: int, first_s: float) -> None:
        self._arrivals.started(
            request.slo_class,
            prompt_tokens=request.input_tokens,
            cached_tokens=cached,
            ttft_s=first_s - request.at_s,
            objective_s=self._objectives.get(request.slo_class, (0.0, 0.0))[0],
        )

    def over(self, request: FleetRequest, first_s: float, last_s: float, generated: int) -> None:
        if not generated:
            self._arrivals.gave_up(request.slo_class)
            return
        self._arrivals.ended(
            request.slo_class,
            prompt_tokens=request.input_tokens,
            output_tokens=generated,
            span_s=last_s - first_s,
            objective_s=self._objectives.get(request.slo_class, (0.0, 0.0))[1],
        )
