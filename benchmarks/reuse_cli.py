"""`baton bench reuse`."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.files.terminal import new_console
from benchmarks import reuse as reuse_bench
from benchmarks.bench_model import FIRST_TOKEN, VOCAB, make_bench_model
from benchmarks.reuse import ReuseResult


def reuse(
    model: Annotated[str, typer.Option(help="Hugging Face folder; empty: a random 82 M Llama in bf16.")] = "",
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Length of each prompt.")] = 8192,
    prompts: Annotated[int, typer.Option(min=1, max=100, help="Prompts per source; medians are shown.")] = 3,
    directory: Annotated[
        str, typer.Option("--dir", help="Folder for the SSD files, on a disk, not tmpfs.")
    ] = "",
    vocabulary: Annotated[int, typer.Option(min=128, help="Token ids are drawn below this.")] = VOCAB,
    sets: Annotated[list[str], typer.Option("--set", metavar="SECTION.FIELD=VALUE")] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the time to first token of a repeated prompt, by where its KV comes from.

    The KV comes from the worker's pool, host memory, SSD or another host. The bench starts the processes of
    two hosts on this machine and kills some in between.

    Example: baton bench reuse --prompt-tokens 8192 --dir /var/tmp
    """
    notes = Console(stderr=True, highlight=False)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="baton-reuse-", dir=directory or None) as temporary:
        folder = Path(temporary)
        path = model or str(make_bench_model(folder / "bench-82m"))
        results = asyncio.run(
            reuse_bench.run(
                folder,
                path,
                prompt_tokens=prompt_tokens,
                prompts=prompts,
                vocabulary=(FIRST_TOKEN, vocabulary),
                settings=[f"engine.kv_bytes={2**30}", f"store.host_bytes={2**30}", *sets],
                cores=cores,
                progress=notes.print,
            )
        )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
    else:
        new_console().print(_table(results, prompt_tokens))


def _table(results: list[ReuseResult], prompt_tokens: int) -> Table:
    table = Table(title=f"A repeated prompt of {prompt_tokens} tokens")
    for name in ("KV from", "TTFT ms", "cached", "ratio to cold", "limit"):
        table.add_column(name, justify="left" if name == "KV from" else "right")
    for result in results:
        aim = "" if result.aim is None else f"≤ {result.aim:.0%}"
        table.add_row(
            result.source,
            f"{result.ttft_s * 1e3:.0f}",
            f"{result.cached_share:.1%}",
            f"{result.to_cold:.1%}",
            aim,
        )
    return table
