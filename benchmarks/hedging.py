"""Backup attempts on the fleet simulator: what they gain when prefill workers stall or slow down, and what
they cost when none does.

Every case runs twice with the same requests and the same faults, with `router.hedge_share` at 0 and at the
share under test. Capacity is searched once, on the healthy cluster without backup attempts: the highest rate
at which 90 % of the requests meet both objectives. The simulator runs the production router; only the workers
and their links are modelled.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import log
from multiprocessing import get_context
from random import Random
from statistics import fmean
from typing import Literal, NamedTuple, get_args

import msgspec

from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.ids import WorkerId
from baton.core.messages import Role
from loadgen.records import RequestOutcome
from simulator.clock import VirtualClock
from simulator.fleet.fleet import Fleet
from simulator.fleet.interface import FleetServices
from simulator.fleet.setup import (
    BATCH_SEQUENCES,
    BLOCK_TOKENS,
    STEP_TOKENS,
    PoolSizes,
    fleet_spec,
    machine_of,
)
from simulator.fleet.simulate import search
from simulator.fleet.spec import FleetSpec, FleetWorkerSpec
from simulator.fleet.worker import MacroWorker
from simulator.fleet.workload import FleetRequest
from simulator.hardware import Node, find_gpu
from simulator.models import find_model

Fault = Literal["none", "stalls", "straggler", "episodes"]
"""none: every worker is well. stalls: each prefill worker stands still for `STALL_S` about every
`STALL_EVERY_S`, while its heartbeats go on. straggler: one prefill worker is slow all the time and does not
say so. episodes: each prefill worker is slow for `EPISODE_S` about every `EPISODE_EVERY_S`."""
FAULTS: tuple[Fault, ...] = get_args(Fault)

STALL_S, STALL_EVERY_S = 2.0, 60.0
EPISODE_S, EPISODE_EVERY_S = 10.0, 120.0
SLOW_FACTOR = 4.0
"""A slow worker's steps take this many times as long."""
MODEL, GPU, GPUS = "llama-3-70b", "h100", 4
TTFT_SLO_S, TPOT_SLO_S = 2.0, 0.05
INPUT_TOKENS, OUTPUT_TOKENS = 4000, 200
"""Means of the lengths, which are log-normal."""
LENGTH_SIGMA = 1.0


class StepDelays:
    """How long a step of one worker takes beyond what it costs, at each instant; drawn from a seed."""

    def __init__(self, clock: VirtualClock, worker_id: WorkerId, fault: Fault, seed: int) -> None:
        self._clock = clock
        self._fault: Fault = fault
        self._is_straggler = worker_id == f"{Role.PREFILL}-0.0"
        self._rng = Random(f"{seed}/{worker_id}/{fault}")
        self._length_s, self._every_s = STALL_S, STALL_EVERY_S
        if fault == "episodes":
            self._length_s, self._every_s = EPISODE_S, EPISODE_EVERY_S
        self._begins_s = self._rng.expovariate(1 / self._every_s)

    def lengthened_s(self, step_s: float) -> float:
        """A step that begins now and would take `step_s` takes this long."""
        now_s = self._clock.now_s
        while now_s >= self._begins_s + self._length_s:
            self._begins_s += self._length_s + self._rng.expovariate(1 / self._every_s)
        is_ill = now_s >= self._begins_s
        match self._fault:
            case "none":
                return step_s
            case "stalls":
                return step_s + (self._begins_s + self._length_s - now_s if is_ill else 0.0)
            case "straggler":
                return step_s * (SLOW_FACTOR if self._is_straggler else 1.0)
            case "episodes":
                return step_s * (SLOW_FACTOR if is_ill else 1.0)


class _Lengthened(StepCosts, frozen=True, kw_only=True):
    """The costs by which a sick worker's engine runs. Steps without prompt tokens are not lengthened: the
    scheduler asks for their cost when it plans, and a worker does not know that it is about to stall."""

    health: StepDelays

    def step_s(
        self, *, prompt_tokens: int = 0, decodes: float = 0, context_tokens: float = 0, pairs: float = 0
    ) -> float:
        seconds = StepCosts.step_s(
            self, prompt_tokens=prompt_tokens, decodes=decodes, context_tokens=context_tokens, pairs=pairs
        )
        return self.health.lengthened_s(seconds) if prompt_tokens else seconds


class SickWorker(MacroWorker):
    """A modelled worker whose prefill steps may take longer than it says."""

    def __init__(
        self,
        worker_id: WorkerId,
        spec: FleetWorkerSpec,
        clock: VirtualClock,
        fleet: FleetServices,
        *,
        hop_s: float,
        fault: Fault,
        seed: int,
    ) -> None:
        costs = spec.costs
        if spec.role is Role.PREFILL:
            own = {name: getattr(costs, name) for name in StepCosts.__struct_fields__}
            costs = _Lengthened(**own, health=StepDelays(clock, worker_id, fault, seed))
        super().__init__(worker_id, replace(spec, costs=costs), clock, fleet, hop_s=hop_s)
        self.spec = spec


class HedgingCase(NamedTuple):
    """One run."""

    fault: Fault
    load: float
    rate_per_s: float
    hedge_share: float
    seed: int
    requests: int
    pools: PoolSizes


class HedgingRun(msgspec.Struct, frozen=True):
    """The result of one case."""

    fault: Fault
    load: float
    hedge_share: float
    seed: int
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p999_s: float
    goodput_share: float
    """Requests that met both objectives, of all."""
    computed_share: float
    """Prompt tokens that workers computed, of those that requests had."""
    hedges: int
    hedges_won: int


class HedgingSummary(msgspec.Struct, frozen=True):
    """The runs of one fault, load and share: means over the seeds."""

    fault: Fault
    load: float
    hedge_share: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p999_s: float
    goodput_share: float
    computed_share: float
    hedged_share: float
    won_share: float
    """Backup attempts that served the client, of those that began."""
    better: int
    """Seeds whose p99 of TTFT is below that of the same seed without backup attempts."""
    seeds: int


class HedgingResult(msgspec.Struct, frozen=True):
    cluster: str
    requests: int
    capacity_per_s: float
    runs: list[HedgingRun]
    summaries: list[HedgingSummary]


def demands(rate_per_s: float, count: int, seed: int) -> Iterator[FleetRequest]:
    """Poisson arrivals of prompts and answers with log-normal lengths that share nothing."""
    rng = Random(f"{seed}/requests")
    at_s = 0.0
    for number in range(count):
        at_s += rng.expovariate(rate_per_s)
        yield FleetRequest(number, at_s, _length(rng, INPUT_TOKENS), _length(rng, OUTPUT_TOKENS), ())


def _length(rng: Random, mean: int) -> int:
    drawn = rng.lognormvariate(log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)
    return max(16, min(8 * mean, round(drawn)))


def spec_of(pools: PoolSizes, hedge_share: float, seed: int) -> FleetSpec:
    """The cluster under test."""
    return fleet_spec(
        machine_of(Node(find_model(MODEL), find_gpu(GPU), tensor=GPUS)),
        pools,
        block_tokens=BLOCK_TOKENS,
        router=RouterConfig(hedge_share=hedge_share, any_role=False),
        engine=EngineConfig(
            block_tokens=BLOCK_TOKENS,
            step_tokens_max=STEP_TOKENS,
            batch_sequences_max=BATCH_SEQUENCES,
            tpot_slo_s=TPOT_SLO_S,
        ),
        slo_classes={"": (TTFT_SLO_S, TPOT_SLO_S)},
        seed=seed,
    )


def run(case: HedgingCase) -> HedgingRun:
    def make_worker(
        worker_id: WorkerId, spec: FleetWorkerSpec, clock: VirtualClock, fleet: FleetServices, *, hop_s: float
    ) -> SickWorker:
        return SickWorker(worker_id, spec, clock, fleet, hop_s=hop_s, fault=case.fault, seed=case.seed)

    fleet = Fleet(spec_of(case.pools, case.hedge_share, case.seed), make_worker=make_worker)
    fleet.run(demands(case.rate_per_s, case.requests, case.seed))
    fleet.check()
    records = list(fleet.stats)
    ttfts = sorted(
        r.token_instants_s[0] - r.planned_s for r in records if r.outcome is RequestOutcome.COMPLETED
    )
    prompts = sum(d.input_tokens for d in demands(case.rate_per_s, case.requests, case.seed))
    failures = [status.failure_handling for status in fleet.router_statuses()]
    return HedgingRun(
        fault=case.fault,
        load=case.load,
        hedge_share=case.hedge_share,
        seed=case.seed,
        ttft_p50_s=_at(ttfts, 0.5),
        ttft_p99_s=_at(ttfts, 0.99),
        ttft_p999_s=_at(ttfts, 0.999),
        goodput_share=fleet.met / case.requests,
        computed_share=fleet.prompt_tokens_computed / prompts,
        hedges=sum(s.hedges for s in failures),
        hedges_won=sum(s.hedges_won for s in failures),
    )


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def capacity(pools: PoolSizes, requests: int, seed: int) -> float:
    """Requests per second at which the healthy cluster serves 90 % within both objectives."""

    def share_at(rate_per_s: float) -> float:
        return run(HedgingCase("none", 1.0, rate_per_s, 0.0, seed, requests, pools)).goodput_share

    return search(share_at, first=4.0 * pools.prefill, width=0.05).factor


def measure(
    *,
    pools: PoolSizes,
    faults: tuple[Fault, ...],
    loads: tuple[float, ...],
    hedge_share: float,
    seeds: int,
    requests: int,
    jobs: int,
    progress: Callable[[str], None],
) -> HedgingResult:
    capacity_per_s = capacity(pools, requests, seed=0)
    progress(f"capacity: {capacity_per_s:.2f} requests/s")
    cases = [
        HedgingCase(fault, load, load * capacity_per_s, share, seed, requests, pools)
        for fault in faults
        for load in loads
        for seed in range(1, seeds + 1)
        for share in (0.0, hedge_share)
    ]
    runs: list[HedgingRun] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in pool.map(run, cases):
            runs.append(done)
            progress(
                f"{done.fault}, {done.load:.0%}, seed {done.seed}, share {done.hedge_share:g}: TTFT p99 "
                f"{done.ttft_p99_s:.3f} s, {done.goodput_share:.2%} good, {done.hedges} backup attempts"
            )
    summaries = [
        _summary([r for r in runs if (r.fault, r.load) == (fault, load)], share, requests)
        for fault in faults
        for load in loads
        for share in (0.0, hedge_share)
    ]
    return HedgingResult(f"{pools} of {MODEL} on {GPUS} × {GPU}", requests, capacity_per_s, runs, summaries)


def _summary(runs: list[HedgingRun], share: float, requests: int) -> HedgingSummary:
    """`runs` are those of one fault and load, with and without backup attempts."""
    own = [r for r in runs if r.hedge_share == share]
    plain = {r.seed: r.ttft_p99_s for r in runs if r.hedge_share == 0}
    began = sum(r.hedges for r in own)
    return HedgingSummary(
        fault=own[0].fault,
        load=own[0].load,
        hedge_share=share,
        ttft_p50_s=fmean(r.ttft_p50_s for r in own),
        ttft_p99_s=fmean(r.ttft_p99_s for r in own),
        ttft_p999_s=fmean(r.ttft_p999_s for r in own),
        goodput_share=fmean(r.goodput_share for r in own),
        computed_share=fmean(r.computed_share for r in own),
        hedged_share=began / (requests * len(own)),
        won_share=sum(r.hedges_won for r in own) / began if began else 0.0,
        better=sum(r.ttft_p99_s < plain[r.seed] for r in own),
        seeds=len(own),
    )
