"""A replay for people: live progress while it runs, tables when it is over."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadgen.records import Outcome, Record
from loadgen.report import Percentiles, Report, Slo
from loadgen.runner import Observer

_LATENCIES = ("ttft", "tpot", "itl", "e2e", "lateness")
_NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT (after the first)",
    "itl": "ITL",
    "e2e": "end to end",
    "lateness": "our own lateness",
}


@contextmanager
def live_progress(console: Console, *, planned: int, slo: Slo) -> Generator[Observer]:
    """A line with counts and goodput; the observer it yields keeps it up to date."""
    columns = (
        TextColumn("replay"),
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.total}, {task.fields[running]} running"),
        TextColumn("[green]{task.fields[done]} done[/] [yellow]{task.fields[refused]} refused[/]"),
        TextColumn("[red]{task.fields[failed]} failed[/] goodput {task.fields[goodput]:.1%}"),
        TimeElapsedColumn(),
    )
    counts: dict[str, Any] = {"running": 0, "done": 0, "refused": 0, "failed": 0}
    fields = {Outcome.COMPLETED: "done", Outcome.REFUSED: "refused", Outcome.FAILED: "failed"}
    met = ended = 0
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task("replay", total=planned, goodput=0.0, **counts)

        def on_sent(record: Record) -> None:
            counts["running"] += 1
            bar.update(task, running=counts["running"])

        def on_ended(record: Record) -> None:
            nonlocal met, ended
            counts["running"] -= 1
            counts[fields[record.outcome or Outcome.FAILED]] += 1
            met += slo.is_met(record)
            ended += 1
            bar.update(task, advance=1, goodput=met / ended, **counts)

        yield Observer(on_sent, on_ended)


def show_report(console: Console, report: Report) -> None:
    s = report.settings
    arrivals = "spread inside the trace's ticks" if s.spread_ticks else "as in the trace"
    console.print(
        f"\n[bold]{escape(s.trace)}[/] ({s.trace_format}) against {escape(s.url)}, model {escape(s.model)}, "
        f"api {s.api}\n"
        f"scales: input {s.length_scale}, output {s.output_scale}, time {s.time_scale}; "
        f"arrivals {arrivals}; seed {s.seed}; "
        f"cut: {s.inputs_cut} inputs, {s.outputs_cut} outputs"
    )
    console.print(_counts_table(report))
    console.print(_latency_table(report))
    console.print(_rates_table(report))


def _counts_table(report: Report) -> Table:
    table = Table(title=f"Requests in {report.duration_s:.1f} s", title_justify="left")
    for name in ("planned", "offered", "completed", "refused", "failed"):
        table.add_column(name, justify="right")
    table.add_column("why")
    why = ", ".join(f"{count} {kind}" for kind, count in sorted(report.errors.items())) or "-"
    counts = (report.settings.planned, report.offered, report.completed, report.refused, report.failed)
    table.add_row(*(str(c) for c in counts), why)
    return table


def _latency_table(report: Report) -> Table:
    table = Table(title="Seconds, from the planned instant", title_justify="left")
    for name in ("", "p50", "p90", "p99", "mean", "max"):
        table.add_column(name, justify="right" if name else "left")
    for name in _LATENCIES:
        figures: Percentiles | None = getattr(report, name)
        cells = (
            ("-",) * 5
            if figures is None
            else tuple(f"{v:.4f}" for v in (figures.p50, figures.p90, figures.p99, figures.mean, figures.max))
        )
        table.add_row(_NAMES[name], *cells)
    return table


def _rates_table(report: Report) -> Table:
    s = report.settings
    slo = ", ".join(
        f"{name} <= {target:g} s"
        for name, target in (("TTFT", s.slo.ttft_s), ("TPOT", s.slo.tpot_s))
        if target is not None
    )
    pool = "no bound" if s.server_cache_blocks is None else f"{s.server_cache_blocks} blocks"
    table = Table(show_header=False)
    table.add_row("completed requests / s", f"{report.requests_per_s:.3f}")
    table.add_row("prompt tokens / s", f"{report.prompt_tokens_per_s:.1f}")
    table.add_row("output tokens / s", f"{report.output_tokens_per_s:.1f}")
    table.add_row(
        f"goodput ({slo or 'no targets: all completed'})",
        f"{report.goodput_share:.1%} of offered, {report.goodput_per_s:.3f} / s",
    )
    table.add_row("cache hits, measured", _share(report.cache_hit_ratio, "the server does not say"))
    table.add_row(
        f"cache hits, expected of LRU ({pool} of {s.server_block_tokens} tokens)",
        _share(s.expected_hit_ratio, "text prompts: not comparable"),
    )
    return table


def _share(ratio: float | None, otherwise: str) -> str:
    return otherwise if ratio is None else f"{ratio:.2%} of prompt tokens"
