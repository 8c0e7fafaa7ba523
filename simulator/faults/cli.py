"""`baton sim` runs the fault simulator: the cluster's decisions under virtual time, with faults, seed by
seed."""

import os
import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from simulator.faults.runner import RunReport, SeedReport, run_seed, run_seeds, summarise

FAILURES_SHOWN_MAX = 3


def sim(
    seeds: Annotated[int, typer.Option(min=1, help="Count of seeds to run.")] = 100,
    seed: Annotated[
        int | None, typer.Option(help="Run this seed alone, and print the history of its failure.")
    ] = None,
    start: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0 means one per core.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Fault simulator: run the production decisions (router, scheduler, leases, KV receiver) under virtual
    time with seeded faults, and check what must always hold. The exit status is 1 if it did not. `baton
    simulate` is the other one, the fleet simulator: large clusters with modelled GPUs."""
    console = Console(stderr=json)
    if seed is not None:
        report = summarise([run_seed(seed)])
    else:
        report = summarise(
            _with_progress(run_seeds(seeds, start=start, jobs=jobs or _cores()), seeds, console)
        )
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        show(report, console)
    if not report.is_ok:
        raise typer.Exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _with_progress(reports: Iterator[SeedReport], count: int, console: Console) -> Iterator[SeedReport]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]} failed"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seeds", total=count, failed=0)
        failed = 0
        for report in reports:
            failed += not report.is_ok
            progress.update(task, advance=1, failed=failed)
            yield report


def show(report: RunReport, console: Console) -> None:
    """Print the counts, then the failures with their histories."""
    table = Table(
        title=f"{report.seed_count} seeds, {report.event_count} events, {report.virtual_s:.0f} s virtual"
    )
    table.add_column("what happened")
    table.add_column("times", justify="right")
    for name in sorted(report.counts):
        table.add_row(name, str(report.counts[name]))
    console.print(table)
    if report.never_happened:
        console.print("[bold]never happened:[/bold] " + ", ".join(report.never_happened))
    for failure in report.failures[:FAILURES_SHOWN_MAX]:
        _show_failure(failure, console)
    if len(report.failures) > FAILURES_SHOWN_MAX:
        rest = report.failures[FAILURES_SHOWN_MAX:]
        console.print(f"… and {len(rest)} more: seeds " + ", ".join(str(f.seed) for f in rest[:50]))


def _show_failure(failure: SeedReport, console: Console) -> None:
    console.rule(f"seed {failure.seed}: invariant {failure.invariant}")
    console.print(failure.message, markup=False, highlight=False)
    console.print("faults: " + (", ".join(failure.faults) or "none"), markup=False)
    for line in failure.history:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"repeat with: {failure.command}", markup=False)
