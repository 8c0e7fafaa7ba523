"""`baton bench overload`."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.files.outputs import check_writable
from baton.files.terminal import new_console
from benchmarks.overload import OVERLOAD, QUIET_SHARE, OverloadResult, measure
from benchmarks.placement import PlacementCase
from loadgen.files import write_file
from simulator.fleet.pools import pool_charts
from simulator.fleet.setup import PoolSizes


def overload(
    trace: Annotated[Path, typer.Argument(help="Trace file as for `baton replay`.")],
    model: Annotated[str, typer.Option(help="Known model, or a folder with config.json.")] = "llama-3-70b",
    gpu: Annotated[str, typer.Option(help="GPU whose data sheet is used.")] = "h100",
    tp: Annotated[int, typer.Option(min=1, help="GPUs per worker.")] = 4,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 12,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 4,
    ttft_slo: Annotated[float, typer.Option(min=0.001, help="TTFT target in seconds.")] = 10.0,
    tpot_slo: Annotated[float, typer.Option(min=0.001, help="TPOT target in seconds.")] = 0.1,
    capacity: Annotated[
        float, typer.Option(min=0, help="Capacity in requests per second; 0: search for it.")
    ] = 0.0,
    limit: Annotated[int, typer.Option(min=0, help="Take at most this many requests; 0: all.")] = 0,
    quiet: Annotated[int, typer.Option(min=10, help="Requests of the quiet tenant.")] = 1200,
    fairness: Annotated[bool, typer.Option(help="Also run two tenants, one of which floods.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals and random choices.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of the pools' load over time to this SVG file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure early rejection and fairness in the fleet simulator, at twice the capacity.

    The capacity is that of the placement policy slo.

    Example: baton bench overload mooncake_conversation.jsonl --limit 4000 --plot pools.svg
    """
    check_writable(plot)
    notes = Console(stderr=True, highlight=False)
    case = PlacementCase(trace, model, gpu, tp, PoolSizes(prefill, decode), ttft_slo, tpot_slo, limit, seed)
    result, samples = measure(
        case, capacity_per_s=capacity, quiet_requests=quiet, with_fairness=fairness, progress=notes.print
    )
    if plot is not None:
        write_file(plot, pool_charts(samples).encode())
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        show(result, new_console(highlight=False))


def show(result: OverloadResult, console: Console) -> None:
    table = Table(
        title=f"{result.trace}, {result.requests} requests at {OVERLOAD:g} × {result.capacity_per_s:.2f}/s, "
        f"{result.cluster}\nTTFT <= {result.ttft_slo_s:g} s, TPOT <= {result.tpot_slo_s:g} s"
    )
    for name in ("late requests", "policy", "goodput", "per s", "refused", "in vain", "tokens", "pools"):
        table.add_column(name, justify="left" if name in ("late requests", "policy") else "right")
    for one in result.overload:
        table.add_row(
            one.variant,
            one.policy,
            f"{one.goodput_share:.1%}",
            f"{one.goodput_per_s:.2f}",
            str(one.refused),
            f"{one.wasted_prefill:.1%}",
            str(one.wasted_tokens),
            f"{one.anti_phase:+.2f}",
        )
    console.print(table)
    if not result.fairness:
        return
    table = Table(title=f"One tenant at {QUIET_SHARE:.0%} of capacity, another that floods")
    for name in ("late", "flood", "requests", "good", "refused", "late", "slow", "of the flood", "good"):
        table.add_column(name, justify="right")
    for row in result.fairness:
        table.add_row(
            row.late,
            row.flood,
            str(row.quiet_requests),
            f"{row.quiet_share:.1%}",
            str(row.quiet_refused),
            str(row.quiet_late),
            str(row.quiet_slow),
            str(row.flood_requests),
            f"{row.flood_share:.1%}" if row.flood_requests else "",
        )
    console.print(table)
