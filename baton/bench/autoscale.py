"""The autoscaler against other rules on the fleet simulator, over loads that change in known ways.

A load is a trace, or lengths drawn by chance, at a rate that a profile multiplies over time. Each runs under
the production autoscaler, Kubernetes' rule, a queue-depth rule, and on clusters whose size does not change:
one provisioned for the peak, and the cheapest that attains as much as the autoscaler did, found by search.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path
from random import Random

import msgspec

from baton.config import EngineConfig, RouterConfig
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.sim.fleet.fleet import Fleet
from baton.sim.fleet.scaling import FleetScaling, ScalingSpec, traits_of
from baton.sim.fleet.scaling_rules import RuleName, make_rule
from baton.sim.fleet.setup import STEP_TOKENS, Pools, fleet_spec, machine_of
from baton.sim.fleet.spec import FleetSpec
from baton.sim.fleet.workload import Demand, of_plan
from baton.sim.hardware import Node, find_gpu, find_model
from control_plane.autoscaler.sizing import Decoding, Prompt, decode_needed, prefill_needed
from control_plane.autoscaler.values import Bounds, Objective, Settings
from loadgen.lengths import Plan, Scaling, make_plan
from loadgen.traces import read_trace

BLOCK_TOKENS = 512
REPLICAS_MAX = 48
HPA_TARGETS = (0.7,)
SEARCH_STEPS_MAX = 14
POLICY = "cached_prefix"
"""Of the router. The default one asks its predictor again for everybody who waits, whatever happens:
where a pool is too small, which is what is compared here, that is all that the simulator does."""
STEADY_WARM_S = 900.0
"""Reversals of steady load are counted from here: before, the rule still learns what it needs."""

Profile = Callable[[float], float]
"""Seconds -> factor on the rate."""


class Lengths(msgspec.Struct, frozen=True):
    """Mean tokens, log-normal around it."""

    prompt: int
    output: int


class Load(msgspec.Struct, frozen=True):
    """Requests over time."""

    name: str
    duration_s: float
    rate: float
    """Requests per second where the profile is 1; of a trace, 0: its own."""
    profile: str
    trace: str = ""
    length_scale: float = 1.0
    lengths: Lengths = Lengths(8000, 3000)
    later: Lengths | None = None
    """From the middle of the run on."""
    start_s: float = 120.0
    seed: int = 0


def profile_of(name: str, duration_s: float) -> Profile:
    """Raises SetupError: unknown."""

    def ramp(at_s: float) -> float:
        return 0.4 + min(1.0, at_s / (0.8 * duration_s))

    profiles: dict[str, Profile] = {
        "steady": lambda at_s: 1.0,
        # High for a quarter of the time: what provisioning for it costs meanwhile is the question.
        "step": lambda at_s: 1.3 if 0.4 <= at_s / duration_s < 0.65 else 0.4,
        "spike": lambda at_s: 1.7 if 0.5 <= at_s / duration_s < 0.6 else 0.5,
        "ramp": ramp,
        # A day in the run: low at its ends, high in the middle.
        "day": lambda at_s: 0.35 + 1.15 * math.sin(math.pi * at_s / duration_s) ** 2,
    }
    if name not in profiles:
        raise SetupError(f"no profile {name!r}: there are {', '.join(profiles)}")
    return profiles[name]


SCATTER = 0.7
"""Of lengths: standard deviation of their logarithm."""


def drawn(load: Load) -> Iterator[Demand]:
    """Poisson arrivals at the profile's rate, thinned from its highest."""
    rng = Random(f"{load.seed}/{load.name}")
    profile = profile_of(load.profile, load.duration_s)
    peak = max(profile(load.duration_s * i / 200) for i in range(201))
    at_s, number = 0.0, 0
    while True:
        at_s += rng.expovariate(load.rate * peak)
        if at_s >= load.duration_s:
            return
        if rng.random() * peak > profile(at_s):
            continue
        is_late = load.later is not None and at_s >= load.duration_s / 2
        mean = load.later if is_late and load.later is not None else load.lengths
        prompt, output = (
            max(2, int(tokens * math.exp(rng.gauss(-(SCATTER**2) / 2, SCATTER))))
            for tokens in (mean.prompt, mean.output)
        )
        yield Demand(number, at_s, prompt, output, ())
        number += 1


def of_trace(load: Load) -> tuple[list[Demand], Plan]:
    """The trace's requests in their order, with its gaps divided by the profile; begun again, sharing nothing
    with before, until the time is over."""
    scale = Fraction(load.length_scale).limit_denominator(64)
    plan = make_plan(read_trace(Path(load.trace)), Scaling(scale, scale, Fraction(1)), spread=True, seed=0)
    requests = list(of_plan(plan))
    span_s = requests[-1].at_s - requests[0].at_s
    own = (len(requests) - 1) / span_s
    factor = load.rate / own if load.rate else 1.0
    profile = profile_of(load.profile, load.duration_s)
    found: list[Demand] = []
    at_s, number = 0.0, 0
    while True:
        copy, index = divmod(number, len(requests))
        request = requests[index]
        gap_s = request.at_s - requests[index - 1].at_s if index else 1 / own
        at_s += gap_s / factor / profile(at_s)
        if at_s >= load.duration_s:
            return found, plan
        found.append(request._replace(number=number, at_s=at_s, copy=copy))
        number += 1


class Case(msgspec.Struct, frozen=True):
    """A load, and the cluster under it."""

    load: Load
    model: str = "llama-3-70b"
    gpu: str = "h20"
    tensor: int = 4
    ttft_slo_s: float = 20.0
    tpot_slo_s: float = 0.03
    attain: float = 0.95
    first: tuple[int, int] | None = None
    """Prefill and decode workers at the start; None: what sizing has for the load's first ten minutes."""


class Run(msgspec.Struct, frozen=True):
    """One rule under one load."""

    load: str
    rule: str
    met: float
    """Share of all requests."""
    gpu_hours: float
    ttft_missed: float
    tpot_missed: float
    refused: int
    starts: int
    stops: int
    flips: int
    reversals: int
    """Of both roles, over the whole run."""
    reversals_later: int
    """From `STEADY_WARM_S` on."""
    drain_s_max: float
    replicas: str = ""
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A case made ready."""

    case: Case
    demands: list[Demand]
    trace_block_tokens: float

    def spec(self, pools: Pools) -> FleetSpec:
        case = self.case
        machine = machine_of(Node(find_model(case.model), find_gpu(case.gpu), tensor=case.tensor))
        # Workers of one role take no legs of the other, so that a pool's size is all that it has; hosts,
        # batches and all else are as `baton simulate` has them.
        return fleet_spec(
            machine,
            pools,
            block_tokens=BLOCK_TOKENS,
            router=RouterConfig(any_role=False, policy=POLICY),
            engine=EngineConfig(
                block_tokens=BLOCK_TOKENS,
                step_tokens_max=STEP_TOKENS,
                batch_sequences_max=256,
                tpot_slo_s=case.tpot_slo_s,
            ),
            slo_classes={"": (case.ttft_slo_s, case.tpot_slo_s)},
            heartbeat_s=1.0,
        )

    def run(
        self,
        rule: RuleName,
        pools: Pools,
        *,
        target: float = 0.7,
        can_flip: bool = True,
        goal: float = 0.0,
    ) -> Run:
        """Stops as soon as `goal` is out of reach: then only its misses say something."""
        case, load = self.case, self.case.load
        fleet = Fleet(self.spec(pools), trace_block_tokens=self.trace_block_tokens)
        bounds = Bounds(1, REPLICAS_MAX)
        settings = Settings(
            bounds={Role.PREFILL: bounds, Role.DECODE: bounds},
            objectives={"": Objective(case.ttft_slo_s, case.tpot_slo_s)},
            attain=case.attain,
            start_s=load.start_s,
            hold_s=30.0,
            # Flips that take longer than starts are not made.
            flip_s=20.0 if can_flip else math.inf,
        )
        made = make_rule(rule, settings, target=target)
        scaling = FleetScaling(fleet, ScalingSpec(start_s=load.start_s, gpus_per_worker=case.tensor), made)
        scaling.begin()
        missed_max = (1 - goal) * len(self.demands)
        fleet.run(iter(self.demands), observer=lambda f: len(f.tally) - f.met <= missed_max)
        return self._told(fleet, scaling, rule, pools)

    def _told(self, fleet: Fleet, scaling: FleetScaling, rule: str, pools: Pools) -> Run:
        case = self.case
        ttft_missed = tpot_missed = refused = 0
        for record in fleet.tally:
            refused += record.ttft_s is None
            ttft_missed += record.ttft_s is not None and record.ttft_s > case.ttft_slo_s
            tpot_missed += record.tpot_s is not None and record.tpot_s > case.tpot_slo_s
        count = max(1, len(self.demands) if not fleet.is_stopped else len(fleet.tally))
        journal = scaling.rule.journal
        return Run(
            load=case.load.name,
            rule=rule,
            met=fleet.met / count,
            gpu_hours=scaling.gpu_s / 3600,
            ttft_missed=ttft_missed / count,
            tpot_missed=tpot_missed / count,
            refused=refused,
            starts=scaling.starts,
            stops=scaling.stops,
            flips=scaling.flips,
            reversals=sum(journal.reversals().values()),
            reversals_later=sum(journal.reversals(since_s=STEADY_WARM_S).values()),
            drain_s_max=scaling.drain_s_max,
            replicas=str(pools) if rule == "static" else "",
            requests=len(fleet.tally),
        )


def stage(case: Case) -> Stage:
    """Raises SetupError for a trace that cannot be read."""
    if case.load.trace:
        demands, plan = of_trace(case.load)
        return Stage(case, demands, float(plan.block_tokens))
    return Stage(case, list(drawn(case.load)), 0.0)


# --- clusters whose size does not change ----------------------------------------------------------


PEAK_WINDOW_S = 300.0
FIRST_S = 600.0


def sized_pools(ready: Stage, start_s: float, window_s: float) -> Pools:
    """What the sizing model has for the requests of a while."""
    case = ready.case
    kind = traits_of(ready.spec(Pools(1, 1)).workers[0][0])
    inside = [d for d in ready.demands if start_s <= d.at_s < start_s + window_s]
    prompts = [
        Prompt(1.0, kind.costs.prompt_s(0, d.input_tokens, chunk_tokens=kind.chunk_tokens), case.ttft_slo_s)
        for d in inside
    ]
    tokens = sum(d.output_tokens for d in inside)
    context = sum(d.output_tokens * (d.input_tokens + d.output_tokens / 2) for d in inside)
    decoding = Decoding(tokens / window_s, context / max(1, tokens), case.tpot_slo_s)
    work = sum(p.service_s for p in prompts) / window_s
    prefill = prefill_needed(prompts, work=work, missed_max=(1 - case.attain) / 2)
    return Pools(max(1, prefill), max(1, decode_needed(decoding, kind)))


def peak_pools(ready: Stage) -> Pools:
    """What provisioning for the peak takes: the sizing model over the busiest five minutes."""
    starts = range(0, max(1, int(ready.case.load.duration_s)), int(PEAK_WINDOW_S / 2))
    sizes = [sized_pools(ready, float(start_s), PEAK_WINDOW_S) for start_s in starts]
    return Pools(max(s.prefill for s in sizes), max(s.decode for s in sizes))


class StaticSearch:
    """The cheapest cluster that meets the objectives of `goal` of the requests. Prefill workers decide over
    TTFT and decode workers over TPOT, so one pool is halved while the other is held, prefill first; then
    each neighbour with one worker fewer is tried until none is enough."""

    def __init__(self, ready: Stage, goal: float, *, progress: Callable[[str], None]) -> None:
        self._ready, self._goal, self._progress = ready, goal, progress
        self.tried: dict[tuple[int, int], Run] = {}

    @property
    def is_spent(self) -> bool:
        return len(self.tried) >= SEARCH_STEPS_MAX

    def suffices(self, at: tuple[int, int]) -> bool:
        if at not in self.tried:
            self.tried[at] = run = self._ready.run("static", Pools(*at), goal=self._goal)
            self._progress(f"  static {at}: {run.met:.1%}")
        return self.tried[at].met >= self._goal

    def best(self, first: Pools) -> Run | None:
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
            # Nearer to what is enough: half of it rarely is, and what is far from enough takes long to run.
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
    ready: Stage, goal: float, first: Pools, *, progress: Callable[[str], None]
) -> tuple[Run | None, list[Run]]:
    """See `StaticSearch`. A static cluster's GPU-hours depend on when its last request ended, too."""
    search = StaticSearch(ready, goal, progress=progress)
    return search.best(first), list(search.tried.values())


class Result(msgspec.Struct, frozen=True):
    """One load: all rules."""

    case: Case
    runs: list[Run]
    baton: Run
    best: Run | None
    """Static, at what the autoscaler attained."""
    peak: Run
    tried: int

    @property
    def over_best(self) -> float | None:
        """GPU-hours beyond the best static cluster's, as a share of them; below 0: fewer."""
        return self.baton.gpu_hours / self.best.gpu_hours - 1 if self.best else None

    @property
    def below_peak(self) -> float:
        return 1 - self.baton.gpu_hours / self.peak.gpu_hours


def measure(case: Case, *, progress: Callable[[str], None], searches: bool = True) -> Result:
    """Raises SetupError, see `stage`."""
    ready = stage(case)
    first = Pools(*case.first) if case.first is not None else sized_pools(ready, 0.0, FIRST_S)
    runs: list[Run] = []

    def run(rule: RuleName, name: str, pools: Pools, *, target: float = 0.7, can_flip: bool = True) -> Run:
        made = _named(ready.run(rule, pools, target=target, can_flip=can_flip), name)
        progress(f"{case.load.name}: {name} from {pools}: {made.met:.1%}, {made.gpu_hours:.1f} GPU-hours")
        runs.append(made)
        return made

    progress(f"{case.load.name}: {len(ready.demands)} requests")
    ours = run("baton", "baton", first)
    peak = run("static", "peak", peak_pools(ready))
    if case.load.later is not None:
        run("baton", "baton, no flips", first, can_flip=False)
    for target in HPA_TARGETS:
        run("hpa", f"hpa {target:g}", first, target=target)
    run("queue-depth", "queue-depth", first)
    best, tried = None, list[Run]()
    if searches:
        best, tried = best_static(ready, ours.met, peak_pools(ready), progress=progress)
    if best is not None:
        runs.append(_named(best, "best static"))
    return Result(case, runs, ours, best, peak, len(tried))


def _named(run: Run, rule: str) -> Run:
    return msgspec.structs.replace(run, rule=rule)


def _task(work: tuple[Case, bool]) -> tuple[Result, list[str]]:
    notes: list[str] = []
    return measure(work[0], progress=notes.append, searches=work[1]), notes


def measure_all(
    cases: list[Case], *, jobs: int, searches: bool, progress: Callable[[str], None]
) -> Iterator[Result]:
    """In order, as they are done."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for result, notes in pool.map(_task, [(case, searches) for case in cases]):
            for note in notes:
                progress(note)
            yield result
