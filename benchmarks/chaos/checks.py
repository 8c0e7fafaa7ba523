"""What must hold in a drill. Pure: what was seen goes in, findings come out. Each finding fails the drill."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from benchmarks.chaos.answers import HeardAnswer, difference
from benchmarks.chaos.outcomes import AskedRequest, ClientAttempt, End, ProcessSample

DEATH_SLACK_S = 2.0
"""A connection may end a little before or after the death of its router is seen."""
GROWTH_AFTER_S = 600.0
"""A process that ran for less time is not judged: caches fill."""
GROWTH_SHARE, GROWTH_BYTES, GROWTH_DESCRIPTORS = 1.25, 48 * 2**20, 24
"""Growth from the second quarter of a process's life to its last that is too much."""
EXAMPLES_MAX = 20


class DrillFinding(msgspec.Struct, frozen=True):
    check: str
    text: str


def check_answers(expected: Mapping[int, HeardAnswer], asked: Sequence[AskedRequest]) -> list[DrillFinding]:
    """Every answer, and every beginning of one, is that of the undisturbed run."""
    found: list[DrillFinding] = []
    for request in asked:
        for number, attempt in enumerate(request.attempts, 1):
            is_whole = attempt.end is End.ANSWERED
            if text := difference(expected[request.index], attempt.answer, is_whole=is_whole):
                where = f"request {request.index} ({request.kind}), attempt {number} at {attempt.router}"
                found.append(DrillFinding("same answers", f"{where}, {attempt.end}: {text}"))
    return found


def check_terminal(
    sent: Iterable[int], asked: Sequence[AskedRequest], deaths: Mapping[str, Sequence[float]]
) -> list[DrillFinding]:
    """Every attempt has one end that the client hears, and every request is answered at last.

    `deaths` are the instants at which each router's process ended. Only those may break a connection.
    """
    found: list[DrillFinding] = []
    missing = sorted(set(sent) - {request.index for request in asked})
    found += [DrillFinding("one end", f"request {index} never ended") for index in missing]
    for request in asked:
        for number, attempt in enumerate(request.attempts, 1):
            where = f"request {request.index} ({request.kind}), attempt {number} at {attempt.router}"
            if attempt.end in (End.UNANSWERED, End.GARBAGE):
                found.append(DrillFinding("one end", f"{where}: {attempt.detail}"))
            elif attempt.end is End.BROKEN and not _died(deaths.get(attempt.router, ()), attempt):
                found.append(
                    DrillFinding("one end", f"{where}: broken, and its router lived: {attempt.detail}")
                )
            elif attempt.is_final or "no error object" in attempt.detail:
                found.append(DrillFinding("one end", f"{where}: {attempt.detail}"))
        if request.attempts[-1].end is not End.ANSWERED and not request.attempts[-1].is_final:
            tried = ", ".join(f"{a.end} ({a.detail})" for a in request.attempts[-3:])
            text = f"request {request.index} ({request.kind}): {len(request.attempts)} attempts: {tried}"
            found.append(DrillFinding("answered at last", text))
    return found


def _died(deaths_s: Sequence[float], attempt: ClientAttempt) -> bool:
    first_s, last_s = attempt.began_s - DEATH_SLACK_S, attempt.ended_s + DEATH_SLACK_S
    return any(first_s <= at_s <= last_s for at_s in deaths_s)


def check_idle(held: Mapping[str, Mapping[str, float]]) -> list[DrillFinding]:
    """Nothing is held by a request when none is left. `held` is what was seen last."""
    return [
        DrillFinding("nothing held", f"{who}: {_listed(what)}")
        for who, what in held.items()
        if any(what.values())
    ]


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if value)


def check_whole(missing: Iterable[str]) -> list[DrillFinding]:
    """All parts are there again at the end."""
    return [DrillFinding("all back", f"{part} is not as it should be") for part in sorted(missing)]


def check_left_behind(left: Iterable[str]) -> list[DrillFinding]:
    return [DrillFinding("nothing left behind", text) for text in left]


def check_growth(samples: Sequence[ProcessSample]) -> list[DrillFinding]:
    """Neither memory nor descriptors of a process that lives long grow."""
    lives: dict[tuple[str, int], list[ProcessSample]] = {}
    for sample in samples:
        lives.setdefault((sample.name, sample.pid), []).append(sample)
    found: list[DrillFinding] = []
    for (name, pid), life in lives.items():
        if life[-1].at_s - life[0].at_s < GROWTH_AFTER_S:
            continue
        quarter = len(life) // 4
        early, late = life[quarter : 2 * quarter], life[-quarter:]
        before, after = (median(s.rss_bytes for s in part) for part in (early, late))
        if after > GROWTH_SHARE * before and after - before > GROWTH_BYTES:
            text = (
                f"memory of {name} (process {pid}) grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB"
            )
            found.append(DrillFinding("no growth", text))
        before, after = (median(s.descriptors for s in part) for part in (early, late))
        if after > GROWTH_SHARE * before and after - before > GROWTH_DESCRIPTORS:
            found.append(
                DrillFinding("no growth", f"{name} (process {pid}): {before:g} descriptors became {after:g}")
            )
    return found


def check_logs(logs: Mapping[str, str]) -> list[DrillFinding]:
    """No process of ours logged a traceback or ended by a signal of its own making. `logs` has texts by
    name."""
    found: dict[DrillFinding, None] = {}
    for name, text in logs.items():
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if (
                line.startswith("Traceback (most recent call last)")
                or "*** SIG" in line
                or "AssertionError" in line
            ):
                found[DrillFinding("quiet logs", f"{name}: {_cause(lines, number)}")] = None
    return list(found)


def _cause(lines: Sequence[str], number: int) -> str:
    """The line that names the exception: the first after the traceback that is not indented."""
    for line in lines[number + 1 :]:
        if line and not line.startswith((" ", "\t", "|", "+")):
            return line[:200]
    return lines[number][:200]
