"""`baton bench goodput`"""

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
from benchmarks.goodput import Bench, TraceUse, trace_at
from benchmarks.goodput_result import Run, make_curves, make_ratios
from benchmarks.goodput_show import Summary, show
from benchmarks.goodput_variants import Variant, baton_variants, choose, read_peers
from loadgen.options import as_command
from loadgen.slo import Slo

INPUT_TOKENS_MAX = 3072
OUTPUT_TOKENS_MAX = 256
AZURE_START = 4000
"""Where a hundred requests are about as long as those of the whole trace are in the mean."""


@dataclass(frozen=True)
class GoodputOptions:
    azure: Annotated[Path | None, typer.Option(help="Azure's conversation trace (CSV).")] = None
    mooncake: Annotated[Path | None, typer.Option(help="Mooncake's conversation trace (JSON lines).")] = None
    peers: Annotated[
        Path | None, typer.Option(help="Other servers, as docs/examples/goodput-peers.toml describes some.")
    ] = None
    program: Annotated[
        list[str], typer.Option(metavar="NAME=PATH", help="Where a program of --peers is.")
    ] = field(default_factory=list[str])
    variants: Annotated[str, typer.Option(help="Only these, by name, in this order.")] = ""
    results: Annotated[Path, typer.Option(help="Folder of runs; those found there are not repeated.")] = Path(
        "goodput-results"
    )
    model: Annotated[Path, typer.Option(help="Folder of the benchmark's model; made if not there.")] = Path(
        "models/bench-82m"
    )
    cores: Annotated[str, typer.Option(help="Cores of the servers, and of the load generator.")] = "0,1"
    tight: Annotated[float, typer.Option(min=0.001, help="Tight objective per token, seconds.")] = 0.025
    loose: Annotated[float, typer.Option(min=0.001, help="Loose objective per token, seconds.")] = 0.1
    ttft: Annotated[float, typer.Option(min=0.001, help="Objective for the first token, seconds.")] = 2.0
    only: Annotated[str, typer.Option(help="tight or loose: judge by this one alone.")] = ""
    azure_rates: Annotated[str, typer.Option(help="Requests per second to offer.")] = "2,3,4,5,6"
    azure_scale: Annotated[str, typer.Option(metavar="INPUT:OUTPUT", help="Factors of lengths.")] = "1/2:1/4"
    mooncake_rates: Annotated[str, typer.Option(help="Requests per second to offer.")] = "1,2,3,4"
    mooncake_scale: Annotated[str, typer.Option(metavar="INPUT:OUTPUT", help="Factors of lengths.")] = (
        "1/16:1/8"
    )
    rounds: Annotated[int, typer.Option(min=1, max=20, help="Each starts every variant in turn.")] = 2
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals in one run.")] = 40.0
    timeout: Annotated[float, typer.Option(min=1, help="Of one request, seconds.")] = 30.0
    sets: Annotated[
        list[str], typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Further settings of Baton.")
    ] = field(default_factory=list[str])
    only_show: Annotated[bool, typer.Option("--show", help="Only what is in --results already.")] = False
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None


def _goodput(asked: GoodputOptions) -> None:
    """Goodput of Baton and of other servers on the same cores, with the same requests at the same instants.

    Every variant is started in turn, `--rounds` times, and offered the same plans at rising rates. A request
    that is refused, fails or takes longer than --timeout has missed its objectives. Each run is a file of
    records under --results, which `baton compare` reads too.

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


def _summary(bench: Bench, chosen: list[Variant], runs: list[Run]) -> Summary:
    curves = make_curves(runs, bench.objectives)
    return Summary(
        objectives=bench.objectives,
        about={v.name: v.about for v in chosen},
        plans={f"{r.key.trace}, {r.key.rate:g}/s, round {r.key.round + 1}": r.facts for r in runs},
        curves=curves,
        ratios=make_ratios(curves, {v.name: v.group for v in chosen}),
    )


def _bench(asked: GoodputOptions) -> Bench:
    """Raises SetupError: an option that makes no sense."""
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
        raise SetupError(f"--only {asked.only}: tight or loose")
    return Bench(
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


def _variants(asked: GoodputOptions) -> list[Variant]:
    programs: dict[str, str] = {}
    for text in asked.program:
        name, equals, path = text.partition("=")
        if not name or not equals or not path:
            raise SetupError(f"--program {text}: write NAME=PATH")
        programs[name] = path
    if asked.peers is None and programs:
        raise SetupError("--program names a program of a file given by --peers")
    return [*baton_variants(asked.sets), *(read_peers(asked.peers, programs) if asked.peers else [])]


def _use(name: str, path: Path, rates: str, scale: str) -> TraceUse:
    try:
        numbers = tuple(sorted(float(part) for part in rates.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] <= 0:
        raise SetupError(f"--{name}-rates {rates}: numbers above 0, separated by commas")
    inputs, colon, outputs = scale.partition(":")
    if not colon:
        raise SetupError(f"--{name}-scale {scale}: write INPUT:OUTPUT, such as 1/16:1/8")
    start = AZURE_START if name == "azure" else 0
    trace_at(path)  # what is wrong with it is said before any server starts
    return TraceUse(name, path, numbers, inputs, outputs, INPUT_TOKENS_MAX, OUTPUT_TOKENS_MAX, start)


def _cores(text: str) -> tuple[int, ...]:
    here = os.sched_getaffinity(0)
    try:
        cores = tuple(int(part) for part in text.split(","))
    except ValueError:
        cores = ()
    if not cores or not set(cores) <= here:
        raise SetupError(f"--cores {text}: numbers out of {sorted(here)}, separated by commas")
    return cores
