"""More than a cluster can serve, on the fleet simulator: what is computed in vain, whether the pools swing
against each other, and what a tenant that floods does to one that does not.

Capacity is searched once with the policy `slo`, as in `benchmarks.placement`; all runs are of one cluster.
"""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import NamedTuple

import msgspec

from benchmarks.placement import REFERENCE, PlacementCase, Stage, capacity, stage
from loadgen.records import RequestOutcome
from simulator.fleet.fleet import PoolSample
from simulator.fleet.pools import anti_phase, wasted_share
from simulator.fleet.simulate import faster, simulate
from simulator.fleet.workload import FleetRequest, merged, of_plan

OVERLOAD = 2.0
"""Times the capacity."""
QUIET_SHARE = 0.3
"""The quiet tenant's rate as a share of the capacity. With one other tenant, its fair share is half."""
BURST_REQUESTS = 600
BURST_AT = 1 / 3
"""The burst begins at this share of the quiet tenant's time."""
QUIET, FLOOD = "quiet", "flood"


class Variant(NamedTuple):
    """The treatment of requests that will be late."""

    name: str
    policy: str
    refuses_late: bool
    router: dict[str, object]


VARIANTS = (
    Variant("refused early", REFERENCE, True, {}),
    Variant("served last", REFERENCE, False, {"reject_below": 0.0}),
    Variant("no prediction", "least_loaded", True, {}),
)
"""The last one predicts nothing: it refuses those whose time was over while they waited for a place."""


class Overload(msgspec.Struct, frozen=True):
    """One variant at `OVERLOAD` times the capacity."""

    variant: str
    policy: str
    goodput_share: float
    goodput_per_s: float
    refused: int
    wasted_prefill: float
    """Share of the prompt tokens computed, for requests that were refused, failed or too late."""
    wasted_tokens: int
    anti_phase: float
    """Lowest correlation of the two pools' loads over shifts of up to half a minute; -1: one is full when the
    other is empty."""


class Fairness(msgspec.Struct, frozen=True):
    """The two tenants of one run."""

    late: str
    flood: str
    """none, burst or sustained"""
    quiet_share: float
    """Share of the quiet tenant's requests that met both objectives."""
    flood_share: float
    quiet_requests: int
    quiet_refused: int
    quiet_late: int
    """Served requests whose first token came too late."""
    quiet_slow: int
    """The first token came in time, the others too slowly."""
    flood_requests: int


class OverloadResult(msgspec.Struct, frozen=True):
    trace: str
    requests: int
    cluster: str
    ttft_slo_s: float
    tpot_slo_s: float
    capacity_per_s: float
    overload: list[Overload]
    fairness: list[Fairness]


def run_overload(ready: Stage, variant: Variant, rate: float) -> tuple[Overload, list[PoolSample]]:
    """Run one variant at `rate` requests per second."""
    spec = ready.spec(variant.policy, refuses_late=variant.refuses_late, **variant.router)
    done = simulate(
        spec,
        faster(of_plan(ready.plan), rate / ready.own_rate),
        ready.settings(variant.name),
        trace_block_tokens=float(ready.plan.block_tokens),
    )
    report, fleet = done.report, done.fleet
    wasted = wasted_share(report, fleet)
    found = Overload(
        variant=variant.name,
        policy=variant.policy,
        goodput_share=report.goodput_share,
        goodput_per_s=report.goodput_per_s,
        refused=report.refused,
        wasted_prefill=wasted,
        wasted_tokens=round(wasted * fleet.prompt_tokens_computed),
        anti_phase=anti_phase(fleet.samples),
    )
    return found, fleet.samples


def floods(
    ready: Stage, capacity_per_s: float, *, quiet_requests: int
) -> dict[str, Callable[[], Iterator[FleetRequest]]]:
    """What is sent, by the kind of flood. The flood's prompts are the trace's too, and share nothing with the
    quiet tenant's."""
    quiet_rate, flood_rate = QUIET_SHARE * capacity_per_s, OVERLOAD * capacity_per_s
    quiet_s = quiet_requests / quiet_rate

    def quiet() -> Iterator[FleetRequest]:
        demands = islice(of_plan(ready.plan), quiet_requests)
        return (d._replace(tenant=QUIET) for d in faster(demands, quiet_rate / ready.own_rate))

    def flood(begin_s: float, count: int) -> Iterator[FleetRequest]:
        for number, demand in enumerate(islice(cycle(of_plan(ready.plan)), count)):
            copy = 1 + number // len(ready.plan.requests)
            yield demand._replace(tenant=FLOOD, copy=copy, at_s=begin_s + number / flood_rate)

    sustained = int(flood_rate * quiet_s)
    return {
        "none": quiet,
        "burst": lambda: merged([quiet(), flood(BURST_AT * quiet_s, BURST_REQUESTS)]),
        "sustained": lambda: merged([quiet(), flood(0.0, sustained)]),
    }


def run_fairness(ready: Stage, late: str, flood: str, demands: Iterator[FleetRequest]) -> Fairness:
    """`late`: serve or refuse, see `slo.late`."""
    done = simulate(
        ready.spec(REFERENCE, refuses_late=late == "refuse"),
        demands,
        ready.settings(f"{late}, {flood}"),
        trace_block_tokens=float(ready.plan.block_tokens),
    )
    tenants = {group.name: group for group in done.report.tenants}
    flooding = tenants.get(FLOOD)
    case = ready.case
    served = [r for r in done.fleet.stats if r.tenant != FLOOD and r.outcome is RequestOutcome.COMPLETED]
    timely = [r for r in served if r.ttft_s is not None and r.ttft_s <= case.ttft_slo_s]
    quiet_requests = tenants[QUIET].offered if QUIET in tenants else done.report.offered
    return Fairness(
        late=late,
        flood=flood,
        quiet_share=tenants[QUIET].goodput_share if QUIET in tenants else done.report.goodput_share,
        flood_share=flooding.goodput_share if flooding is not None else 0.0,
        quiet_requests=quiet_requests,
        quiet_refused=quiet_requests - len(served),
        quiet_late=len(served) - len(timely),
        quiet_slow=sum(r.tpot_s is not None and r.tpot_s > case.tpot_slo_s for r in timely),
        flood_requests=flooding.offered if flooding is not None else 0,
    )


def measure(
    case: PlacementCase,
    *,
    capacity_per_s: float = 0.0,
    quiet_requests: int = 1200,
    with_fairness: bool = True,
    progress: Callable[[str], None],
) -> tuple[OverloadResult, dict[str, list[PoolSample]]]:
    """And the pools' loads over time, of each variant. `capacity_per_s` 0: searched. Raises SetupError: see
    `stage`."""
    ready = stage(case)
    if not capacity_per_s:
        capacity_per_s, _ = capacity(ready, REFERENCE, progress=progress)
    overload: list[Overload] = []
    samples: dict[str, list[PoolSample]] = {}
    for variant in VARIANTS:
        found, samples[variant.name] = run_overload(ready, variant, OVERLOAD * capacity_per_s)
        overload.append(found)
        progress(f"{variant.name}: {found.goodput_share:.1%} good, {found.wasted_prefill:.1%} in vain")
    fairness: list[Fairness] = []
    if with_fairness:
        kinds = floods(ready, capacity_per_s, quiet_requests=quiet_requests)
        for late in ("serve", "refuse"):
            for flood, demands in kinds.items():
                fairness.append(run_fairness(ready, late, flood, demands()))
                progress(
                    f"late {late}, flood {flood}: {fairness[-1].quiet_share:.1%} of the quiet one's good"
                )
    result = OverloadResult(
        trace=case.trace.name,
        requests=len(ready.plan.requests),
        cluster=f"{case.pools} of {case.model} on {case.tensor} × {case.gpu}",
        ttft_slo_s=case.ttft_slo_s,
        tpot_slo_s=case.tpot_slo_s,
        capacity_per_s=capacity_per_s,
        overload=overload,
        fairness=fairness,
    )
    return result, samples
