"""`baton bench expert-layouts` and `baton bench node-loss`."""

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.files.terminal import new_console
from benchmarks.expert_nodes.node_loss import LossRun, NodeLossCase, run
from benchmarks.expert_nodes.published import PublishedRow, compare
from loadgen.slo import Slo

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def expert_layouts(
    load: Annotated[
        str, typer.Option(help="How tokens use experts: uniform, zipf:EXPONENT or a JSON file of counts.")
    ] = "zipf:1.0",
    fleet: Annotated[bool, typer.Option(help="Also run whole clusters in the fleet simulator.")] = True,
    as_json: _Json = False,
) -> None:
    """Compare DeepSeek-V3 on H100 nodes, as data sheets predict it, with published throughput.

    Constants are those of simulator/hardware.py, which hold for all models. Nothing is fitted to the figures.

    Example: baton bench expert-layouts --no-fleet
    """
    notes = Console(stderr=True, highlight=False)
    rows = compare(load, with_fleet=fleet, progress=notes.print)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        show_layouts(rows, new_console(highlight=False))


def show_layouts(rows: list[PublishedRow], console: Console) -> None:
    table = Table(
        title="DeepSeek-V3 on nodes of 8 H100: tokens per second and node\n"
        "ms: a step; then, of one layer and half of the batch, attention, experts, rows out and back"
    )
    columns = ("", "GPUs", "published", "by steps", "cluster", "differs")
    for number, column in enumerate((*columns, "step", "att.", "exp.", "out", "back", "busiest")):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(
            row.name,
            str(row.gpus),
            f"{row.published:,.0f}",
            f"{row.predicted:,.0f}",
            "" if row.simulated is None else f"{row.simulated:,.0f}",
            f"{row.difference:+.1%}",
            f"{row.step_ms:.0f}",
            f"{row.attention_ms:.2f}",
            f"{row.experts_ms:.2f}",
            f"{row.dispatch_ms:.2f}",
            f"{row.combine_ms:.2f}",
            f"{row.uneven:.2f}x",
        )
    console.print(table)


def node_loss(
    replicas: Annotated[
        str, typer.Option(help="Replicas that experts have on average, one number for each run.")
    ] = "1,1.125,2",
    pool: Annotated[Role, typer.Option(help="The pool that loses a node: prefill or decode.")] = Role.DECODE,
    prefill_nodes: Annotated[int, typer.Option(min=3, help="Nodes of 8 H100 that prefill.")] = 6,
    decode_nodes: Annotated[int, typer.Option(min=3, help="Nodes of 8 H100 that decode.")] = 9,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second.")] = 80.0,
    input_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2000,
    output_tokens: Annotated[int, typer.Option(min=2, help="Mean tokens of an answer.")] = 500,
    seconds: Annotated[float, typer.Option(min=10, help="Seconds in which requests come.")] = 80.0,
    at: Annotated[float, typer.Option(min=1, help="Second at which the node is lost.")] = 20.0,
    back: Annotated[float, typer.Option(min=1, help="Seconds until the node serves again.")] = 30.0,
    ttft_slo: Annotated[float, typer.Option(min=0.001, help="TTFT target in seconds.")] = 2.0,
    tpot_slo: Annotated[float, typer.Option(min=0.001, help="TPOT target in seconds.")] = 0.05,
    load: Annotated[
        str, typer.Option(help="How tokens use experts: uniform, zipf:EXPONENT or a JSON file of counts.")
    ] = "zipf:1.0",
    window: Annotated[float, typer.Option(min=1, help="Seconds of a row of the table.")] = 5.0,
    as_json: _Json = False,
) -> None:
    """Show the goodput of DeepSeek-V3 on H100 nodes while a node is lost, by the replicas of experts.

    The whole cluster runs in the fleet simulator, with the production router and the production placement.

    Example: baton bench node-loss --replicas 1.125,2 --pool decode
    """
    case = NodeLossCase(
        *(pool, prefill_nodes, decode_nodes, load, rate, input_tokens, output_tokens),
        *(seconds, at, back, Slo(ttft_slo, tpot_slo), window),
    )
    notes = Console(stderr=True, highlight=False)
    runs: list[LossRun] = []
    for number in _replicas(replicas):
        runs.append(run(case, number))
        notes.print(f"{number:g} replicas: {runs[-1].what}")
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(runs)).decode())
    else:
        show_losses(case, runs, new_console(highlight=False))


def _replicas(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not 1 <= min(found) <= max(found) <= 64:
        raise SetupError(f"--replicas {text}: write numbers from 1 to 64, separated by commas")
    return found


def show_losses(case: NodeLossCase, runs: list[LossRun], console: Console) -> None:
    table = Table(
        title=f"Share of the requests of each {case.window_s:g} s that met TTFT {case.slo.ttft_s:g} s and "
        f"TPOT {case.slo.tpot_s:g} s;\nthe {case.pool} pool loses a node at {case.at_s:g} s, back at "
        f"{case.at_s + case.back_s:g} s"
    )
    table.add_column("seconds", justify="right")
    for one in runs:
        table.add_column(f"{one.replicas:g} replicas", justify="right")
    for number, window in enumerate(runs[0].windows):
        cells = (one.windows[number] for one in runs)
        table.add_row(f"{window.from_s:g}", *(f"{cell.met / max(1, cell.arrived):.1%}" for cell in cells))
    table.add_section()
    table.add_row("all", *(f"{one.met:.1%}" for one in runs))
    table.add_row("failed", *(str(one.failed) for one in runs))
    table.add_row("pause", *(f"{one.pause_s:.1f} s" for one in runs))
    table.add_row("experts lost", *(f"{one.missing:,}" for one in runs))
    table.add_row("KV tokens of a GPU", *(f"{one.kv_tokens[str(case.pool)]:,}" for one in runs))
    console.print(table)
