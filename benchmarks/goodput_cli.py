"""`baton bench goodput`."""

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.core.errors import SetupError
from baton.files.outputs import check_writable, write_whole
from baton.files.terminal import new_console
from baton.telemetry.machine import scheduling_note
from benchmarks import goodput as bench_runs
from benchmarks.bench_model import make_bench_model
from benchmarks.goodput import GoodputBench, TraceUse, trace_at
from benchmarks.goodput_result import GoodputRun, make_curves, make_ratios
from benchmarks.goodput_show import GoodputSummary, show
from benchmarks.goodput_variants import ServerVariant, baton_variants, choose, read_peers
from loadgen.options import as_command
from loadgen.slo import Slo

INPUT_TOKENS_MAX = 3072
OUTPUT_TOKENS_MAX = 256
AZURE_START = 4000
"""The hundred requests from here on are about as long on average as those of the whole trace."""


@dataclass(frozen=True)
class GoodputOptions:
    azure: Annotated[Path | None, typer.Option(help="Azure's conversation trace (CSV).")] = None
    mooncake: Annotated[Path | None, typer.Option(help="Mooncake's conversation trace (JSON lines).")] = None
    peers: Annotated[
        Path | None,
        typer.Option(help="File that describes other servers, such as docs/examples/goodput-peers.toml."),
    ] = None
    program: Annotated[
        list[str], typer.Option(metavar="NAME=PATH", help="Path of a program that --peers names.")
    ] = field(default_factory=list[str])
    variants: Annotated[
        str, typer.Option(help="Names of the variants to run, in this order; empty: all.")
    ] = ""
    results: Annotated[Path, typer.Option(help="Folder of the runs; existing runs are not repeated.")] = Path(
        "goodput-results"
    )
    model: Annotated[Path, typer.Option(help="Folder of the benchmark's model; created if missing.")] = Path(
        "models/bench-82m"
    )
    cores: Annotated[str, typer.Option(help="Cores of the servers and the load generator.")] = "0,1"
    tight: Annotated[float, typer.Option(min=0.001, help="Tight TPOT objective in seconds.")] = 0.025
    loose: Annotated[float, typer.Option(min=0.001, help="Loose TPOT objective in seconds.")] = 0.1
    ttft: Annotated[float, typer.Option(min=0.001, help="TTFT objective in seconds.")] = 2.0
    only: Annotated[str, typer.Option(help="Judge by one objective alone: tight or loose.")] = ""
    azure_rates: Annotated[str, typer.Option(help="Rates to offer, in requests per second.")] = "2,3,4,5,6"
    azure_scale: Annotated[
        str, typer.Option(metavar="INPUT:OUTPUT", help="Factors for input and output lengths.")
    ] = "1/2:1/4"
    mooncake_rates: Annotated[str, typer.Option(help="Rates to offer, in requests per second.")] = "1,2,3,4"
    mooncake_scale: Annotated[
        str, typer.Option(metavar="INPUT:OUTPUT", help="Factors for input and output lengths.")
    ] = "1/16:1/8"
    rounds: Annotated[int, typer.Option(min=1, max=20, help="Rounds; each starts every variant in turn.")] = 2
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals in one run.")] = 40.0
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until a request counts as failed.")] = 30.0
    sets: Annotated[
        list[str],
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Further settings of Baton; repeatable."),
    ] = field(default_factory=list[str])
    only_show: Annotated[bool, typer.Option("--show", help="Only show the runs that are in --results.")] = (
        False
    )
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None


def _goodput(asked: GoodputOptions) -> None:
    """Compare the goodput of Baton and of other servers on the same cores, with the same requests.

    Every variant is started in turn, --rounds times, and gets the same plans at rising rates. A request that
    is refused, fails or takes longer than --timeout misses its objectives. Each run is a file of records
    under --results, which `baton compare` reads, too.

    Example: baton bench goodput --azure azure.csv --mooncake conversation.jsonl --peers peers.toml
    --program vllm=~/envs/vllm/bin/vllm
    """
    check_writable(asked.json_to)
    chosen = choose(_variants(asked), asked.variants)
    bench = _bench(asked)
    if asked.only_show:
        runs = bench_runs.found(bench, chosen)
    else:
        make_bench_model(bench.model)
        os.sched_setaffinity(0, bench.cores)
        runs = asyncio.run(bench_runs.run(bench, chosen))
    summary = _summary(bench, chosen, runs)
    show(new_console(), summary)
    if asked.json_to:
        write_whole(asked.json_to, (msgspec.json.format(msgspec.json.encode(summary)), b"\n"))


goodput = as_command(GoodputOptions, _goodput)


def _summary(bench: GoodputBench, chosen: list[ServerVariant], runs: list[GoodputRun]) -> GoodputSummary:
    curves = make_curves(runs, bench.objectives)
    return GoodputSummary(
        objectives=bench.objectives,
        about={v.name: v.about for v in chosen},
        plans={f"{r.key.trace}, {r.key.rate:g}/s, round {r.key.round + 1}": r.facts for r in runs},
        curves=curves,
        ratios=make_ratios(curves, {v.name: v.group for v in chosen}),
    )


def _bench(asked: GoodputOptions) -> GoodputBench:
    """Raises SetupError for an invalid option."""
    notes = Console(stderr=True, highlight=False)
    if (note := scheduling_note()) is not None:
        notes.print(f"note: {note}", markup=False)
    named = (
        ("azure", asked.azure, asked.azure_rates, asked.azure_scale),
        ("mooncake", asked.mooncake, asked.mooncake_rates, asked.mooncake_scale),
    )
    traces = tuple(_use(name, path, rates, scale) for name, path, rates, scale in named if path is not None)
    if not traces:
        raise SetupError("no trace: give --azure FILE, --mooncake FILE, or both")
    objectives = {"tight": Slo(asked.ttft, asked.tight), "loose": Slo(asked.ttft, asked.loose)}
    if asked.only and asked.only not in objectives:
        raise SetupError(f"--only {asked.only}: choose tight or loose")
    return GoodputBench(
        model=asked.model,
        results=asked.results,
        cores=_cores(asked.cores),
        traces=traces,
        objectives={n: s for n, s in objectives.items() if asked.only in ("", n)},
        rounds=asked.rounds,
        seconds=asked.seconds,
        timeout_s=asked.timeout,
        progress=lambda text: notes.print(text, markup=False, soft_wrap=True),
    )


def _variants(asked: GoodputOptions) -> list[ServerVariant]:
    programs: dict[str, str] = {}
    for text in asked.program:
        name, equals, path = text.partition("=")
        if not name or not equals or not path:
            raise SetupError(f"--program {text}: write NAME=PATH")
        programs[name] = path
    if asked.peers is None and programs:
        raise SetupError("--program needs --peers: it gives the path of a program of that file")
    return [*baton_variants(asked.sets), *(read_peers(asked.peers, programs) if asked.peers else [])]


def _use(name: str, path: Path, rates: str, scale: str) -> TraceUse:
    try:
        numbers = tuple(sorted(float(part) for part in rates.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] <= 0:
        raise SetupError(f"--{name}-rates {rates}: write numbers above 0, separated by commas")
    inputs, colon, outputs = scale.partition(":")
    if not colon:
        raise SetupError(f"--{name}-scale {scale}: write INPUT:OUTPUT, such as 1/16:1/8")
    start = AZURE_START if name == "azure" else 0
    trace_at(path)  # report a bad trace before any server starts
    return TraceUse(name, path, numbers, inputs, outputs, INPUT_TOKENS_MAX, OUTPUT_TOKENS_MAX, start)


def _cores(text: str) -> tuple[int, ...]:
    here = os.sched_getaffinity(0)
    try:
        cores = tuple(int(part) for part in text.split(","))
    except ValueError:
        cores = ()
    if not cores or not set(cores) <= here:
        raise SetupError(f"--cores {text}: choose from {sorted(here)}, separated by commas")
    return cores
