"""Placement policies against each other on the fleet simulator: same trace, same cluster, same load.

Capacity is searched once, with the reference policy: the highest rate at which 90 % of the requests meet
both objectives. Every policy then runs at shares of it. Pools, batch and objectives are the same for all; a
cluster without disaggregation has as many aggregated workers.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import msgspec

from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.core.policies import DEFAULT_PLACEMENT, PLACEMENT_POLICIES
from loadgen.lengths import ReplayPlan, TraceScaling, make_plan
from loadgen.report import RunSettings, Slo
from loadgen.traces import cut, read_trace
from simulator.fleet.fleet import Fleet
from simulator.fleet.pools import anti_phase, wasted_share
from simulator.fleet.setup import (
    BATCH_SEQUENCES,
    BLOCK_TOKENS,
    STEP_TOKENS,
    PoolSizes,
    fleet_spec,
    machine_of,
)
from simulator.fleet.simulate import attains, faster, search, simulate
from simulator.fleet.spec import FleetSpec
from simulator.fleet.workload import of_plan
from simulator.hardware import Node, find_gpu
from simulator.models import find_model

NO_DISAGGREGATION = "no disaggregation"
REFERENCE = DEFAULT_PLACEMENT
REFUSING = f"{REFERENCE} refusing"
"""Those that will miss their objectives are refused, as `slo.late=refuse`; elsewhere they are served last."""
POLICIES = (*PLACEMENT_POLICIES, REFUSING, NO_DISAGGREGATION)
LOADS = (0.6, 0.9, 1.1, 1.4)


class PlacementCase(NamedTuple):
    """A trace, the cluster under it, and the objectives."""

    trace: Path
    model: str
    gpu: str
    tensor: int
    pools: PoolSizes
    ttft_slo_s: float
    tpot_slo_s: float
    limit: int
    seed: int = 0


class PolicyAtLoad(msgspec.Struct, frozen=True):
    """One policy at one load."""

    policy: str
    load: float
    rate_per_s: float
    goodput_share: float
    goodput_per_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    cache_hit_ratio: float
    refused: int
    wasted_prefill: float
    """Share of the prompt tokens computed, for requests that were refused, failed or too late."""
    anti_phase: float
    """Correlation of the two pools' loads; -1: one is full when the other is empty."""
    wall_s: float


class PlacementResult(msgspec.Struct, frozen=True):
    """One trace."""

    trace: str
    requests: int
    cluster: str
    ttft_slo_s: float
    tpot_slo_s: float
    reference: str
    capacity_per_s: float
    probes: list[tuple[float, float]]
    """(requests per second, share that met aggregated), as searched."""
    outcomes: list[PolicyAtLoad]


@dataclass(frozen=True, slots=True)
class Stage:
    """A case made ready to run."""

    case: PlacementCase
    plan: ReplayPlan

    @property
    def own_rate(self) -> float:
        instants_s = [request.at_s for request in self.plan.requests]
        return (len(instants_s) - 1) / (max(instants_s) - min(instants_s))

    def spec(self, policy: str, *, refuses_late: bool = False, **router: object) -> FleetSpec:
        case = self.case
        is_apart = policy != NO_DISAGGREGATION
        node = Node(find_model(case.model), find_gpu(case.gpu), tensor=case.tensor)
        plain = REFERENCE if policy in (NO_DISAGGREGATION, REFUSING) else policy
        settings: dict[str, object] = {"policy": plain, **router}
        own = self.plan.block_tokens
        block_tokens = int(own) if own else BLOCK_TOKENS
        return fleet_spec(
            machine_of(node),
            case.pools if is_apart else PoolSizes(aggregated=case.pools.count),
            block_tokens=block_tokens,
            router=RouterConfig.model_validate({**settings, "disaggregate": is_apart}),
            engine=EngineConfig(
                block_tokens=block_tokens,
                step_tokens_max=STEP_TOKENS,
                batch_sequences_max=BATCH_SEQUENCES,
                tpot_slo_s=case.tpot_slo_s,
            ),
            slo_classes={"": (case.ttft_slo_s, case.tpot_slo_s)},
            refuses_late=refuses_late or policy == REFUSING,
            seed=case.seed,
        )

    def settings(self, policy: str) -> RunSettings:
        case = self.case
        return RunSettings(
            trace=case.trace.name,
            target=f"{case.pools} × {case.tensor} {case.gpu}",
            model=case.model,
            slo=Slo(case.ttft_slo_s, case.tpot_slo_s),
            planned=len(self.plan.requests),
            kind="simulation",
            label=policy,
        )


def stage(case: PlacementCase) -> Stage:
    """Raises SetupError for a trace that cannot be read."""
    trace = cut(read_trace(case.trace), limit=case.limit or None)
    return Stage(case, make_plan(trace, TraceScaling(), spread=True, seed=case.seed))


def capacity(
    ready: Stage, policy: str, *, progress: Callable[[str], None]
) -> tuple[float, list[tuple[float, float]]]:
    """Requests per second, and the probes."""
    own = ready.own_rate

    def share_at(factor: float) -> float:
        return attains(
            ready.spec(policy),
            faster(of_plan(ready.plan), factor),
            trace_block_tokens=float(ready.plan.block_tokens),
            attain=0.9,
            planned=len(ready.plan.requests),
        )

    found = search(
        share_at,
        first=2.0,
        progress=lambda factor, share: progress(f"{policy}: {factor * own:.2f} requests/s, {share:.1%}"),
    )
    return found.factor * own, [(factor * own, share) for factor, share in found.probes]


def run_one(ready: Stage, policy: str, load: float, rate: float) -> tuple[PolicyAtLoad, Fleet]:
    """One policy at `rate` requests per second."""
    demands = faster(of_plan(ready.plan), rate / ready.own_rate)
    done = simulate(
        ready.spec(policy),
        demands,
        ready.settings(policy),
        trace_block_tokens=float(ready.plan.block_tokens),
    )
    report = done.report
    assert report.ttft is not None
    outcome = PolicyAtLoad(
        policy=policy,
        load=load,
        rate_per_s=rate,
        goodput_share=report.goodput_share,
        goodput_per_s=report.goodput_per_s,
        ttft_mean_s=report.ttft.mean,
        ttft_p99_s=report.ttft.p99,
        tpot_p99_s=report.tpot.p99 if report.tpot else 0.0,
        cache_hit_ratio=report.cache_hit_ratio or 0.0,
        refused=report.refused,
        wasted_prefill=wasted_share(report, done.fleet),
        anti_phase=anti_phase(done.fleet.samples),
        wall_s=done.wall_s,
    )
    return outcome, done.fleet


def _task(work: tuple[PlacementCase, str, float, float]) -> PolicyAtLoad:
    case, policy, load, rate = work
    return run_one(stage(case), policy, load, rate)[0]


def measure(
    case: PlacementCase,
    *,
    policies: tuple[str, ...] = POLICIES,
    loads: tuple[float, ...] = LOADS,
    capacity_per_s: float = 0.0,
    jobs: int = 1,
    progress: Callable[[str], None],
) -> PlacementResult:
    """Raises SetupError: see `stage`. `capacity_per_s` 0: searched."""
    ready = stage(case)
    probes: list[tuple[float, float]] = []
    if not capacity_per_s:
        capacity_per_s, probes = capacity(ready, REFERENCE, progress=progress)
    tasks = [(case, policy, load, load * capacity_per_s) for load in loads for policy in policies]
    outcomes: list[PolicyAtLoad] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for outcome in pool.map(_task, tasks):
            outcomes.append(outcome)
            progress(
                f"{outcome.load:.0%} {outcome.policy}: {outcome.goodput_share:.1%} good, mean TTFT "
                f"{outcome.ttft_mean_s:.2f} s"
            )
    return PlacementResult(
        trace=case.trace.name,
        requests=len(ready.plan.requests),
        cluster=f"{case.pools} of {case.model} on {case.tensor} × {case.gpu}",
        ttft_slo_s=case.ttft_slo_s,
        tpot_slo_s=case.tpot_slo_s,
        reference=REFERENCE,
        capacity_per_s=capacity_per_s,
        probes=probes,
        outcomes=outcomes,
    )
