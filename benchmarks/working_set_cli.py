"""`baton bench working-set` and `baton bench store-cost`: the gain and the cost of the store."""

import asyncio
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.files.terminal import new_console
from benchmarks import peers, servers
from benchmarks import working_set as bench
from benchmarks.bench_model import make_bench_model
from benchmarks.servers import ServerResult
from benchmarks.working_set import WorkingSet, WorkingSetResult

NO_STORE = "store.host_bytes=0"
TOKEN_BYTES = 12_288
"""KV of one token of the bench model in bf16."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def working_set(
    pool_tokens: Annotated[int, typer.Option(min=1024, help="KV pool of each worker, in tokens.")] = 10_240,
    multiple: Annotated[
        float, typer.Option(min=0.5, help="Size of the working set, as a multiple of the pool.")
    ] = 4.0,
    prompt_tokens: Annotated[
        int, typer.Option(min=64, help="Prompt tokens of a session's first turn.")
    ] = 1280,
    turns: Annotated[int, typer.Option(min=1, help="Counted turns of each session.")] = 3,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests per second.")] = 3.0,
    ttft_slo: Annotated[float, typer.Option(min=0.001, help="TTFT target in seconds.")] = 1.0,
    tpot_slo: Annotated[float, typer.Option(min=0.001, help="TPOT target in seconds.")] = 0.1,
    as_json: Json = False,
) -> None:
    """Compare goodput with and without the store when returning sessions need more KV than a pool holds.

    It runs `baton serve` with one prefill and one decode worker on a random 82 M model, open loop.

    Example: baton bench working-set --rate 3 --multiple 4
    """
    load = WorkingSet(
        sessions=max(1, round(multiple * pool_tokens / prompt_tokens)),
        turns=turns,
        prompt_tokens=prompt_tokens,
        turn_tokens=64,
        output_tokens=16,
        rate_per_s=rate,
        ttft_slo_s=ttft_slo,
        tpot_slo_s=tpot_slo,
    )
    pool = f"engine.kv_bytes={pool_tokens * TOKEN_BYTES}"
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        model = make_bench_model(Path(temporary) / "bench-82m")
        compared = [
            peers.baton_peer(model, name="with the store", settings=[pool], split=True),
            peers.baton_peer(model, name="without", settings=[pool, NO_STORE], split=True),
        ]
        notes = Console(stderr=True, highlight=False)
        cores = sorted(os.sched_getaffinity(0))
        results = asyncio.run(bench.compare(compared, load, cores=cores, progress=notes.print))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
    else:
        new_console().print(_table(results))


def _table(results: list[WorkingSetResult]) -> Table:
    table = Table(title="Returning sessions")
    for name in ("", "completed", "goodput /s", "ratio to without", "TTFT p50 ms", "TPOT p50 ms", "cached"):
        table.add_column(name, justify="right" if name else "left")
    least = results[-1].goodput_per_s
    for result in results:
        table.add_row(
            result.name,
            f"{result.completed} of {result.requests}",
            f"{result.goodput_per_s:.2f}",
            f"{result.goodput_per_s / least:.2f}" if least else "∞",
            f"{result.ttft_p50_s * 1e3:.0f}",
            f"{result.tpot_p50_s * 1e3:.1f}",
            f"{result.cached_share:.1%}",
        )
    return table


def store_cost(
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds; medians are shown.")] = 3,
    concurrency: Annotated[str, typer.Option(help="Requests in flight.")] = "1,8",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=2)] = 64,
    as_json: Json = False,
) -> None:
    """Measure what the store costs traffic that never repeats a prompt.

    It runs `baton serve` with and without the store, in turn, closed loop.

    Example: baton bench store-cost --rounds 3
    """
    notes = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        model = make_bench_model(Path(temporary) / "bench-82m")
        results = servers.run(
            [
                peers.baton_peer(model, name="with the store"),
                peers.baton_peer(model, name="without", settings=[NO_STORE]),
            ],
            servers.ServerComparison(
                servers.loads_of(
                    [int(part) for part in concurrency.split(",")], prompt_tokens, output_tokens
                ),
                rounds,
                keeps_all=True,
                progress=notes.print,
            ),
            core_counts=[len(os.sched_getaffinity(0))],
        )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
    else:
        new_console().print(_cost_table(results))


def _cost_table(results: list[ServerResult]) -> Table:
    table = Table(title="Prompts that never repeat")
    for name in (
        "in flight",
        "",
        "output tok/s",
        "ratio to without",
        "TTFT p50 ms",
        "ratio to without",
        "TPOT p50 ms",
    ):
        table.add_column(name, justify="right" if name else "left")
    without = {r.load.concurrency: r for r in results if r.peer == "without"}
    for result in results:
        beside = without[result.load.concurrency]
        load, base = result.load, beside.load
        pairs = zip(result.output_tokens_per_s, beside.output_tokens_per_s, strict=True)
        table.add_row(
            str(load.concurrency),
            result.peer,
            f"{load.output_tokens_per_s:.1f}",
            f"{statistics.median(own / other for own, other in pairs):.3f}",
            f"{load.ttft_p50_s * 1e3:.1f}",
            f"{load.ttft_p50_s / base.ttft_p50_s:.3f}",
            f"{load.tpot_p50_s * 1e3:.2f}",
        )
    return table
