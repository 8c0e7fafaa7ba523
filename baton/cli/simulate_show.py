"""What `baton simulate` shows while it runs and when it is done."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.sim.fleet.fleet import Fleet, Observer
from baton.sim.fleet.pools import anti_phase, pool_chart, wasted_share
from baton.sim.fleet.scaling_report import figures_of, scaling_section, show_scaling, with_scaling
from baton.sim.fleet.simulate import Simulated
from baton.terminal import new_console
from loadgen.files import report_bytes, write_file, write_records
from loadgen.html.page import render
from loadgen.outputs import write_json
from loadgen.report import Settings
from loadgen.show import show_report


class Outputs(NamedTuple):
    """Where results go; None or empty: nowhere."""

    json_to: str
    html: Path | None
    plot: Path | None
    records: Path | None


@contextmanager
def live_progress(console: Console, *, planned: int) -> Generator[Observer]:
    """A line with virtual time, counts, goodput so far and how much faster than the clock it runs."""
    columns = (
        TextColumn("simulate"),
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.total}, {task.fields[live]} live, {task.fields[virtual]:.0f} s"),
        TextColumn("goodput {task.fields[goodput]:.1%}, {task.fields[speed]:.3g}× real time"),
        TimeElapsedColumn(),
    )
    begun_s = perf_counter()
    shown_s = 0.0
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("simulate", total=planned, live=0, virtual=0.0, goodput=1.0, speed=0.0)

        def look(fleet: Fleet) -> bool:
            nonlocal shown_s
            now_s = perf_counter()
            if now_s - shown_s < 0.25:
                return True
            shown_s = now_s
            ended = len(fleet.tally)
            bar.update(
                task,
                completed=ended,
                live=fleet.live_count,
                virtual=fleet.agenda.now_s,
                goodput=fleet.met / ended if ended else 1.0,
                speed=fleet.agenda.now_s / max(1e-9, now_s - begun_s),
                refresh=True,
            )
            return True

        yield look


def publish(done: Simulated, settings: Settings, *, rule: str, to: Outputs) -> None:
    """`rule`: by which it was scaled. Raises SetupError: a file cannot be written."""
    console = new_console(stderr=to.json_to == "-")
    show_report(console, done.report)
    fleet = done.fleet
    console.print(
        f"{fleet.agenda.event_count} events, {done.virtual_s:.0f} s virtual in {done.wall_s:.1f} s "
        f"({done.virtual_s / done.wall_s:.3g}× real time); prompt tokens computed "
        f"{fleet.prompt_tokens_computed}, of these {wasted_share(done.report, fleet):.1%} for requests that "
        "missed their targets; correlation of the pools' loads, at its lowest, "
        f"{anti_phase(fleet.samples):+.2f}"
    )
    if to.records is not None:
        write_records(to.records, fleet.tally, settings)
    if to.plot is not None:
        write_file(to.plot, pool_chart(fleet.samples).encode())
    if done.scaling is None:
        write_json(report_bytes(done.report), to.json_to)
        if to.html is not None:
            write_file(to.html, render([done.report]).encode())
        return
    figures = figures_of(done.scaling, rule=rule)
    show_scaling(console, figures)
    write_json(with_scaling(report_bytes(done.report), figures), to.json_to)
    if to.html is not None:
        write_file(to.html, render([done.report], more=[scaling_section(figures)]).encode())
