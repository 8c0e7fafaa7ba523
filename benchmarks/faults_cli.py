"""`baton bench faults`."""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.core.messages import Role
from baton.files.outputs import check_writable
from baton.files.terminal import new_console
from benchmarks import faults as faults_bench
from benchmarks.faults import FaultsPlan, FaultsResult
from benchmarks.faults_parts import ray_nodes
from control_plane.desired import describe
from loadgen.report import Report
from loadgen.show import show_report
from loadgen.units import seconds

SETTINGS = (
    *("model.dtype=float32", "engine.threads=1", "router.migrate_after_s=0.5"),
    *("router.queue_wait_s=120", "router.queue_requests_max=10000"),
)
"""Settings for exact greedy tokens, workers that share cores, streams that leave a draining worker soon, and
requests that wait instead of being refused while workers are too few."""

FAULTS_AT = (0.05, 0.22, 0.32, 0.38)
"""Times of the faults as shares of the replay."""

BAR_CHARS = 24
BY_ITSELF = (" starts: ", " drains: ", " being killed: ", " switches to ", "was adopted")
"""Words of the control plane's log about actions that nobody ordered explicitly."""


def faults(
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id.")],
    trace: Annotated[str, typer.Option(help="Trace as for `baton replay`.")] = "synth:mooncake-conversation",
    seconds_: Annotated[float, typer.Option("--seconds", min=20, help="Length of the replay.")] = 120.0,
    rate: Annotated[float, typer.Option(min=0.1, help="Mean requests per second.")] = 2.0,
    length_scale: Annotated[str, typer.Option(help="Factor for the trace's prompts.")] = "1/64",
    output_scale: Annotated[str, typer.Option(help="Factor for the trace's answers.")] = "1/2",
    first_token: Annotated[int, typer.Option(min=0, help="Lowest token id to send.")] = 100,
    ttft_slo: Annotated[float, typer.Option(min=0.001, help="TTFT target in seconds.")] = 2.0,
    tpot_slo: Annotated[float, typer.Option(min=0.001, help="TPOT target in seconds.")] = 0.2,
    node_count: Annotated[int, typer.Option("--nodes", min=2, max=16, help="Ray nodes.")] = 3,
    prefill: Annotated[int, typer.Option(min=0)] = 1,
    decode: Annotated[int, typer.Option(min=0)] = 2,
    aggregated: Annotated[int, typer.Option(min=0)] = 0,
    sets: Annotated[list[str], typer.Option("--set", metavar="SECTION.FIELD=VALUE")] = [],  # noqa: B006
    html: Annotated[Path | None, typer.Option(help="Write the replay's page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Replay two days of load with a burst while faults strike, and compare every answer.

    Workers run on several Ray nodes of this machine. During the replay a node is lost, the control plane is
    killed, Redis restarts and all workers are replaced. Every answer is compared with that of an undisturbed
    run. The exit status is 1 if a request was lost or an answer differs.

    It needs `redis-server`. It only kills processes that it started.

    Example: baton bench faults --model models/baton-demo --first-token 300
    """
    check_writable(html)
    count = max(1, round(seconds_ * rate))
    which = ["--limit", str(count), "--length-scale", length_scale, "--output-scale", output_scale]
    which += ["--first-token", str(first_token), "--ttft-slo", str(ttft_slo), "--tpot-slo", str(tpot_slo)]
    drill = FaultsPlan(
        model=model,
        trace=trace,
        replay=(*which, "--rate", str(rate), *_waves(seconds_)),
        reference=(*which, "--rate", str(1.5 * rate)),
        counts={role: n for role, n in zip(Role, (prefill, decode, aggregated), strict=True) if n},
        settings=(*SETTINGS, *sets),
        faults_at_s=_fault_times(seconds_),
        length_s=seconds_,
        html=html,
    )
    notes = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="baton-faults-") as folder, ray_nodes(node_count) as nodes:
        running = faults_bench.run(drill, folder=Path(folder), nodes=nodes, progress=notes.print)
        result = asyncio.run(running)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
    else:
        show(new_console(), result)
    if complaint := what_was_lost(result.report):
        typer.echo(f"baton: {complaint}", err=True)
        raise typer.Exit(1)


def _fault_times(length_s: float) -> tuple[float, float, float, float]:
    first, second, third, fourth = FAULTS_AT
    return first * length_s, second * length_s, third * length_s, fourth * length_s


def _waves(length_s: float) -> list[str]:
    """Two days, each with a night at 0.4 and a noon at 1.6 of the mean rate, and a burst in the second."""
    turns = [(i * length_s / 4, 0.4 if i % 2 == 0 else 1.6) for i in range(5)]
    warp = ",".join(f"{at_s:g}:{factor:g}" for at_s, factor in turns)
    return ["--warp", warp, "--burst", f"{0.6 * length_s:g}:{0.05 * length_s:g}:3"]


def what_was_lost(report: Report) -> str:
    """The losses as text; empty if nothing was lost."""
    lost = report.offered - report.completed
    answers = report.answers
    if lost or report.interrupted:
        return (
            f"{lost} of {report.offered} requests were lost: {report.refused} refused, {report.failed} failed"
        )
    if answers is None or answers.compared < report.offered:
        return "not every answer could be compared"
    return f"{answers.differing} answers differ" if answers.differing else ""


# --- output ---------------------------------------------------------------------------------------


def show(console: Console, result: FaultsResult) -> None:
    show_report(console, result.report)
    console.print(_goodput(result))
    console.print(_faults(result))
    console.print(_decisions(result))
    console.print("[bold italic]Actions of the control plane, with their reasons[/]")
    for line in result.log:
        if any(words in line for words in BY_ITSELF):
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    console.print(f"Requests placed more than once: {result.placed_again}")


def _goodput(result: FaultsResult) -> Table:
    table = Table(title="Goodput over time", title_justify="left")
    for name in ("at", "met, of offered", "", "TTFT p50", "events"):
        table.add_column(name, justify="right" if name in ("at", "TTFT p50") else "left")
    windows, width_s = result.report.windows, result.report.window_s
    most = max((w.offered for w in windows), default=1) or 1
    for w in windows:
        met = round(BAR_CHARS * w.met / most)
        missed = round(BAR_CHARS * (w.offered - w.met) / most)
        bar = f"[green]{'█' * met}[/green][red]{'░' * missed}[/red]"
        ttft = "" if w.ttft_p50 is None else seconds(w.ttft_p50)
        table.add_row(
            f"{w.start_s:.0f} s", f"{w.met} of {w.offered}", bar, ttft, _meanwhile(result, w.start_s, width_s)
        )
    return table


def _meanwhile(result: FaultsResult, start_s: float, width_s: float) -> str:
    end_s = start_s + width_s
    begun = [f.name for f in result.faults if start_s <= f.at_s < end_s]
    healed = [f"{f.name}: healed" for f in result.faults if start_s <= f.at_s + f.healed_after_s < end_s]
    return ", ".join(begun + healed)


def _faults(result: FaultsResult) -> Table:
    table = Table("at", "fault", "all running again after", "", title="Faults", title_justify="left")
    for f in result.faults:
        table.add_row(f"{f.at_s:.1f} s", f.name, f"{f.healed_after_s:.1f} s", f.what)
    return table


def _decisions(result: FaultsResult) -> Table:
    table = Table("who", "what", "reason", "outcome", title="Decisions", title_justify="left")
    for d in result.decisions:
        took = "" if d.done_after_s is None else f" after {d.done_after_s:.1f} s"
        table.add_row(d.who, describe(d.action), d.reason, f"{d.outcome}{took}: {d.text}")
    return table
