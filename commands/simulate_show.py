"""The progress and the results of `baton simulate`."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.files.outputs import in_turn, is_stdout
from baton.files.terminal import new_console
from loadgen.files import report_bytes, write_records
from loadgen.html.page import render
from loadgen.outputs import check_outputs, write_to
from loadgen.report import RunSettings
from loadgen.show import show_report
from simulator.fleet.fleet import Fleet, Observer
from simulator.fleet.pools import anti_phase, pool_chart, wasted_share
from simulator.fleet.scaling_report import figures_of, scaling_section, show_scaling, with_scaling
from simulator.fleet.simulate import Simulated


class Outputs(NamedTuple):
    """Destinations of the results; None or empty means nowhere."""

    json_to: str
    html: Path | None
    plot: Path | None
    records: Path | None

    def check(self) -> None:
        """Raises SetupError."""
        check_outputs({f"--{name.removesuffix('_to')}": to for name, to in self._asdict().items()})


@contextmanager
def live_progress(console: Console, *, planned: int) -> Generator[Observer]:
    """A progress line with virtual time, counts, goodput so far, and the speed-up over real time."""
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
            ended = len(fleet.stats)
            bar.update(
                task,
                completed=ended,
                live=fleet.live_count,
                virtual=fleet.clock.now_s,
                goodput=fleet.met / ended if ended else 1.0,
                speed=fleet.clock.now_s / max(1e-9, now_s - begun_s),
                refresh=True,
            )
            return True

        yield look


def publish(done: Simulated, settings: RunSettings, *, rule: str, to: Outputs) -> None:
    """Write every output, even if another one fails. `rule` is the autoscaling rule. Raises CannotWrite."""
    console = new_console(stderr=any(map(is_stdout, to)))
    figures = None if done.scaling is None else figures_of(done.scaling, rule=rule)
    more = () if figures is None else (scaling_section(figures),)

    def json() -> bytes:
        plain = report_bytes(done.report)
        return plain if figures is None else with_scaling(plain, figures)

    in_turn(
        (
            lambda: _show(console, done),
            lambda: None if figures is None else show_scaling(console, figures),
            lambda: None if not to.records else write_records(to.records, done.fleet.stats, settings),
            lambda: write_to(to.plot, lambda: pool_chart(done.fleet.samples).encode()),
            lambda: write_to(to.html, lambda: render([done.report], more=more).encode()),
            lambda: write_to(to.json_to, json),
        )
    )


def _show(console: Console, done: Simulated) -> None:
    show_report(console, done.report)
    fleet = done.fleet
    console.print(
        f"{fleet.clock.event_count} events, {done.virtual_s:.0f} s virtual in {done.wall_s:.1f} s "
        f"({done.virtual_s / done.wall_s:.3g}× real time); prompt tokens computed "
        f"{fleet.prompt_tokens_computed}, of these {wasted_share(done.report, fleet):.1%} for requests that "
        "missed their targets; correlation of the pools' loads, at its lowest, "
        f"{anti_phase(fleet.samples):+.2f}"
    )
