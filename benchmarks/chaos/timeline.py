"""The fault that explains what clients saw. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from benchmarks.chaos.outcomes import Applied, AskedRequest, ClientAttempt, End, Stretch
from benchmarks.chaos.schedule import CONTROL, REDIS, STORES, WORKER, Event, FaultKind

NO_FAULT = "no fault"
AFTER_S = 30.0
"""A fault explains what happens this long after it ended, if it had not recovered before."""


NOTICE_S = 3.0
"""Time until the loss of a part shows."""


class Pause(msgspec.Struct, frozen=True):
    length_s: float
    at_s: float
    """When it began, since the first planned request."""
    request: int
    kind: str
    cause: str


class ErrorCount(msgspec.Struct, frozen=True):
    end: End
    detail: str
    cause: str
    count: int


def felt_in(applied: Sequence[Applied], stretch: Stretch) -> list[Applied]:
    """The faults that may explain a stretch, the earliest first: the latest of those that were felt when it
    began, and those that began within it."""
    felt = sorted(
        (one for one in applied if one.began_s <= stretch.to_s and stretch.from_s <= _felt_until_s(one)),
        key=lambda one: one.began_s,
    )
    before = [one for one in felt if one.began_s <= stretch.from_s]
    return [*before[-1:], *(one for one in felt if one.began_s > stretch.from_s)]


def _felt_until_s(one: Applied) -> float:
    return one.ended_s + AFTER_S if one.recovered_s is None else one.recovered_s


def cause_of(applied: Sequence[Applied], stretch: Stretch) -> str:
    """All that may explain a stretch, in order."""
    return ", then ".join(one.event.text for one in felt_in(applied, stretch)) or NO_FAULT


def longest_pause(
    asked: Iterable[AskedRequest], applied: Sequence[Applied], *, origin_s: float, of_first: bool = False
) -> Pause | None:
    """The longest time between two tokens of a stream or, `of_first`, from a request to its first token."""

    def stretch_of(attempt: ClientAttempt) -> Stretch:
        return attempt.first_wait if of_first else attempt.pause

    all_of = [(request, attempt) for request in asked for attempt in request.attempts]
    if not all_of:
        return None
    request, attempt = max(all_of, key=lambda one: stretch_of(one[1]).length_s)
    stretch = stretch_of(attempt)
    cause = cause_of(applied, stretch)
    return Pause(stretch.length_s, stretch.from_s - origin_s, request.index, request.kind, cause)


def errors(asked: Iterable[AskedRequest], applied: Sequence[Applied]) -> list[ErrorCount]:
    """Attempts without an answer by their end, its text, and the fault before; the most frequent first."""
    counts: Counter[tuple[End, str, str]] = Counter()
    for request in asked:
        for attempt in request.attempts:
            if attempt.end is not End.ANSWERED:
                felt = felt_in(applied, Stretch(attempt.began_s, attempt.ended_s))
                cause = felt[-1].event.text if felt else NO_FAULT
                counts[attempt.end, _general(attempt.detail), cause] += 1
    return [ErrorCount(end, detail, cause, n) for (end, detail, cause), n in counts.most_common()]


def _general(detail: str) -> str:
    """The text without the numbers that differ from request to request."""
    return " ".join("…" if any(c.isdigit() for c in word) else word for word in detail.split())[:120]


def parts_of(event: Event) -> frozenset[str] | None:
    """The parts that must be back before a fault has recovered. None: all."""
    match event.fault:
        case FaultKind.DRAIN | FaultKind.SWITCH | FaultKind.ROLL_OUT:
            return frozenset({WORKER})
        case FaultKind.FLUSH:
            return frozenset({REDIS, *STORES})
        case FaultKind.KILL | FaultKind.FREEZE | FaultKind.FILL_DISK:
            if event.target == REDIS:
                return frozenset({REDIS, *STORES})
            return frozenset({event.target} | ({WORKER} if event.target == CONTROL else set()))
        case _:
            return None


def recovered_s(
    applied: Applied, seen: Sequence[tuple[float, frozenset[str]]], *, now_s: float
) -> float | None:
    """The instant after the end of the fault from which its parts were all there, NOTICE_S after that end at
    the earliest seen. `seen` has what was missing, whenever it changed. None: not until `now_s`."""
    parts = parts_of(applied.event)
    back_s: float | None = None
    for number, (since_s, missing) in enumerate(seen):
        until_s = seen[number + 1][0] if number + 1 < len(seen) else now_s
        if missing if parts is None else missing & parts:
            back_s = None
            continue
        back_s = since_s if back_s is None else back_s
        if until_s > applied.ended_s + NOTICE_S:
            return max(back_s, applied.ended_s)
    return None
