"""Figures derived from frames of metrics: rates, percentiles, shares. Pure.

Units are seconds, bytes, requests and tokens; rates are per second, and shares go from 0 to 1. None means
that nothing is known, which is not the same as zero.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from baton.telemetry import catalogue as c
from control_plane.dashboard.samples import Labels, MetricsFrame, by_label, total

Series = list[float | None]

SMOOTH_S = 30.0
"""Time before a point whose requests its percentiles cover, since a few seconds have few requests."""

PARTS = (
    *("route", "tokenize", "queue", "retries", "wait", "load", "prefill", "first_hop"),
    *("transfer", "first_decode"),
)
"""Parts of the time to first token, in order, and the two that follow it; see `baton_ttft_part_seconds`."""

REFUSED = ("refused_queue", "refused_slo", "refused_capacity", "refused_quota")
MISSED = ("missed_ttft", "missed_tpot", "missed_both")
BROKEN = ("failed", "deadline")


def gained(frame: MetricsFrame | None, name: str, **labels: str) -> float:
    return 0.0 if frame is None else total(frame.gained.get(name), **labels)


def level(frame: MetricsFrame | None, name: str, **labels: str) -> float | None:
    if frame is None or name not in frame.levels:
        return None
    return total(frame.levels[name], **labels)


def rate(frame: MetricsFrame | None, name: str, **labels: str) -> float | None:
    return None if frame is None else total(frame.gained.get(name), **labels) / frame.span_s


class Outcomes(msgspec.Struct, frozen=True):
    """Outcomes of the requests that arrived in some time."""

    met: float = 0.0
    missed: float = 0.0
    refused: float = 0.0
    broken: float = 0.0

    @property
    def offered(self) -> float:
        return self.met + self.missed + self.refused + self.broken

    @property
    def attained(self) -> float | None:
        """Goodput as a share of all requests that arrived."""
        return self.met / self.offered if self.offered else None

    @property
    def refused_share(self) -> float | None:
        return self.refused / self.offered if self.offered else None

    def scaled(self, factor: float) -> "Outcomes":
        return Outcomes(self.met * factor, self.missed * factor, self.refused * factor, self.broken * factor)


def outcomes(values: Mapping[Labels, float] | None) -> Outcomes:
    """Sum the increases of `baton_slo_requests_total` by outcome."""
    sums = by_label(values, "outcome")
    return Outcomes(
        sums.get("met", 0.0),
        sum(sums.get(name, 0.0) for name in MISSED),
        sum(sums.get(name, 0.0) for name in REFUSED),
        sum(sums.get(name, 0.0) for name in BROKEN),
    )


def outcome_rates(frame: MetricsFrame | None) -> Outcomes | None:
    """Return the outcomes in requests per second."""
    if frame is None:
        return None
    return outcomes(frame.gained.get(c.SLO_REQUESTS.name)).scaled(1 / frame.span_s)


class AttainmentRow(msgspec.Struct, frozen=True):
    slo_class: str
    tenant: str
    counts: Outcomes
    model: str = ""


def attainment(frame: MetricsFrame | None) -> list[AttainmentRow]:
    """Return the outcomes by model, class and tenant, those with most requests first."""
    if frame is None:
        return []
    groups: dict[tuple[str, str, str], dict[Labels, float]] = {}
    for labels, value in frame.gained.get(c.SLO_REQUESTS.name, {}).items():
        of = dict(labels)
        key = (of.get("slo_class", ""), of.get("tenant", ""), of.get("model", ""))
        groups.setdefault(key, {})[labels] = value
    rows = [
        AttainmentRow(slo_class, tenant, outcomes(values), model)
        for (slo_class, tenant, model), values in groups.items()
    ]
    return sorted(
        (r for r in rows if r.counts.offered),
        key=lambda r: (-r.counts.offered, r.model, r.slo_class, r.tenant),
    )


def buckets_of(frame: MetricsFrame | None, name: str) -> dict[float, float]:
    """Return the increases of a histogram's buckets, cumulative, by upper bound."""
    if frame is None:
        return {}
    return {_bound(le): count for le, count in by_label(frame.gained.get(f"{name}_bucket"), "le").items()}


def _bound(text: str) -> float:
    return math.inf if text == "+Inf" else float(text)


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return a quantile as Prometheus' histogram_quantile does, linear within a bucket. None: no
    observation."""
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = share * buckets[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        upto = buckets[bound]
        if upto >= wanted and upto > below:
            if math.isinf(bound):
                return lower  # the last bucket has no upper bound
            return lower + (bound - lower) * (wanted - below) / (upto - below)
        lower, below = bound, max(below, upto)
    return lower


def added(into: dict[float, float], buckets: Mapping[float, float], sign: float = 1.0) -> None:
    for bound, count in buckets.items():
        into[bound] = into.get(bound, 0.0) + sign * count


def quantiles_over_time(
    times: Sequence[float],
    points: Sequence[MetricsFrame | None],
    name: str,
    shares: Sequence[float],
    *,
    smooth_s: float = SMOOTH_S,
) -> list[Series]:
    """Return one list per share. Each point covers about `smooth_s` before its end.

    `times` are the ends of the points, which are the same time apart. A point's own span would not do: it
    changes with the samples that fall into it.
    """
    step_s = times[1] - times[0] if len(times) > 1 else smooth_s
    width = max(1, round(smooth_s / step_s))
    each = [buckets_of(point, name) for point in points]
    window: dict[float, float] = {}
    lines: list[Series] = [[] for _ in shares]
    for index, buckets in enumerate(each):
        added(window, buckets)
        if index >= width:
            added(window, each[index - width], -1.0)
        for line, share in zip(lines, shares, strict=True):
            line.append(None if points[index] is None else quantile(window, share))
    return lines


def part_means(frame: MetricsFrame | None) -> dict[str, float]:
    """Return the seconds per request by part, over the requests that report parts. Empty: none does."""
    if frame is None:
        return {}
    sums = by_label(frame.gained.get(f"{c.TTFT_PART.name}_sum"), "part")
    counts = by_label(frame.gained.get(f"{c.TTFT_PART.name}_count"), "part")
    whole = max(counts.values(), default=0.0)
    return {part: sums.get(part, 0.0) / whole for part in PARTS if part in sums} if whole else {}


def share_of(part: float, whole: float) -> float | None:
    return part / whole if whole else None
