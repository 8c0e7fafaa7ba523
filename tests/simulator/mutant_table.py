"""The first seed that notices each mutant, and what notices it: `docs/mutants.md`.

`python -m tests.simulator.mutant_table` looks through the seeds from 0 for every mutant, on all cores, and
writes the page. What was found is kept in `build/` until the page is written, so that a run that was
interrupted goes on where it was; `--fresh` forgets it. `--only NAME` looks at some mutants again and keeps
the other rows of the page.
"""

import argparse
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from simulator.faults.runner import SeedOptions, SeedReport, run_seed
from tests.simulator.mutant import Mutant
from tests.simulator.mutants import MUTANTS

SEEDS_MAX = 200
"""Seeds within which every mutant is to be noticed."""
PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"
STATE = Path(__file__).parents[2] / "build" / "mutant_table.jsonl"
_QUICK = SeedOptions(keeps_history=False)
_ROW = re.compile(r"^\| (?P<name>[^|]+) \| (?P<broken>[^|]+) \| (?P<caught>[^|]+) \| (?P<seed>\d+) \|$")

HEAD = """# Mutants

Each mutant breaks one decision of production on purpose, and the fault simulator must notice it: its silence
means nothing otherwise. The table says what is broken, the invariant ([invariants](invariants.md)) and the
check that fails first, and the first seed that fails, counted from 0: `baton sim --seed N` with that decision
broken. Every mutant is to be noticed within {seeds} seeds.

`python -m tests.simulator.mutant_table` writes this page; `tests/simulator/test_mutations.py` tries the seed
of the page first, and the others when that one has become quiet.
"""


class Row(msgspec.Struct, frozen=True):
    """One mutant of the table."""

    name: str
    broken: str
    """What the mutant does."""
    caught: str
    """The invariant that fails first, and the check."""
    seed: int | None
    """None: no seed noticed."""


def mutants() -> Iterator[tuple[str, Mutant]]:
    """Yield (area, mutant) in the order of the page."""
    for area, some in MUTANTS.items():
        for mutant in some:
            yield area, mutant


def first_failure(mutant: Mutant, seeds: Iterator[int] | range) -> SeedReport | None:
    """Return the report of the first of these seeds that notices."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        reports = (run_seed(seed, options=_QUICK) for seed in seeds)
        return next((report for report in reports if not report.is_ok), None)


def look(name: str) -> Row:
    """Look for the first seed that notices the mutant of this name."""
    mutant = next(mutant for _, mutant in mutants() if mutant.name == name)
    broken = " ".join((mutant.apply.__doc__ or f"{mutant.name.capitalize()}.").split()).replace("|", "/")
    failure = first_failure(mutant, range(SEEDS_MAX))
    if failure is None:
        return Row(name, broken, "nothing", None)
    if not run_seed(failure.seed, options=_QUICK).is_ok:
        raise RuntimeError(f"seed {failure.seed} fails without a mutant: mend that first")
    return Row(name, broken, f"{failure.invariant}: `{failure.checker}`", failure.seed)


def read_page() -> dict[str, Row]:
    """Return the rows of the page by mutant."""
    rows: dict[str, Row] = {}
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if found := _ROW.match(line):
            rows[found["name"]] = Row(found["name"], found["broken"], found["caught"], int(found["seed"]))
    return rows


def write_page(rows: dict[str, Row]) -> None:
    parts = [HEAD.format(seeds=SEEDS_MAX)]
    for area, some in MUTANTS.items():
        parts.append(f"\n## {area[0].upper()}{area[1:]} ({len(some)})\n\n")
        parts.append("| mutant | what is broken | noticed by | first seed |\n|---|---|---|---:|\n")
        for row in (rows[mutant.name] for mutant in some if mutant.name in rows):
            if row.seed is not None:
                parts.append(f"| {row.name} | {row.broken} | {row.caught} | {row.seed} |\n")
    PAGE.write_text("".join(parts))


def _remembered() -> dict[str, Row]:
    if not STATE.exists():
        return {}
    rows = [msgspec.json.decode(line, type=Row) for line in STATE.read_text().splitlines()]
    return {row.name: row for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", default=[], help="A mutant to look at again; others stay.")
    parser.add_argument("--fresh", action="store_true", help="Forget what an interrupted run found.")
    asked = parser.parse_args()
    if asked.fresh:
        STATE.unlink(missing_ok=True)
    rows = read_page() if asked.only else {}
    rows |= {} if asked.only else _remembered()
    names = [mutant.name for _, mutant in mutants()]
    wanted = asked.only or [name for name in names if name not in rows]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console()
    with (
        ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool,
        Progress(*columns) as progress,
    ):
        task = progress.add_task("mutants", total=len(wanted))
        for done in as_completed([pool.submit(look, name) for name in wanted]):
            row = rows[done.result().name] = done.result()
            STATE.parent.mkdir(exist_ok=True)
            with STATE.open("ab") as state:
                state.write(msgspec.json.encode(row) + b"\n")
            seed = "no seed" if row.seed is None else f"seed {row.seed}"
            progress.console.print(f"{row.name}: {seed}, {row.caught}", markup=False)
            progress.update(task, advance=1)
    write_page(rows)
    STATE.unlink(missing_ok=True)
    missed = [name for name in names if name not in rows or rows[name].seed is None]
    console.print(
        f"{len(rows)} mutants, {len(missed)} not noticed: {', '.join(missed)}" if missed else "all noticed"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
