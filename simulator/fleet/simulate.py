"""Run a plan on a fleet and report it as a replay is reported; search the rate that it can take."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter

from baton.core import garbage
from loadgen.report import Report, RunSettings, make_report
from simulator.fleet.fleet import Fleet, Observer
from simulator.fleet.scaling import FleetScaling
from simulator.fleet.spec import FleetSpec
from simulator.fleet.workload import FleetRequest

SEARCH_STEPS_MAX = 12
SEARCH_WIDTH = 0.02
"""A search ends when the rates that do and do not attain the goal differ by less than that share."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of one run."""

    fleet: Fleet
    report: Report
    wall_s: float
    scaling: FleetScaling | None = None

    @property
    def virtual_s(self) -> float:
        return self.fleet.clock.now_s


def simulate(
    spec: FleetSpec,
    requests: Iterator[FleetRequest],
    settings: RunSettings,
    *,
    trace_block_tokens: float,
    observer: Observer | None = None,
    scale: Callable[[Fleet], FleetScaling] | None = None,
    begin: Callable[[Fleet], None] | None = None,
) -> Simulated:
    """Run to the end of the last request, or until the observer stops it, and report the requests that ended.
    `scale` makes what scales the fleet, and `begin` plans what happens to it."""
    begun_s = perf_counter()
    fleet = Fleet(spec, trace_block_tokens=trace_block_tokens)
    scaling = scale(fleet) if scale is not None else None
    if begin is not None:
        begin(fleet)
    with garbage.spared(GARBAGE_THRESHOLDS):
        fleet.run(requests, observer=observer)
    report = make_report(fleet.stats, settings)
    # Records hold the first and the last token's instants only: what lies between is not known.
    report = replace(report, itl=None, distributions=replace(report.distributions, itl=()))
    return Simulated(fleet, report, perf_counter() - begun_s, scaling)


GARBAGE_THRESHOLDS = (50_000, 20, 50)
"""Thresholds of the garbage collector. A large cluster is millions of objects that stay; what a request
leaves behind in circles is still collected, in larger heaps."""


def faster(requests: Iterator[FleetRequest], factor: float) -> Iterator[FleetRequest]:
    """Return the same requests at `factor` times the rate."""
    for request in requests:
        yield request._replace(at_s=request.at_s / factor)


def attains(
    spec: FleetSpec,
    requests: Iterator[FleetRequest],
    *,
    trace_block_tokens: float,
    attain: float,
    planned: int,
) -> float:
    """Return the share of requests that meet their objectives. The run stops, with what it has, when the goal
    is out of reach."""

    def look(fleet: Fleet) -> bool:
        missed = len(fleet.stats) - fleet.met
        return missed <= (1 - attain) * planned + 1

    fleet = Fleet(spec, trace_block_tokens=trace_block_tokens)
    with garbage.spared(GARBAGE_THRESHOLDS):
        fleet.run(requests, observer=look)
    if fleet.is_stopped:
        return min(fleet.met / max(1, len(fleet.stats)), attain - 1e-6)
    return fleet.met / max(1, len(fleet.stats))


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate at which the goal is attained, as a factor of the plan's own."""

    factor: float
    share: float
    probes: tuple[tuple[float, float], ...]
    """Pairs of (factor, share), in the order in which they ran."""


def search(
    share_at: Callable[[float], float],
    *,
    attain: float = 0.9,
    first: float = 1.0,
    width: float = SEARCH_WIDTH,
    progress: Callable[[float, float], None] | None = None,
) -> Capacity:
    """Double or halve the rate until the goal lies between two rates, then halve the gap, on the scale of
    ratios. `share_at` takes a factor of the plan's rate."""
    probes: list[tuple[float, float]] = []

    def probe(factor: float) -> bool:
        share = share_at(factor)
        probes.append((factor, share))
        if progress is not None:
            progress(factor, share)
        return share >= attain

    good, bad = 0.0, math.inf
    factor = first
    while len(probes) < SEARCH_STEPS_MAX:
        if probe(factor):
            good = factor
        else:
            bad = factor
        if good and bad < math.inf:
            if bad / good - 1 < width:
                break
            factor = math.sqrt(good * bad)
        else:
            factor = factor * 2 if good else factor / 2
    share = next((share for at, share in probes if at == good), 0.0)
    return Capacity(good, share, tuple(probes))
