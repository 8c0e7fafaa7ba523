"""`baton bench experts`."""

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks.experts import counts as synthetic
from benchmarks.experts.placement import (
    BALANCE_LOSS_MAX,
    DECISION_MS_MAX,
    MIGRATION_PART_MAX,
    ExpertCase,
    ExpertReport,
    compare,
    mean,
)
from benchmarks.experts.ranks_cli import run_ranks_part
from benchmarks.experts.recorded import DOCUMENTATION, recorded
from control_plane.experts.values import Loads

Number = TypeVar("Number", int, float)
PARTS = ("placement", "service", "skew")
KINDS = ("uniform", "zipf", "adversarial", "recorded")


def experts(
    part: Annotated[str, typer.Option(help=f"What to measure: {', '.join(PARTS)}.")] = "placement",
    counts: Annotated[
        str, typer.Option(metavar="KIND,…", help="Kinds of counts; default: all.", show_default=False)
    ] = ",".join(KINDS),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "8,16,32,64,128,256",
    redundancy: Annotated[str, typer.Option(help="Slots beside one per expert.")] = "0,0.0625,0.125,0.25",
    layers: Annotated[int, typer.Option(min=1, help="Layers of synthetic counts.")] = 61,
    expert_count: Annotated[int, typer.Option("--experts", min=8, help="Experts of a layer.")] = 256,
    groups: Annotated[int, typer.Option(min=1, help="Groups that routing is limited by.")] = 1,
    node_ranks: Annotated[int, typer.Option(min=1, help="Ranks of a node.")] = 8,
    times: Annotated[int, typer.Option(min=2, help="Placements in a row.")] = 7,
    text: Annotated[str, typer.Option(help="Text to record counts from; empty: this documentation.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of counts and of the random model.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of service.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Time of each measurement; skew: at least 24.")] = 8.0,
    rows: Annotated[str, typer.Option(help="How rows travel: exact, model or int8.")] = "exact",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare expert placement with DeepSeek's EPLB, or measure expert ranks on two cores.

    placement: balance, migrations and the time of a decision. Kinds of counts are uniform, zipf (the hot set
    moves), adversarial (nothing of the past helps) and recorded (text through a random model). service: two
    workers with two expert ranks beside one process with two threads that holds all experts. skew: expert
    ranks whose popular experts change, with rebalancing beside without.

    Example: baton bench experts --counts zipf,adversarial --ranks 8,64 --redundancy 0,0.25
    """
    if part not in PARTS:
        raise SetupError(f"--part {part}: choose of {', '.join(PARTS)}")
    if part != "placement":
        run_ranks_part(part, rounds=rounds, seconds=seconds, rows=rows, seed=seed, as_json=as_json)
        return
    kinds = _kinds(counts)
    rank_counts = _numbers("--ranks", ranks, int, least=2, most=expert_count)
    redundancies = _numbers("--redundancy", redundancy, float, least=0, most=4)
    if expert_count % groups:
        raise SetupError(f"--groups {groups} does not divide --experts {expert_count}")
    progress = Console(stderr=True, highlight=False).print
    load_before = os.getloadavg()[0]
    cases: list[ExpertCase] = []
    for kind in kinds:
        loads = _loads(kind, times, layers, expert_count, Path(text or DOCUMENTATION), seed, progress)
        for rank_count in rank_counts:
            for part_more in redundancies:
                case = compare(
                    loads,
                    name=kind,
                    ranks=rank_count,
                    redundancy=part_more,
                    node_ranks=node_ranks,
                    groups=groups,
                )
                cases.append(case)
                progress(f"{kind}, {rank_count} ranks, {part_more:.2%} redundancy: {_verdict(case)}")
    report = ExpertReport(cases, load_before, os.getloadavg()[0])
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _show(report)


def _loads(
    kind: str,
    times: int,
    layers: int,
    expert_count: int,
    text: Path,
    seed: int,
    progress: Callable[[str], None],
) -> list[Loads]:
    if kind == "recorded":
        return recorded(times, expert_count, text=text, seed=seed, progress=progress)
    make = {"uniform": synthetic.uniform, "zipf": synthetic.zipf, "adversarial": synthetic.adversarial}[kind]
    return make(times, layers, expert_count, seed=seed)


def _kinds(text: str) -> list[str]:
    found = [kind.strip() for kind in text.split(",")]
    if not set(found) <= set(KINDS):
        raise SetupError(f"--counts {text}: choose of {', '.join(KINDS)}, separated by commas")
    return found


def _numbers(
    option: str, text: str, kind: Callable[[str], Number], *, least: Number, most: Number
) -> list[Number]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not least <= min(found) <= max(found) <= most:
        raise SetupError(f"{option} {text}: write numbers from {least} to {most}, separated by commas")
    return found


def _verdict(case: ExpertCase) -> str:
    return (
        f"balance {case.balance_difference:+.4f}, migrations {case.migration_part:.2f} of EPLB's,"
        f" {max(case.decision_ms):.1f} ms, {max(case.wall_ms):.1f} ms by the clock"
    )


def _show(report: ExpertReport) -> None:
    table = Table(
        title=(
            "Expert placement beside EPLB: means over placements; worst: the placement with the least\n"
            "difference of balance, the largest part of EPLB's migrations, the longest decision; ms: of the\n"
            "processor, clock: on the wall"
        )
    )
    for number, column in enumerate(
        (
            "counts",
            "ranks",
            "more",
            "balance",
            "EPLB",
            "worst",
            "migrations",
            "EPLB",
            "worst",
            "ms",
            "worst",
            "clock",
        )
    ):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for case in report.cases:
        table.add_row(
            case.counts,
            str(case.ranks),
            f"{case.redundancy:.2%}",
            f"{mean(case.balance):.4f}",
            f"{mean(case.eplb_balance):.4f}",
            f"{case.balance_difference:+.4f}",
            f"{mean(case.migrations):.0f}",
            f"{mean(case.eplb_migrations):.0f}",
            f"{case.migration_part:.2f}",
            f"{mean(case.decision_ms):.1f}",
            f"{max(case.decision_ms):.1f}",
            f"{max(case.wall_ms):.1f}",
        )
    console = new_console()
    console.print(table)
    within = sum(case.is_within_bounds for case in report.cases)
    decisions = [ms for case in report.cases for ms in case.decision_ms]
    by_the_clock = [ms for case in report.cases for ms in case.wall_ms]
    fast, slow = (sum(ms > DECISION_MS_MAX for ms in times) for times in (decisions, by_the_clock))
    console.print(
        f"{within} of {len(report.cases)} cases lose at most {BALANCE_LOSS_MAX} of balance and make at most"
        f" {MIGRATION_PART_MAX} of EPLB's migrations; of {len(decisions)} decisions {fast} took more than"
        f" {DECISION_MS_MAX:.0f} ms of processor time, {slow} by the clock; median {median(decisions):.1f} ms"
        f" and {median(by_the_clock):.1f} ms; load {report.load_before:.1f} to {report.load_after:.1f}"
    )
