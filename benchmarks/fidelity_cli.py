"""`baton bench fidelity`."""

import asyncio
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from baton.telemetry.machine import scheduling_note
from benchmarks import fidelity as bench
from benchmarks.bench_model import make_bench_model
from benchmarks.fidelity import FidelityLoad, FidelityResult
from loadgen.lengths import parse_factor
from loadgen.report import Percentiles, Report
from loadgen.slo import Slo
from loadgen.traces import cut, read_trace
from simulator.fleet.setup import PoolSizes


def fidelity(
    trace: Annotated[Path, typer.Argument(help="Trace file as for `baton replay`.")],
    rate: Annotated[float, typer.Option(min=0.01, help="Requests per second.")] = 2.0,
    requests: Annotated[int, typer.Option(min=50, help="Requests that count.")] = 200,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Warm-up requests before them, at half the rate.")
    ] = 110,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers, one thread each.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    aggregated: Annotated[int, typer.Option(min=0, help="Workers that run both phases.")] = 0,
    input_scale: Annotated[str, typer.Option(help="Factor for input lengths.")] = "1/4",
    output_scale: Annotated[str, typer.Option(help="Factor for output lengths.")] = "1/4",
    max_input: Annotated[int, typer.Option(min=1, help="Cut longer inputs, after scaling.")] = 2048,
    ttft_slo: Annotated[float, typer.Option(min=0.001, help="TTFT target in seconds.")] = 2.0,
    tpot_slo: Annotated[float, typer.Option(min=0.001, help="TPOT target in seconds.")] = 0.05,
    sets: Annotated[list[str], typer.Option("--set", metavar="SECTION.FIELD=VALUE")] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare a live run with a simulation of the same requests, and check the router's predictions.

    `baton serve` runs on a random 82 M model; then the simulator runs with the costs that its workers report.

    Example: baton bench fidelity azure_conv.csv --rate 2 --requests 200
    """
    notes = Console(stderr=True, highlight=False)
    if (note := scheduling_note()) is not None:
        notes.print(f"note: {note}", markup=False)
    try:
        load = FidelityLoad(
            cut(read_trace(trace), limit=warm_up + requests),
            warm_up,
            rate,
            parse_factor(input_scale),
            parse_factor(output_scale),
            max_input,
            Slo(ttft_slo, tpot_slo),
        )
        pools = PoolSizes(0 if aggregated else prefill, 0 if aggregated else decode, aggregated)
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            outcome = asyncio.run(
                bench.run(
                    make_bench_model(Path(folder) / "bench-82m"),
                    load,
                    pools,
                    cores=sorted(os.sched_getaffinity(0)),
                    settings=sets,
                    log=Path(folder) / "log",
                    progress=notes.print,
                )
            )
    except SetupError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(orjson.dumps(asdict(outcome), default=str).decode())
        return
    _show(outcome, pools, rate)


def _show(outcome: FidelityResult, pools: PoolSizes, rate: float) -> None:
    live, simulated = outcome.live, outcome.simulated
    table = Table(title=f"{pools}, {live.offered} requests at {rate:g}/s", title_justify="left")
    for name in ("", "live", "simulated", "simulated / live"):
        table.add_column(name, justify="left" if not name else "right")
    gap = 100 * (simulated.goodput_share - live.goodput_share)
    table.add_row(
        "goodput", f"{live.goodput_share:.1%}", f"{simulated.goodput_share:.1%}", f"{gap:+.1f} points"
    )
    for name, pick in (("TTFT", _ttft), ("TPOT", _tpot)):
        for part in ("p50", "mean", "p90", "p99"):
            there, here = (getattr(pick(report), part, float("nan")) for report in (live, simulated))
            ratio = f"{here / there:.2f}" if there else "-"
            table.add_row(f"{name} {part}, ms", f"{there * 1e3:.1f}", f"{here * 1e3:.1f}", ratio)
    console = new_console()
    console.print(table)
    errors = live.predictions
    for name, error in (("TTFT", errors.ttft), ("TPOT", errors.tpot)) if errors is not None else ():
        if error is not None:
            console.print(
                f"predicted {name}: MAPE {error.mape:.1%}, median error {error.ape_p50:.1%}, bias "
                f"{error.bias:+.1%}, of {error.count} requests after the warm-up"
            )


def _ttft(report: Report) -> Percentiles | None:
    return report.ttft


def _tpot(report: Report) -> Percentiles | None:
    return report.tpot
