"""The figures of `baton bench goodput`, computed from its runs. Pure.

A run is one plan offered to one variant. All of its requests are judged: refused, failed and timed out ones
missed their objectives. A variant's *goodput* is DistServe's (OSDI '24): the highest rate at which at least
90 % of the requests meet both objectives, interpolated between the two measured rates around it.
"""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from loadgen.records import RequestOutcome, RequestRecord
from loadgen.slo import Slo

Facts = dict[str, str | int | float | bool | None]

ATTAIN = 0.9
ANY_OBJECTIVES = "any"
"""Stands for the name of objectives if the server knew none, so that one run is judged by all of them."""


class RunKey(msgspec.Struct, frozen=True):
    variant: str
    trace: str
    objectives: str
    """The name of the objectives that the server knew, or ANY_OBJECTIVES."""
    rate: float
    """Offered requests per second."""
    round: int

    @property
    def file_name(self) -> str:
        return f"{self.trace}_{self.rate:g}_{self.round}_{self.variant}_{self.objectives}.jsonl"


class GoodputRun(NamedTuple):
    key: RunKey
    records: list[RequestRecord]
    facts: Facts
    """Factors and facts of the plan, as they are shown."""

    @property
    def duration_s(self) -> float:
        """Seconds from the first planned instant to the last end."""
        return max(r.ended_s or r.planned_s for r in self.records) - min(r.planned_s for r in self.records)


class Point(msgspec.Struct, frozen=True):
    """The figures of one rate, over the rounds."""

    rate: float
    attained: float
    """Median share of requests that met both objectives."""
    attained_low: float
    attained_high: float
    met_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    refused: float
    """Share of the offered requests that were refused."""
    failed: float
    rounds: int


class Goodput(msgspec.Struct, frozen=True):
    """A goodput of `rate` requests/s. `bound` is "" if it was measured on both sides, ">=" if no measured
    rate was too high, and "<" if even the lowest was; then it is interpolated from "no load, all met"."""

    rate: float
    bound: str

    def __str__(self) -> str:
        return f"{self.bound}{' ' if self.bound else ''}{self.rate:.2f}"


class Curve(msgspec.Struct, frozen=True):
    variant: str
    trace: str
    objectives: str
    points: list[Point]
    goodput: Goodput
    met_per_s_max: float
    """The most requests per second that met their objectives, at any rate."""


def attainment(run: GoodputRun, slo: Slo) -> float:
    return sum(slo.is_met(r) for r in run.records) / len(run.records)


def quantile(values: Iterable[float | None], share: float) -> float | None:
    """The quantile by nearest rank; None for no values."""
    ordered = sorted(v for v in values if v is not None)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def make_point(runs: Sequence[GoodputRun], slo: Slo) -> Point:
    """The figures of the runs of one variant, trace and rate."""
    shares = [attainment(run, slo) for run in runs]
    done = [r for run in runs for r in run.records if r.outcome == RequestOutcome.COMPLETED]
    every = [r for run in runs for r in run.records]
    return Point(
        rate=runs[0].key.rate,
        attained=statistics.median(shares),
        attained_low=min(shares),
        attained_high=max(shares),
        met_per_s=statistics.median(
            s * len(r.records) / r.duration_s for s, r in zip(shares, runs, strict=True)
        ),
        ttft_p50_s=quantile((r.ttft_s for r in done), 0.5),
        ttft_p90_s=quantile((r.ttft_s for r in done), 0.9),
        tpot_p50_s=quantile((r.tpot_s for r in done), 0.5),
        tpot_p90_s=quantile((r.tpot_s for r in done), 0.9),
        refused=sum(r.outcome == RequestOutcome.REFUSED for r in every) / len(every),
        failed=sum(r.outcome == RequestOutcome.FAILED for r in every) / len(every),
        rounds=len(runs),
    )


def goodput_of(points: Sequence[Point], *, attain: float = ATTAIN) -> Goodput:
    """The goodput of `points` by rising rate. A dip between two good rates ends it, because the goal must
    hold at every lower rate."""
    if not points:
        return Goodput(0.0, "<")
    ends = [(0.0, 1.0), *((p.rate, p.attained) for p in points)]
    for (rate, share), (next_rate, next_share) in pairwise(ends):
        if next_share < attain:
            part = (share - attain) / (share - next_share)
            return Goodput(rate + part * (next_rate - rate), "<" if rate == 0.0 else "")
    return Goodput(points[-1].rate, ">=")


def make_curves(runs: Sequence[GoodputRun], objectives: dict[str, Slo]) -> list[Curve]:
    """One curve for each variant, trace and pair of objectives that was run, in the order of the runs."""
    curves: list[Curve] = []
    for variant, trace in dict.fromkeys((r.key.variant, r.key.trace) for r in runs):
        for name, slo in objectives.items():
            of = [
                r
                for r in runs
                if (r.key.variant, r.key.trace) == (variant, trace)
                and r.key.objectives in (name, ANY_OBJECTIVES)
            ]
            rates = sorted({r.key.rate for r in of})
            points = [make_point([r for r in of if r.key.rate == rate], slo) for rate in rates]
            if points:
                met = max(p.met_per_s for p in points)
                curves.append(Curve(variant, trace, name, points, goodput_of(points), met))
    return curves


class Ratio(msgspec.Struct, frozen=True):
    """Baton's goodput divided by the best peer's."""

    trace: str
    objectives: str
    variant: str
    goodput: Goodput
    best_peer: str
    peer_goodput: Goodput
    ratio: float | None
    """None if the peer's goodput is 0."""


def make_ratios(curves: Sequence[Curve], groups: dict[str, str]) -> list[Ratio]:
    """Compare each variant of Baton with the best peer, by trace and objectives. `groups` maps a variant to
    `baton` or `peers`."""
    ratios: list[Ratio] = []
    for trace, name in dict.fromkeys((c.trace, c.objectives) for c in curves):
        here = [c for c in curves if (c.trace, c.objectives) == (trace, name)]
        peers = [c for c in here if groups[c.variant] == "peers"]
        if not peers:
            continue
        best = max(peers, key=lambda c: c.goodput.rate)
        for ours in (c for c in here if groups[c.variant] == "baton"):
            ratio = ours.goodput.rate / best.goodput.rate if best.goodput.rate > 0 else None
            ratios.append(Ratio(trace, name, ours.variant, ours.goodput, best.variant, best.goodput, ratio))
    return ratios
