"""`baton bench placement`."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks.placement import LOADS, POLICIES, PlacementCase, PlacementResult, measure
from simulator.fleet.setup import PoolSizes


def placement(
    trace: Annotated[Path, typer.Argument(help="Trace file as for `baton replay`.")],
    model: Annotated[str, typer.Option(help="Known model, or a folder with config.json.")] = "llama-3-70b",
    gpu: Annotated[str, typer.Option(help="GPU whose data sheet is used.")] = "h100",
    tp: Annotated[int, typer.Option(min=1, help="GPUs per worker.")] = 4,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 12,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 4,
    ttft_slo: Annotated[float, typer.Option(min=0.001, help="TTFT target in seconds.")] = 10.0,
    tpot_slo: Annotated[float, typer.Option(min=0.001, help="TPOT target in seconds.")] = 0.1,
    policies: Annotated[str, typer.Option(help="Policies to compare, separated by commas.")] = ",".join(
        POLICIES
    ),
    loads: Annotated[str, typer.Option(help="Loads as shares of the capacity.")] = ",".join(map(str, LOADS)),
    capacity: Annotated[
        float, typer.Option(min=0, help="Capacity in requests per second; 0: search for it.")
    ] = 0.0,
    limit: Annotated[int, typer.Option(min=0, help="Take at most this many requests; 0: all.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to use.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals and random choices.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare placement policies in the fleet simulator, at shares of the reference policy's capacity.

    Example: baton bench placement mooncake_conversation.jsonl --prefill 12 --decode 4 --limit 4000
    """
    notes = Console(stderr=True, highlight=False)
    case = PlacementCase(trace, model, gpu, tp, PoolSizes(prefill, decode), ttft_slo, tpot_slo, limit, seed)
    result = measure(
        case,
        policies=_policies(policies),
        loads=_loads(loads),
        capacity_per_s=capacity,
        jobs=jobs,
        progress=notes.print,
    )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        show(result, new_console(highlight=False))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise SetupError(f"--policies: no policy {', '.join(unknown)}; choose from {', '.join(POLICIES)}")
    return names


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(float(load) for load in text.split(","))
    except ValueError:
        raise SetupError(f"--loads {text!r}: write numbers separated by commas") from None
    if min(loads) <= 0:
        raise SetupError(f"--loads {min(loads)}: must be above 0")
    return loads


def show(result: PlacementResult, console: Console) -> None:
    """One row per load and policy; the best goodput of each load is marked."""
    table = Table(
        title=f"{result.trace}, {result.requests} requests, {result.cluster}\n"
        f"TTFT <= {result.ttft_slo_s:g} s, TPOT <= {result.tpot_slo_s:g} s; capacity "
        f"({result.reference}) {result.capacity_per_s:.2f} requests/s"
    )
    names = (
        "load",
        "policy",
        "goodput",
        "per s",
        "TTFT mean",
        "TTFT p99",
        "TPOT p99",
        "hits",
        "refused",
        "wasted",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right")
    best = {
        o.load: max(x.goodput_share for x in result.outcomes if x.load == o.load) for o in result.outcomes
    }
    for outcome in result.outcomes:
        mark = "*" if outcome.goodput_share == best[outcome.load] else ""
        table.add_row(
            f"{outcome.load:.0%}",
            outcome.policy,
            f"{outcome.goodput_share:.1%}{mark}",
            f"{outcome.goodput_per_s:.2f}",
            f"{outcome.ttft_mean_s:.2f}",
            f"{outcome.ttft_p99_s:.2f}",
            f"{outcome.tpot_p99_s:.3f}",
            f"{outcome.cache_hit_ratio:.1%}",
            str(outcome.refused),
            f"{outcome.wasted_prefill:.1%}",
        )
    console.print(table)
