"""`baton bench …`"""

import asyncio
import signal
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.config import Config
from baton.files.terminal import new_console
from baton.wire.transport import secure
from benchmarks import handover as handover_bench
from benchmarks.autoscale_cli import autoscale
from benchmarks.engine_cli import engine
from benchmarks.eviction.cli import policies
from benchmarks.faults_cli import faults
from benchmarks.fidelity_cli import fidelity
from benchmarks.goodput_cli import goodput
from benchmarks.hedging_cli import hedging
from benchmarks.kernels_cli import kernels
from benchmarks.overload_cli import overload
from benchmarks.placement_cli import placement
from benchmarks.quality_cli import quality
from benchmarks.reuse_cli import reuse
from benchmarks.router_cli import router
from benchmarks.speculation_cli import speculation
from benchmarks.store_cli import store
from benchmarks.working_set_cli import store_cost, working_set
from control_plane.reaper import Reaper

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("autoscale")(autoscale)
app.command("engine")(engine)
app.command("faults")(faults)
app.command("fidelity")(fidelity)
app.command("quality")(quality)
app.command("goodput")(goodput)
app.command("hedging")(hedging)
app.command("kernels")(kernels)
app.command("speculation")(speculation)
app.command("policies")(policies)
app.command("store")(store)
app.command("overload")(overload)
app.command("placement")(placement)
app.command("reuse")(reuse)
app.command("router")(router)
app.command("working-set")(working_set)
app.command("store-cost")(store_cost)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


@app.callback()
def bench(context: typer.Context) -> None:
    """Parts of Baton against their limits, as ratios measured in one run.

    Example: baton bench handover --model models/baton-demo
    """
    # What a bench has started is ended by the way out; SIGTERM takes the one that Ctrl-C takes. (Not by
    # raising SIGINT: scripts start what runs in the background with that ignored.)
    signal.signal(signal.SIGTERM, _interrupt)
    context.call_on_close(Reaper().close)  # for SIGKILL
    config = Config()  # of the environment: the processes that a benchmark starts have the same
    secure(config.tls, config.access)


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def handover(
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id.")],
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "128,512,2048",
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="Requests per length.")] = 100,
    step_tokens: Annotated[int, typer.Option(min=1, help="Prefill chunk in tokens.")] = 512,
    sets: Annotated[list[str], typer.Option("--set", metavar="SECTION.FIELD=VALUE")] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Last prefill chunk done to request in the decode batch, beside the raw transfer of its bytes.

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
    table = Table(title="Hand-over, ms")
    for column in (
        "prompt",
        "MB",
        "last chunk MB",
        "p50",
        "p99",
        "raw, last chunk",
        "raw, all",
        "over raw p50",
    ):
        table.add_column(column, justify="right")
    for r in results:
        times = (r.handover_p50_s, r.handover_p99_s, r.raw_last_chunk_s, r.raw_all_s, r.overhead_p50_s)
        sizes = (f"{r.all_bytes / 1e6:.1f}", f"{r.last_chunk_bytes / 1e6:.1f}")
        table.add_row(str(r.prompt_tokens), *sizes, *(f"{t * 1e3:.2f}" for t in times))
    new_console().print(table)


@app.command()
def transfer(
    block_bytes: Annotated[int, typer.Option(min=1)] = 524_288,
    blocks: Annotated[int, typer.Option(min=1)] = 512,
    seconds: Annotated[float, typer.Option(min=0.1, max=600)] = 5.0,
) -> None:
    """Reads between two processes: as the worker does them, raw NIXL, and memcpy, in one run.

    Example: baton bench transfer --block-bytes 524288 --blocks 512
    """
    from benchmarks.transfer import run

    print(run(block_bytes=block_bytes, block_count=blocks, seconds=seconds))
