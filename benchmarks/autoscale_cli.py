"""`baton bench autoscale`."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks.autoscale import AutoscaleResult, measure_all
from benchmarks.autoscale_loads import AutoscaleLoad, MeanLengths
from benchmarks.autoscale_runs import AutoscaleCase, AutoscaleRun

SLOW_STARTS = 5.0
"""Start-up time of the load with slow starts, as a multiple of the other loads'."""
PROMPT_HEAVY, OUTPUT_HEAVY = MeanLengths(10_000, 1500), MeanLengths(3000, 4500)


def loads(
    *, hours: float, traces: tuple[Path, ...], rate: float, start_s: float = 120.0, keep: int = 1
) -> list[AutoscaleLoad]:
    """The loads that are compared. `rate` is in requests per second, where the profile of a drawn load is
    1."""
    seconds = 3600 * hours
    drawn = [AutoscaleLoad(name, seconds, rate, name) for name in ("steady", "step", "spike", "ramp", "day")]
    shift = AutoscaleLoad("shift", seconds, rate, "steady", lengths=PROMPT_HEAVY, later=OUTPUT_HEAVY)
    found = [
        *drawn,
        shift,
        *(_of_trace(trace, seconds, profile, keep) for trace in traces for profile in ("steady", "day")),
    ]
    slow = msgspec.structs.replace(shift, name="slow shift", start_s=SLOW_STARTS * start_s)
    return [*(msgspec.structs.replace(load, start_s=start_s) for load in found), slow]


def _of_trace(trace: Path, seconds: float, profile: str, keep: int) -> AutoscaleLoad:
    """A trace under a profile. Short prompts are made longer, so that few requests keep several workers
    busy."""
    scale = 4.0 if "azure" in trace.name else 1.0
    name = f"{trace.stem} {profile}"
    return AutoscaleLoad(name, seconds, 0.0, profile, trace=str(trace), length_scale=scale, keep=keep)


def autoscale(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Trace files to run besides the generated loads.")
    ] = None,
    only: Annotated[
        str, typer.Option(help="Names of the loads to run, separated by commas; empty: all.")
    ] = "",
    hours: Annotated[float, typer.Option(min=0.1, max=24, help="Virtual hours of each load.")] = 3.0,
    start_up: Annotated[float, typer.Option(min=1, help="Seconds that a new worker needs to start.")] = 120.0,
    keep: Annotated[int, typer.Option(min=1, help="Keep one conversation of a trace in this many.")] = 1,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests per second of the generated loads.")] = 0.6,
    model: Annotated[str, typer.Option(help="Known model, or a folder with config.json.")] = "llama-3-70b",
    gpu: Annotated[str, typer.Option(help="GPU whose data sheet is used.")] = "h20",
    tp: Annotated[int, typer.Option(min=1, help="GPUs per worker.")] = 4,
    ttft_slo: Annotated[float, typer.Option(min=0.001, help="TTFT target in seconds.")] = 20.0,
    tpot_slo: Annotated[float, typer.Option(min=0.001, help="TPOT target in seconds.")] = 0.03,
    attain: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Share of requests that should meet their targets.")
    ] = 0.95,
    search: Annotated[bool, typer.Option(help="Search for the best static cluster.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to use.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the autoscaler with static clusters, Kubernetes' rule and a queue-depth rule, in the simulator.

    Fewer --hours take less time, but misses while workers start then weigh more.

    Example: baton bench autoscale mooncake_conversation.jsonl azure_2023_conv.csv --jobs 2
    """
    notes = Console(stderr=True, highlight=False)
    found = loads(hours=hours, traces=tuple(traces or ()), rate=rate, start_s=start_up, keep=keep)
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in {load.name for load in found}]:
        raise SetupError(
            f"--only: no load {', '.join(unknown)}; choose from {', '.join(o.name for o in found)}"
        )
    cases = [
        AutoscaleCase(load, model, gpu, tp, ttft_slo, tpot_slo, attain)
        for load in found
        if not names or load.name in names
    ]
    results: list[AutoscaleResult] = []
    for result in measure_all(cases, jobs=jobs, searches=search, progress=notes.print):
        results.append(result)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
    else:
        new_console(highlight=False).print(table_of(results))


COLUMNS = (
    "load",
    "rule",
    "met",
    "GPU-hours",
    "of best static's",
    "of peak's",
    "TTFT missed",
    "TPOT missed",
    "starts",
    "switches",
    "turns/h",
)


def table_of(results: list[AutoscaleResult]) -> Table:
    """One row per load and rule. Turns are reversals of scaling per hour, for prefill and decode, after
    warm-up."""
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("load", "rule") else "right")
    for result in results:
        for number, run in enumerate(result.runs):
            table.add_row(*_row(result, run, is_first=number == 0))
        table.add_section()
    return table


def _row(result: AutoscaleResult, run: AutoscaleRun, *, is_first: bool) -> list[str]:
    best, is_ours = result.best, run.rule.startswith("baton")
    return [
        result.case.load.name if is_first else "",
        f"{run.rule} {run.replicas}".strip(),
        f"{run.met:.1%}",
        f"{run.gpu_hours:.1f}",
        f"{run.gpu_hours / best.gpu_hours - 1:+.0%}" if best and is_ours else "",
        f"{run.gpu_hours / result.peak.gpu_hours - 1:+.0%}" if is_ours else "",
        f"{run.ttft_missed + run.refused / max(1, run.requests):.1%}",
        f"{run.tpot_missed:.1%}",
        str(run.starts),
        str(run.switches),
        ", ".join(f"{run.turns_per_hour.get(role, 0.0):.1f}" for role in ("prefill", "decode")),
    ]
