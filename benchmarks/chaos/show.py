"""The schedule and the result of a drill, for people."""

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.chaos.drill import DrillResult
from benchmarks.chaos.outcomes import Applied
from benchmarks.chaos.schedule import Event
from benchmarks.chaos.timeline import Pause

FINDINGS_MAX, ERRORS_MAX = 30, 20


def show_schedule(console: Console, seed: int, events: Sequence[Event]) -> None:
    table = Table("", "at", "fault", title=f"Schedule of seed {seed}", title_justify="left")
    for event in events:
        table.add_row(str(event.number), f"{event.at_s:.1f} s", escape(event.text))
    console.print(table)


def show_result(console: Console, result: DrillResult) -> None:
    console.print(_faults(result.faults))
    console.print(_by_kind(result.faults))
    if result.errors:
        console.print(_errors(result))
    ends = ", ".join(f"{count} {end}" for end, count in result.attempts.items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in result.kinds.items())
    console.print(f"Requests: {result.requests} ({kinds}). Attempts: {ends}.")
    console.print(
        f"Answers that were placed more than once, without an error for the client: {result.placed_again}"
    )
    console.print(f"Longest pause of a stream: {_pause(result.longest_pause)}")
    console.print(f"Longest wait for a first token: {_pause(result.longest_wait)}")
    if not result.findings:
        console.print("[green]Every check holds.[/]")
        return
    table = Table(
        "check", "finding", title="What does not hold", title_justify="left", title_style="bold red"
    )
    for finding in result.findings[:FINDINGS_MAX]:
        table.add_row(finding.check, escape(finding.text))
    console.print(table)
    if len(result.findings) > FINDINGS_MAX:
        console.print(f"{len(result.findings) - FINDINGS_MAX} more findings: see --json")


def _pause(pause: Pause | None) -> str:
    if pause is None:
        return "none"
    whose = f"request {pause.request} ({pause.kind})"
    return escape(f"{pause.length_s:.1f} s at {pause.at_s:.1f} s, {whose}; cause: {pause.cause}")


def _recovery(applied: Applied) -> str:
    return "" if applied.recovered_s is None else f"{applied.recovered_s - applied.ended_s:.1f} s"


def _faults(faults: Sequence[Applied]) -> Table:
    table = Table("at", "fault", "back after", "", title="Faults", title_justify="left")
    for one in sorted(faults, key=lambda one: one.began_s):
        table.add_row(f"{one.began_s:.1f} s", escape(one.event.text), _recovery(one), escape(one.what))
    return table


def _by_kind(faults: Sequence[Applied]) -> Table:
    table = Table("fault", "times", "back after: median", "longest", title="Recovery", title_justify="left")
    kinds: dict[str, list[float | None]] = {}
    for one in faults:
        name = f"{one.event.fault} {one.event.target}".strip()
        took_s = None if one.recovered_s is None else one.recovered_s - one.ended_s
        kinds.setdefault(name, []).append(took_s)
    for name, times in sorted(kinds.items()):
        known = [t for t in times if t is not None]
        longest = f"{max(known):.1f} s" if known else ""
        longest += f" ({len(times) - len(known)} not)" if len(known) < len(times) else ""
        table.add_row(name, str(len(times)), f"{median(known):.1f} s" if known else "", longest)
    return table


def _errors(result: DrillResult) -> Table:
    table = Table("times", "end", "text", "after", title="Attempts without an answer", title_justify="left")
    for one in result.errors[:ERRORS_MAX]:
        table.add_row(str(one.count), one.end, escape(one.detail), escape(one.cause))
    return table
