"""Compares the autoscaler with other rules on the fleet simulator, over loads that change in known ways.

Each load runs under the production autoscaler, Kubernetes' rule, a queue-depth rule and a rule that knows the
future, and on clusters of fixed size: one provisioned for the peak, and the cheapest one, found by search,
that attains as much as the autoscaler did.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import msgspec

from benchmarks.autoscale_runs import HPA_TARGET, AutoscaleCase, AutoscaleRun, stage
from benchmarks.autoscale_static import FIRST_S, Clairvoyant, best_static, peak_pools, sized_pools
from simulator.fleet.scaling_rules import RuleName
from simulator.fleet.setup import PoolSizes

JUMPS = ("step", "spike")
"""Profiles with a sudden change."""
HEADROOM = 2.0
"""`autoscale.headroom` of a second run for profiles with a sudden change."""


class AutoscaleResult(msgspec.Struct, frozen=True):
    """The results of all rules under one load."""

    case: AutoscaleCase
    runs: list[AutoscaleRun]
    baton: AutoscaleRun
    best: AutoscaleRun | None
    """The cheapest static cluster that attains as much as the autoscaler."""
    peak: AutoscaleRun
    tried: int


def measure(
    case: AutoscaleCase, *, progress: Callable[[str], None], searches: bool = True
) -> AutoscaleResult:
    """Measure one case. Raises SetupError as `stage` does."""
    ready = stage(case)
    first = PoolSizes(*case.first) if case.first is not None else sized_pools(ready, 0.0, FIRST_S)
    runs: list[AutoscaleRun] = []

    def note(made: AutoscaleRun, name: str, pools: PoolSizes) -> AutoscaleRun:
        progress(f"{case.load.name}: {name} from {pools}: {made.met:.1%}, {made.gpu_hours:.1f} GPU-hours")
        runs.append(_named(made, name))
        return runs[-1]

    def run(rule: RuleName, name: str, pools: PoolSizes = first, **more: Any) -> AutoscaleRun:
        return note(ready.run(rule, pools, **more), name, pools)

    progress(f"{case.load.name}: {len(ready.demands)} requests")
    ours = run("baton", "baton")
    if case.load.profile in JUMPS:
        run("baton", f"baton, headroom {HEADROOM:g}", headroom=HEADROOM)
    if case.load.later is not None:
        run("baton", "baton, no role switches", can_switch=False)
    foresight = Clairvoyant(ready, ready.settings())
    note(ready.run_rule(foresight, "clairvoyant", first), "clairvoyant", first)
    run("hpa", f"hpa {HPA_TARGET:g}")
    run("queue-depth", "queue-depth")
    peak = run("static", "peak", peak_pools(ready))
    best, tried = None, list[AutoscaleRun]()
    if searches:
        best, tried = best_static(ready, ours.met, peak_pools(ready), progress=progress)
    if best is not None:
        runs.append(_named(best, "best static"))
    return AutoscaleResult(case, runs, ours, best, peak, len(tried))


def _named(run: AutoscaleRun, rule: str) -> AutoscaleRun:
    return msgspec.structs.replace(run, rule=rule)


def _task(work: tuple[AutoscaleCase, bool]) -> tuple[AutoscaleResult, list[str]]:
    notes: list[str] = []
    return measure(work[0], progress=notes.append, searches=work[1]), notes


def measure_all(
    cases: list[AutoscaleCase], *, jobs: int, searches: bool, progress: Callable[[str], None]
) -> Iterator[AutoscaleResult]:
    """Measure all cases and return their results in order."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for result, notes in pool.map(_task, [(case, searches) for case in cases]):
            for note in notes:
                progress(note)
            yield result
