"""Finds the highest rate at which enough requests meet both objectives. Pure: the caller does the runs.

Goodput, by DistServe (OSDI '24) section 2, is the highest request rate that can be served while the
attainment goal, such as 90 % of the requests, is met. Rates lie on a grid, `start * (1 + resolution)^k` with
whole k. The search moves up or down from the start by factors of two until one rate attains the goal and
another one does not, halves the steps between, and repeats the answer's run. A rate whose interval contains
the goal is repeated, too, until two runs agree or the pooled share decides. A run that was stopped early
misses the goal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from baton.core.errors import SetupError
from loadgen.records import RequestOutcome, RequestRecord
from loadgen.report.model import Probe, ScalePoint, SearchResult, Share
from loadgen.report.sample import Floats, share_of
from loadgen.report.scales import attained_at
from loadgen.slo import ClassObjectives

HOPELESS_SIGMAS = 3.0
SAME_SIDE_RUNS = 2
"""Number of agreeing runs that decide even if the interval of each contains the goal. Replays of one trace
differ less from each other than from another part of the trace."""


class RateResult(Protocol):
    """One run at one rate. `Report` is one."""

    @property
    def goodput(self) -> Share: ...

    @property
    def interrupted(self) -> bool:
        """True if the run was stopped because the goal was out of reach."""
        ...


RunAtRate = Callable[[float], RateResult]
"""Offers this many requests per second. A repeated call with the same rate must draw anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """The goal of a search, its precision, and its limits."""

    attain: float = 0.9
    start_per_s: float = 1.0
    resolution: float = 0.05
    """The answer lies within this share below the true rate, apart from noise."""
    lowest_per_s: float = 0.0
    """0 means 1/1024 of the start."""
    highest_per_s: float = 0.0
    """0 means 1024 times the start."""
    confirmations: int = 2
    """Minimum runs at the answer."""
    repeats_max: int = 4
    """Maximum runs at one rate."""
    probes_max: int = 40

    def __post_init__(self) -> None:
        if not 0 < self.attain <= 1:
            raise SetupError(f"--attain {self.attain:g}: must be above 0 and at most 1")
        if not 0.001 <= self.resolution <= 1:
            raise SetupError(f"--search-resolution {self.resolution:g}: must be from 0.001 to 1")
        if not 0 < self.start_per_s < math.inf:
            raise SetupError(f"search from {self.start_per_s:g} requests per second: must be above 0")
        if not 0 < self.confirmations <= self.repeats_max:
            raise SetupError(f"{self.confirmations} confirmations: must be from 1 to {self.repeats_max}")

    def rate(self, step: int) -> float:
        return self.start_per_s * (1 + self.resolution) ** step

    def step_of(self, rate_per_s: float) -> int:
        """The nearest step of the grid."""
        return round(self._steps_to(rate_per_s))

    @property
    def octave(self) -> int:
        """The number of steps in a factor of about two."""
        return max(1, round(math.log(2) / math.log(1 + self.resolution)))

    @property
    def step_min(self) -> int:
        return math.floor(self._steps_to(self.lowest_per_s or self.start_per_s / 1024))

    @property
    def step_max(self) -> int:
        return math.ceil(self._steps_to(self.highest_per_s or self.start_per_s * 1024))

    def _steps_to(self, rate_per_s: float) -> float:
        return math.log(rate_per_s / self.start_per_s) / math.log(1 + self.resolution)


def search(
    run_at_rate: RunAtRate,
    settings: SearchSettings,
    *,
    on_probe: Callable[[Probe], None] | None = None,
    begin: int = 0,
) -> SearchResult:
    """Search; `begin` is the step of the grid to begin at. A run that raises StopSearch ends the search."""
    book = _Runs(run_at_rate, settings, on_probe or (lambda probe: None))
    try:
        return _result(book, *_between(book, begin))
    except (_OutOfProbes, StopSearch):
        seen = book.verdicts_so_far()
        passed = max((k for k, verdict in seen.items() if verdict), default=None)
        above = [k for k, verdict in seen.items() if not verdict and (passed is None or k > passed)]
        reason = f"stopped after {len(book.probes)} runs, before the answer was narrow enough or confirmed"
        return _result(book, passed, min(above, default=None), reason=reason)


def _between(book: "_Runs", begin: int) -> tuple[int | None, int | None]:
    """The highest step that attains the goal, confirmed, and the lowest one above it that does not."""
    low, high = _bracket(book, begin)
    while low is not None:
        while high is not None and high - low > 1:
            middle = (low + high) // 2
            if book.attains(middle):
                low = middle
            else:
                high = middle
        if book.attains(low, runs_min=book.settings.confirmations):
            return low, high
        high = low
        low = book.highest_pass(below=high)
        if low is None:
            low = _descend(book, high)
    return None, high


def _bracket(book: "_Runs", begin: int) -> tuple[int | None, int | None]:
    s = book.settings
    step = min(max(begin, s.step_min), s.step_max)
    if not book.attains(step):
        return _descend(book, step), step
    low = step
    while low < s.step_max:
        step = min(low + s.octave, s.step_max)
        if not book.attains(step):
            return low, step
        low = step
    return low, None


def _descend(book: "_Runs", failed: int) -> int | None:
    """A step below that attains the goal, twice as far away each time. None if there is none."""
    s, stride = book.settings, 1 if len(book.verdicts) > 1 else book.settings.octave
    step = failed
    while step > s.step_min:
        step = max(step - stride, s.step_min)
        if book.attains(step):
            return step
        stride = min(2 * stride, s.octave)
    return None


def _result(book: "_Runs", low: int | None, high: int | None, *, reason: str = "") -> SearchResult:
    s = book.settings
    text = reason
    if not text and low is None:
        text = f"not even {s.rate(s.step_min):.3g} requests per second attain the goal"
    elif not text and high is None:
        text = "the highest rate allowed still attains the goal"
    elif not text and low is not None:
        text = f"{len(book.runs[low])} runs at this rate attain the goal together; the next rate misses it"
    return SearchResult(
        s.attain,
        None if low is None else s.rate(low),
        None if high is None else s.rate(high),
        text,
        tuple(book.probes),
    )


class StopSearch(Exception):
    """The caller's runs raise this to end the search with what is known."""


class _OutOfProbes(Exception):
    pass


@dataclass(slots=True)
class _Runs:
    """All runs so far, by step of the grid."""

    run_at_rate: RunAtRate
    settings: SearchSettings
    on_probe: Callable[[Probe], None]
    runs: dict[int, list[Probe]] = field(default_factory=dict[int, list[Probe]])
    probes: list[Probe] = field(default_factory=list[Probe])
    verdicts: dict[int, bool] = field(default_factory=dict[int, bool])

    def attains(self, step: int, *, runs_min: int = 1) -> bool:
        """Repeat runs until the step is decided. Raises _OutOfProbes."""
        runs = self.runs.setdefault(step, [])
        while True:
            verdict = self._verdict(runs)
            settled = len(runs) >= runs_min and (
                verdict is not None or len(runs) >= self.settings.repeats_max
            )
            if settled or any(p.aborted for p in runs):
                self.verdicts[step] = bool(_pooled(runs) >= self.settings.attain) and verdict is not False
                return self.verdicts[step]
            self._probe(step)

    def _verdict(self, runs: Sequence[Probe]) -> bool | None:
        """None if the goal lies within the interval."""
        if not runs:
            return None
        if any(p.aborted for p in runs):
            return False
        share = _pooled(runs)
        if len(runs) >= SAME_SIDE_RUNS and len({p.share >= self.settings.attain for p in runs}) == 1:
            return share >= self.settings.attain
        # The mean of n runs has an interval that is narrower by sqrt(n).
        down, up = (
            math.sqrt(sum(side * side for side in sides)) / len(runs)
            for sides in ([p.share - p.low for p in runs], [p.high - p.share for p in runs])
        )
        if share - down > self.settings.attain:
            return True
        return False if share + up < self.settings.attain else None

    def _probe(self, step: int) -> None:
        if len(self.probes) >= self.settings.probes_max:
            raise _OutOfProbes
        rate_per_s = self.settings.rate(step)
        trial = self.run_at_rate(rate_per_s)
        g = trial.goodput
        probe = Probe(rate_per_s, g.met, g.judged, g.share, g.low, g.high, trial.interrupted)
        self.runs[step].append(probe)
        self.probes.append(probe)
        self.on_probe(probe)

    def verdicts_so_far(self) -> dict[int, bool]:
        """All verdicts. Undecided steps are judged by the pooled share of their runs."""
        pooled = {
            step: _pooled(runs) >= self.settings.attain and not any(p.aborted for p in runs)
            for step, runs in self.runs.items()
            if runs
        }
        return pooled | self.verdicts

    def highest_pass(self, *, below: int | None = None) -> int | None:
        passed = [k for k, verdict in self.verdicts.items() if verdict and (below is None or k < below)]
        return max(passed, default=None)


def _pooled(runs: Sequence[Probe]) -> float:
    judged = sum(p.judged for p in runs)
    return sum(p.met for p in runs) / judged if judged else 0.0


def is_hopeless(missed: int, planned: int, *, attain: float) -> bool:
    """True if so many of `planned` requests missed that the rate is clearly above the one searched for.

    The limit is a little above what the goal allows, because a run that just misses the goal is informative
    and worth its time.
    """
    allowed = planned * (1 - attain)
    return missed > allowed + HOPELESS_SIGMAS * math.sqrt(planned * attain * (1 - attain)) + 1


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """One run at one rate, usable for any SLO scale."""

    needed: Floats
    """The least scale at which each judged request meets both targets, in the order of planned instants."""
    interrupted: bool
    """True if the run was stopped because the goal was out of reach at its scale, and so at any lower one."""

    def at(self, scale: float) -> "ScaledTrial":
        return ScaledTrial(share_of(self.needed <= scale), self.interrupted)


@dataclass(frozen=True, slots=True)
class ScaledTrial:
    goodput: Share
    interrupted: bool


def attempt_of(
    records: Sequence[RequestRecord], objectives: ClassObjectives, *, interrupted: bool
) -> ScaledRun:
    judged = [
        r for r in sorted(records, key=lambda r: r.planned_s) if r.outcome is not RequestOutcome.CANCELLED
    ]
    needs = [objectives.of(r).needed_scale(r) for r in judged]
    return ScaledRun(np.array(needs, dtype=np.float64), interrupted)


def search_scales(
    run_at_rate: Callable[[float, float], ScaledRun],
    scales: Sequence[float],
    settings: SearchSettings,
    *,
    on_probe: Callable[[Probe], None] | None = None,
) -> tuple[tuple[ScalePoint, ...], dict[float, SearchResult]]:
    """The highest rate that attains the goal, per SLO scale. `run_at_rate(rate, scale)` does a run.

    The search goes from the loosest scale to the most stringent one, so that runs are reused. `share` of a
    point is that of the run at the rate found for scale 1, or for the loosest scale.
    """
    attempts: dict[float, list[ScaledRun]] = {}
    results: dict[float, SearchResult] = {}
    begin, stopped = 0, False
    for scale in sorted(scales, reverse=True):
        used: dict[float, int] = {}

        def run(rate_per_s: float, scale: float = scale, used: dict[float, int] = used) -> RateResult:
            nonlocal stopped
            known = attempts.setdefault(rate_per_s, [])
            turn = used.get(rate_per_s, 0)
            used[rate_per_s] = turn + 1
            if turn == len(known):
                try:
                    known.append(run_at_rate(rate_per_s, scale))
                except StopSearch:
                    stopped = True
                    raise
            return known[turn].at(scale)

        found = results[scale] = search(run, settings, on_probe=on_probe, begin=begin)
        if found.rate_per_s is not None:
            begin = settings.step_of(found.rate_per_s)
        if stopped:
            break
    return _points(results, attempts), results


def _points(
    results: dict[float, SearchResult], attempts: dict[float, list[ScaledRun]]
) -> tuple[ScalePoint, ...]:
    reference = results.get(1.0) or results[max(results)]
    known = attempts.get(reference.rate_per_s or 0.0, [])
    needed = np.sort(np.concatenate([a.needed for a in known])) if known else np.empty(0)
    return tuple(
        ScalePoint(scale, attained_at(needed, scale), results[scale].rate_per_s) for scale in sorted(results)
    )
