"""The size that static clusters need, and a rule that knows the load in advance."""

from bisect import bisect_left
from collections.abc import Callable

from baton.core.demand import Traits
from baton.core.messages import Role
from benchmarks.autoscale_loads import profile_of
from benchmarks.autoscale_runs import AutoscaleRun, PreparedCase
from control_plane.autoscaler.sizing import DecodeLoad, PromptGroup, decode_needed, prefill_needed
from control_plane.autoscaler.values import AutoscalerSettings, Observation
from simulator.fleet.scaling import traits_of
from simulator.fleet.scaling_rules import Counting
from simulator.fleet.setup import PoolSizes
from simulator.fleet.workload import FleetRequest

SEARCH_STEPS_MAX = 14
PEAK_WINDOW_S = 300.0
FIRST_S = 600.0


def _at_s(demand: FleetRequest) -> float:
    return demand.at_s


def sized_pools(ready: PreparedCase, start_s: float, window_s: float, *, scale: float = 1.0) -> PoolSizes:
    """The pools that the sizing model computes for `scale` times the requests of a time window, without the
    prompt tokens that a perfect cache would hold."""
    case = ready.case
    kind = traits_of(ready.spec(PoolSizes(1, 1)).workers[0][0])
    first, after = (bisect_left(ready.demands, at_s, key=_at_s) for at_s in (start_s, start_s + window_s))
    inside = ready.demands[first:after]
    prompts = [
        PromptGroup(
            1.0,
            kind.costs.prompt_s(cached, d.input_tokens, chunk_tokens=kind.chunk_tokens),
            case.ttft_slo_s,
        )
        for d, cached in zip(inside, ready.cached[first:after], strict=True)
    ]
    tokens = sum(d.output_tokens for d in inside)
    context = sum(d.output_tokens * (d.input_tokens + d.output_tokens / 2) for d in inside)
    decoding = DecodeLoad(scale * tokens / window_s, context / max(1, tokens), case.tpot_slo_s)
    work = scale * sum(p.service_s for p in prompts) / window_s
    prefill = prefill_needed(prompts, work=work, missed_max=(1 - case.attain) / 2)
    return PoolSizes(max(1, prefill), max(1, decode_needed(decoding, kind)))


def peak_pools(ready: PreparedCase) -> PoolSizes:
    """The pools for the peak: the sizing model over the busiest five minutes."""
    starts = range(0, max(1, int(ready.case.load.duration_s)), int(PEAK_WINDOW_S / 2))
    sizes = [sized_pools(ready, float(start_s), PEAK_WINDOW_S) for start_s in starts]
    return PoolSizes(max(s.prefill for s in sizes), max(s.decode for s in sizes))


class StaticSearch:
    """The cheapest cluster on which `goal` of the requests meet their objectives. Prefill workers determine
    TTFT and decode workers TPOT, so one pool is halved while the other is held, prefill first. Then each
    neighbour with one worker fewer is tried until none is enough."""

    def __init__(self, ready: PreparedCase, goal: float, *, progress: Callable[[str], None]) -> None:
        self._ready, self._goal, self._progress = ready, goal, progress
        self.tried: dict[tuple[int, int], AutoscaleRun] = {}

    @property
    def is_spent(self) -> bool:
        return len(self.tried) >= SEARCH_STEPS_MAX

    def suffices(self, at: tuple[int, int]) -> bool:
        if at not in self.tried:
            self.tried[at] = run = self._ready.run("static", PoolSizes(*at), goal=self._goal)
            self._progress(f"  static {at}: {run.met:.1%}")
        return self.tried[at].met >= self._goal

    def best(self, first: PoolSizes) -> AutoscaleRun | None:
        at = (first.prefill, first.decode)
        while not self.suffices(at) and not self.is_spent:
            run = self.tried[at]
            lacks_prefill = run.ttft_missed + run.refused / max(1, run.requests) >= run.tpot_missed
            at = (at[0] + 1, at[1]) if lacks_prefill else (at[0], at[1] + 1)
        if self.suffices(at):
            at = (self._fewest(at[0], lambda n: (n, at[1])), at[1])
            at = (at[0], self._fewest(at[1], lambda n: (at[0], n)))
            self._descend(at)
        good = [run for run in self.tried.values() if run.met >= self._goal]
        return min(good, key=lambda run: run.gpu_hours, default=None)

    def _fewest(self, enough: int, at: Callable[[int], tuple[int, int]]) -> int:
        low, high = 0, enough
        while high - low > 1 and not self.is_spent:
            # Halving rarely hits a size that is enough, and sizes far below it take long to run, so stay
            # closer to what is enough.
            middle = low + max(1, (high - low) * 2 // 3)
            low, high = (low, middle) if self.suffices(at(middle)) else (middle, high)
        return high

    def _descend(self, at: tuple[int, int]) -> None:
        while not self.is_spent:
            smaller = [(at[0] - 1, at[1]), (at[0], at[1] - 1)]
            found = next((s for s in smaller if min(s) >= 1 and not self.is_spent and self.suffices(s)), None)
            if found is None:
                return
            at = found


def best_static(
    ready: PreparedCase, goal: float, first: PoolSizes, *, progress: Callable[[str], None]
) -> tuple[AutoscaleRun | None, list[AutoscaleRun]]:
    """See `StaticSearch`. A static cluster's GPU-hours also depend on when its last request ended."""
    search = StaticSearch(ready, goal, progress=progress)
    return search.best(first), list(search.tried.values())


# --- a rule that knows the future -----------------------------------------------------------------

FORESIGHT_STEP_S = 30.0


class Clairvoyant(Counting):
    """A rule that knows rates and lengths in advance, and starts workers in time. The common sizing model
    computes the workers for the five minutes around each moment at that moment's rate. The rule takes the
    maximum from now until twice a start-up time from now, so that no worker is stopped that would be
    started again at once. Misses of other rules that this rule avoids are the cost of not knowing."""

    def __init__(self, ready: PreparedCase, settings: AutoscalerSettings) -> None:
        super().__init__(settings)
        load = ready.case.load
        self._ahead_s = 2 * settings.start_s
        self._needs = [_needed_at(ready, at_s) for at_s in _steps(0.0, load.duration_s)]

    def _desired(self, role: Role, seen: Observation, kind: Traits) -> tuple[int, str]:
        first = int(seen.at_s / FORESIGHT_STEP_S)
        last = int((seen.at_s + self._ahead_s) / FORESIGHT_STEP_S)
        ahead = self._needs[first : last + 1] or self._needs[-1:]
        return max(pools.of(role) for pools in ahead), "it will come"


def _steps(since_s: float, until_s: float) -> list[float]:
    return [since_s + FORESIGHT_STEP_S * n for n in range(int((until_s - since_s) / FORESIGHT_STEP_S))]


def _needed_at(ready: PreparedCase, at_s: float) -> PoolSizes:
    load = ready.case.load
    start_s = min(max(0.0, at_s - PEAK_WINDOW_S / 2), max(0.0, load.duration_s - PEAK_WINDOW_S))
    profile = profile_of(load.profile, load.duration_s)
    rates = [profile(then_s) for then_s in _steps(start_s, start_s + PEAK_WINDOW_S)]
    return sized_pools(ready, start_s, PEAK_WINDOW_S, scale=profile(at_s) * len(rates) / sum(rates))
