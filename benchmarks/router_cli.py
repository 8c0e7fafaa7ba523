"""`baton bench router`."""

from typing import Annotated

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from baton.telemetry.machine import scheduling_note
from benchmarks.router import RouterLoad, RouterSeen, RouterTarget, measure
from benchmarks.router_index import IndexSeen

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def router(
    model: Annotated[str, typer.Option(help="Folder or hub id of a model; only its tokenizer is used.")],
    peer: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=COMMAND",
            help="Another router for OpenAI servers; {urls} and {port} are filled in. Repeatable.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    prompt_tokens: Annotated[int, typer.Option(min=16)] = 512,
    output_tokens: Annotated[int, typer.Option(min=2)] = 64,
    clients: Annotated[
        int,
        typer.Option(min=1, help="Requests in flight at full load. With few the router is idle at times."),
    ] = 1000,
    requests: Annotated[int, typer.Option(min=100, help="Requests at full load.")] = 8000,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds at half load.")] = 10.0,
    workers: Annotated[int, typer.Option(min=1, help="Free workers; with --pairs, of each role.")] = 2,
    pairs: Annotated[bool, typer.Option(help="Use prefill and decode workers, not aggregated ones.")] = False,
    step_ms: Annotated[float, typer.Option(min=0.1, help="Milliseconds between a sequence's tokens.")] = 10.0,
    blocks: Annotated[int, typer.Option(min=0, help="Blocks in the prefix index; 0: skip it.")] = 10_000_000,
    index_workers: Annotated[int, typer.Option(min=1)] = 64,
    http: Annotated[bool, typer.Option(help="Send requests over HTTP; off: only the decision.")] = True,
    as_json: Json = False,
) -> None:
    """Measure the router's own cost in front of workers that cost nothing.

    It shows CPU per request, added latency, and the time of a placement decision.

    Example: baton bench router --model models/baton-demo --peer 'sglang=sglang-router launch --worker-urls
    {urls} --port {port}'
    """
    from benchmarks import router_index

    notes = Console(stderr=True)
    if (note := scheduling_note()) is not None:
        notes.print(f"note: {note}", markup=False)
    targets = _targets(peer)
    load = RouterLoad(prompt_tokens, output_tokens, clients, requests, seconds)
    seen: list[RouterSeen] = []
    if http:
        running = measure(
            targets,
            model=model,
            load=load,
            pairs=pairs,
            workers=workers,
            step_s=step_ms / 1e3,
            progress=notes.print,
        )
        seen = uvloop.run(running)
    sizes = (512, 16_384) if blocks else ()
    index = [router_index.run(workers=index_workers, blocks=blocks, prompt_tokens=n) for n in sizes]
    _show(seen, index, as_json=as_json)


def _show(seen: list[RouterSeen], index: list[IndexSeen], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"routers": seen, "index": index})).decode())
        return
    if seen:
        new_console().print(_routers(seen))
    if index:
        new_console().print(_index(index))


def _targets(peers: list[str]) -> list[RouterTarget]:
    """Raises SetupError."""
    targets = [RouterTarget("baton", "")]
    for one in peers:
        name, _, command = one.partition("=")
        if not command:
            raise SetupError(f"--peer {one}: write NAME=COMMAND")
        targets.append(RouterTarget(name, command))
    return targets


def _routers(seen: list[RouterSeen]) -> Table:
    table = Table(title="Routers in front of workers that cost nothing")
    columns = (
        "router",
        "CPU ms/request",
        "requests/s/core",
        "full load",
        "failed",
        "half load",
        "TTFT p50",
        "p99",
        "without p50",
        "p99",
        "added p99",
        "long p50",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for r in seen:
        table.add_row(
            r.name,
            f"{r.cpu_s_per_request * 1e3:.2f}",
            f"{r.per_core:.0f}",
            f"{r.full.completed / r.full.took_s:.0f}/s",
            str(r.full.failed + r.half.failed),
            f"{r.half_rate:.0f}/s",
            *(f"{s * 1e3:.2f}" for s in _first_tokens_s(r)),
            "" if r.long is None else f"{r.long.ttft_p50_s * 1e3:.1f}",
        )
    return table


def _first_tokens_s(r: RouterSeen) -> tuple[float, ...]:
    with_it, without = r.half, r.direct
    added_s = with_it.ttft_p99_s - without.ttft_p99_s
    return with_it.ttft_p50_s, with_it.ttft_p99_s, without.ttft_p50_s, without.ttft_p99_s, added_s


def _index(seen: list[IndexSeen]) -> Table:
    table = Table(title="One placement decision, ms")
    columns = ("workers", "blocks", "bytes/block", "prompt", "p50", "p99", "CPU p50", "CPU p99", "match p50")
    for column in columns:
        table.add_column(column, justify="right")
    for i in seen:
        times = (i.decision_p50_s, i.decision_p99_s)
        times += (i.decision_cpu_p50_s, i.decision_cpu_p99_s, i.match_p50_s)
        sizes = (str(i.workers), f"{i.blocks:,}", f"{i.bytes_per_block:.1f}", str(i.prompt_tokens))
        table.add_row(*sizes, *(f"{s * 1e3:.3f}" for s in times))
    return table
