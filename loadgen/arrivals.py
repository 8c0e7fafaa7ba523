"""The instant at which each request is sent. Pure: in an open loop nothing here depends on the server."""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from baton.core.errors import SetupError


def spread_ticks(instants_s: Sequence[float], *, tick_s: float, seed: int) -> list[float]:
    """Spread requests that a trace stamped with the same tick uniformly over that tick, at most up to the
    next instant.

    The instants must be sorted. The order of requests is kept, because it decides what a cache holds. Without
    this a replay sends batches that no client ever sent. `tick_s` 0 changes nothing.
    """
    if tick_s <= 0:
        return list(instants_s)
    rng = random.Random(seed)
    groups = [(instant_s, len(list(same))) for instant_s, same in groupby(instants_s)]
    nexts_s = [*(instant_s for instant_s, _ in groups[1:]), math.inf]
    spread: list[float] = []
    for (instant_s, count), next_s in zip(groups, nexts_s, strict=True):
        width_s = min(tick_s, next_s - instant_s)
        spread += sorted(instant_s + rng.random() * width_s for _ in range(count))
    return spread


@dataclass(frozen=True, slots=True)
class Burst:
    """A burst multiplies the rate by `factor` during [at_s, at_s + duration_s) of the replay."""

    at_s: float
    duration_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class RateShape:
    """A factor on the trace's rate, over the time of the replay.

    `points` are (seconds, factor), sorted. The factor is linear between two points and constant before the
    first and after the last. Bursts multiply on top. Without points and bursts, requests arrive as in the
    trace.
    """

    points: tuple[tuple[float, float], ...] = ()
    bursts: tuple[Burst, ...] = ()

    def __post_init__(self) -> None:
        factors = [f for _, f in self.points] + [b.factor for b in self.bursts]
        if any(not 0 < f < math.inf for f in factors) or any(b.duration_s <= 0 for b in self.bursts):
            raise SetupError("factors of a ramp, a warp or a burst, and a burst's seconds, must be above 0")
        if any(a >= b for (a, _), (b, _) in pairwise(self.points)):
            raise SetupError("the seconds of --warp must rise")

    def __bool__(self) -> bool:
        return bool(self.points or self.bursts)

    def factor_at(self, at_s: float) -> float:
        """The factor on the rate at this second of the replay."""
        factor = _between(self.points, at_s) if self.points else 1.0
        for burst in self.bursts:
            if burst.at_s <= at_s < burst.at_s + burst.duration_s:
                factor *= burst.factor
        return factor

    def warp(self, instants_s: Sequence[float]) -> list[float]:
        """Map the instants of a steady replay to instants t such that the integral of the factor up to t is
        the steady instant."""
        if not self:
            return list(instants_s)
        return _inverse(self._segments(), instants_s)

    def _segments(self) -> "list[_Segment]":
        edges = {0.0, *(at for at, _ in self.points if at > 0)}
        for burst in self.bursts:
            edges |= {e for e in (burst.at_s, burst.at_s + burst.duration_s) if e > 0}
        found: list[_Segment] = []
        passed = 0.0
        for start_s, end_s in pairwise([*sorted(edges), math.inf]):
            begin = self.factor_at(start_s)
            if end_s == math.inf:
                found.append(_Segment(start_s, passed, begin, 0.0))
                break
            # The factor is linear inside a segment, so two points of it determine all others. The end of a
            # burst is not inside.
            middle = self.factor_at((start_s + end_s) / 2)
            slope = 2 * (middle - begin) / (end_s - start_s)
            found.append(_Segment(start_s, passed, begin, slope))
            passed += middle * (end_s - start_s)
        return found


@dataclass(frozen=True, slots=True)
class _Segment:
    start_s: float
    passed: float
    """Seconds of the steady replay that lie before this segment."""
    factor: float
    slope: float

    def instant_s(self, steady_s: float) -> float:
        left = steady_s - self.passed
        if abs(self.slope) < 1e-12:
            return self.start_s + left / self.factor
        root = math.sqrt(max(0.0, self.factor**2 + 2 * self.slope * left))
        # this form of the quadratic's root is numerically stable
        return self.start_s + 2 * left / (self.factor + root)


def _inverse(segments: "list[_Segment]", instants_s: Sequence[float]) -> list[float]:
    starts = [s.passed for s in segments]
    return [segments[max(0, bisect_right(starts, at) - 1)].instant_s(at) for at in instants_s]


def _between(points: tuple[tuple[float, float], ...], at_s: float) -> float:
    k = bisect_right([at for at, _ in points], at_s)
    if k == 0:
        return points[0][1]
    if k == len(points):
        return points[-1][1]
    (a_s, a), (b_s, b) = points[k - 1], points[k]
    return a + (b - a) * (at_s - a_s) / (b_s - a_s)


def parse_ramp(text: str) -> tuple[tuple[float, float], ...]:
    """Points of a ramp, from `FROM:TO:SECONDS`. Raises SetupError."""
    begin, end, seconds = _numbers(text, 3, "--ramp", "FROM:TO:SECONDS, such as 0.5:2:60")
    if seconds <= 0:
        raise SetupError(f"--ramp {text}: must take more than 0 s")
    return ((0.0, begin), (seconds, end))


def parse_warp(text: str) -> tuple[tuple[float, float], ...]:
    """Points of a warp, from `SECONDS:FACTOR,...`. Raises SetupError."""
    form = "SECONDS:FACTOR,..., such as 0:1,60:3,90:1"
    pairs = [_numbers(part, 2, "--warp", form) for part in text.split(",")]
    return tuple((at_s, factor) for at_s, factor in pairs)


def parse_burst(text: str) -> Burst:
    """A burst, from `AT:SECONDS:FACTOR`. Raises SetupError."""
    return Burst(*_numbers(text, 3, "--burst", "AT:SECONDS:FACTOR, such as 30:5:4"))


def _numbers(text: str, count: int, option: str, form: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 <= n < math.inf for n in numbers):
        raise SetupError(f"{option} {text!r} is not {form}")
    return numbers
