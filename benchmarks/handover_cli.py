"""`baton bench handover`."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.files.terminal import new_console
from benchmarks import handover as handover_bench

COLUMNS = ("prompt", "MB", "last chunk MB", "p50", "p99", "raw, last chunk", "raw, all", "over raw p50")


def handover(
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id.")],
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "128,512,2048",
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="Requests per length.")] = 100,
    step_tokens: Annotated[int, typer.Option(min=1, help="Prefill chunk in tokens.")] = 512,
    sets: Annotated[list[str], typer.Option("--set", metavar="SECTION.FIELD=VALUE")] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the hand-over from prefill to decode, and the raw transfer of the same bytes.

    It lasts from the end of the last prefill chunk until the request is in the decode batch.

    Example: baton bench handover --model models/baton-demo --lengths 512,2048
    """
    notes = Console(stderr=True)
    results = asyncio.run(
        handover_bench.run(
            model,
            prompt_lengths=[int(n) for n in lengths.split(",")],
            requests=requests,
            step_tokens=step_tokens,
            settings=sets,
            progress=notes.print,
        )
    )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
        return
    new_console().print(_table(results))


def _table(results: Sequence[handover_bench.HandoverBench]) -> Table:
    table = Table(title="Hand-over, ms")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for r in results:
        times = (r.handover_p50_s, r.handover_p99_s, r.raw_last_chunk_s, r.raw_all_s, r.overhead_p50_s)
        sizes = (f"{r.all_bytes / 1e6:.1f}", f"{r.last_chunk_bytes / 1e6:.1f}")
        table.add_row(str(r.prompt_tokens), *sizes, *(f"{t * 1e3:.2f}" for t in times))
    return table
