"""The counts that routers make of a fleet's requests for an autoscaler, interval by interval."""

from collections.abc import Mapping

from baton.core.demand import ClassLoad
from router.decisions.arrival_counters import ArrivalCounters, context_of, is_slow
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
        name, tokens = request.slo_class, request.input_tokens
        objective_s = self._objectives.get(name, (0.0, 0.0))[0]
        self._arrivals.started(name, ttft_s=first_s - request.at_s, objective_s=objective_s)
        self._arrivals.prefilled(name, prompt_tokens=tokens, cached_tokens=cached)

    def over(self, request: FleetRequest, first_s: float, last_s: float, generated: int) -> None:
        name = request.slo_class
        if not generated:
            self._arrivals.gave_up(name)
            return
        if generated < 2:
            return
        context_tokens = context_of(request.input_tokens, generated)
        self._arrivals.generated(name, output_tokens=generated, context_tokens=context_tokens)
        objective_s = self._objectives.get(name, (0.0, 0.0))[1]
        slow = is_slow(generated, span_s=last_s - first_s, objective_s=objective_s)
        self._arrivals.ended(name, is_slow=slow)
