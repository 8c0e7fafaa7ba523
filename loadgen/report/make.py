"""Makes a report from records. Pure; a million records take seconds."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.report.model import (
    QUANTILE_LEVELS,
    Distributions,
    Figures,
    GeneratorHealth,
    Report,
    ReportGroup,
    ReportWindow,
    RunSettings,
    Share,
    ShortAnswers,
)
from loadgen.report.phases import balance, latency_breakdown, predictions
from loadgen.report.sample import Floats, as_floats, percentiles, quantiles, share_of
from loadgen.report.scales import slo_scales
from loadgen.slo import ClassObjectives, Slo

LATE_S = 0.01
LATE_SHARE_MAX = 0.01
WINDOWS_WANTED = 60
GAPS_MAX = 4_000_000
"""Maximum gaps of ITL that are looked at. Beyond it, only every second, third, ... request counts."""
_WINDOW_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
_REASONS_MAX = 12
_DIGITS = re.compile(r"\d+(?:\.\d+)?")


def make_report(records: Sequence[RequestRecord], settings: RunSettings) -> Report:
    """Make the report. Every record must have an outcome."""
    assert all(r.outcome is not None for r in records), "a request without an outcome"
    ordered = sorted(records, key=lambda r: r.planned_s)
    objectives = settings.objectives
    done = [r for r in ordered if r.outcome is RequestOutcome.COMPLETED]
    duration_s = _duration_s(ordered)
    arrivals_s = _arrivals_s(ordered, duration_s)
    spans = _Spans(arrivals_s, max(arrivals_s, duration_s))
    window_s = window_for(duration_s)
    lateness = percentiles(r.lateness_s for r in ordered)
    return Report(
        **_fields(_figures(ordered, objectives, spans)),
        settings=settings,
        duration_s=duration_s,
        arrivals_s=arrivals_s,
        offered_per_s=_rate(len(ordered), arrivals_s),
        interrupted=len(ordered) < settings.planned,
        errors=dict(Counter(str(r.error) for r in ordered if r.error is not None)),
        refusals=_reasons(r.detail for r in ordered if r.outcome is RequestOutcome.REFUSED),
        failures=_reasons(f"{r.error}, {r.detail}" for r in ordered if r.outcome is RequestOutcome.FAILED),
        lateness=lateness,
        generator=_generator(ordered, settings),
        classes=_groups(ordered, objectives, spans, key=lambda r: r.slo_class),
        tenants=_groups(ordered, objectives, spans, key=lambda r: r.tenant),
        window_s=window_s,
        windows=_windows(ordered, objectives, window_s),
        distributions=_distributions(done),
        latency_breakdown=latency_breakdown(done),
        balance=balance(done),
        predictions=predictions(done, objectives),
        short_answers=_short_answers(done),
        slo_scales=slo_scales(ordered, objectives, attain=settings.attain),
    )


def judged(
    records: Sequence[RequestRecord], settings: RunSettings, *, scales: Sequence[float] = ()
) -> Report:
    """A report with these SLO scales, or with the usual ones if none are given."""
    report = make_report(records, settings)
    if not scales:
        return report
    swept = slo_scales(records, settings.objectives, attain=settings.attain, scales=scales)
    return replace(report, slo_scales=swept)


def window_for(duration_s: float) -> float:
    """A round window length that cuts the duration into at most about `WINDOWS_WANTED` windows."""
    wanted_s = duration_s / WINDOWS_WANTED
    return next(
        (step for step in _WINDOW_STEPS_S if step >= wanted_s), float(np.ceil(wanted_s / 3600) * 3600)
    )


@dataclass(frozen=True, slots=True)
class _Spans:
    """The seconds that counts are divided by. Goodput is divided by the time of the arrivals, like the
    offered rate, so that it is a part of it. Completed work is divided by the whole time, which is no
    shorter."""

    arrivals_s: float
    work_s: float


def _figures(ordered: Sequence[RequestRecord], objectives: ClassObjectives, spans: _Spans) -> Figures:
    outcomes = Counter(r.outcome for r in ordered)
    judged = [r for r in ordered if r.outcome is not RequestOutcome.CANCELLED]
    done = [r for r in ordered if r.outcome is RequestOutcome.COMPLETED]
    goodput = _share(judged, objectives.is_met)
    return Figures(
        offered=len(ordered),
        completed=len(done),
        refused=outcomes[RequestOutcome.REFUSED],
        failed=outcomes[RequestOutcome.FAILED],
        cancelled=outcomes[RequestOutcome.CANCELLED],
        goodput_share=goodput.share,
        goodput_per_s=_rate(goodput.met, spans.arrivals_s),
        goodput=goodput,
        ttft_attained=_share(judged, lambda r: objectives.of(r).meets_ttft(r)),
        tpot_attained=_share(judged, lambda r: objectives.of(r).meets_tpot(r)),
        ttft=percentiles(r.ttft_s for r in done),
        tpot=percentiles(r.tpot_s for r in done),
        itl=percentiles(_gaps(done)),
        e2e=percentiles(r.e2e_s for r in done),
        requests_per_s=_rate(len(done), spans.work_s),
        prompt_tokens_per_s=_rate(sum(r.prompt_tokens or 0 for r in done), spans.work_s),
        output_tokens_per_s=_rate(sum(r.tokens_out for r in done), spans.work_s),
        cache_hit_ratio=_cache_hit_ratio(done),
    )


def _fields(figures: Figures) -> dict[str, Any]:
    return {f.name: getattr(figures, f.name) for f in fields(figures)}


def _share(judged: Sequence[RequestRecord], is_met: Callable[[RequestRecord], bool]) -> Share:
    return share_of(np.array([is_met(r) for r in judged], dtype=np.bool_))


def _groups(
    ordered: Sequence[RequestRecord],
    objectives: ClassObjectives,
    spans: _Spans,
    *,
    key: Callable[[RequestRecord], str],
) -> tuple[ReportGroup, ...]:
    """Figures by name; empty if no request names one."""
    members: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in ordered:
        members[key(record)].append(record)
    if set(members) <= {""}:
        return ()
    return tuple(
        ReportGroup(
            **_fields(_figures(mine, objectives, spans)), name=name, slo=_common_slo(mine, objectives)
        )
        for name, mine in sorted(members.items())
    )


def _common_slo(records: Sequence[RequestRecord], objectives: ClassObjectives) -> Slo | None:
    targets = {objectives.of(r) for r in records}
    return targets.pop() if len(targets) == 1 else None


def _windows(
    ordered: Sequence[RequestRecord], objectives: ClassObjectives, window_s: float
) -> tuple[ReportWindow, ...]:
    """Windows from the first planned instant to the last, without a gap."""
    if not ordered:
        return ()
    origin_s = ordered[0].planned_s
    members: dict[int, list[RequestRecord]] = defaultdict(list)
    for record in ordered:
        members[int((record.planned_s - origin_s) // window_s)].append(record)
    return tuple(
        _window(i * window_s, members.get(i, []), objectives) for i in range(max(members, default=-1) + 1)
    )


def _window(start_s: float, members: Sequence[RequestRecord], objectives: ClassObjectives) -> ReportWindow:
    outcomes = Counter(r.outcome for r in members)
    ttft = percentiles(r.ttft_s for r in members if r.outcome is RequestOutcome.COMPLETED)
    return ReportWindow(
        start_s=start_s,
        offered=len(members),
        met=sum(objectives.is_met(r) for r in members),
        completed=outcomes[RequestOutcome.COMPLETED],
        refused=outcomes[RequestOutcome.REFUSED],
        failed=outcomes[RequestOutcome.FAILED],
        cancelled=outcomes[RequestOutcome.CANCELLED],
        ttft_p50=ttft.p50 if ttft else None,
        ttft_p99=ttft.p99 if ttft else None,
    )


def _distributions(done: Sequence[RequestRecord]) -> Distributions:
    return Distributions(
        QUANTILE_LEVELS,
        quantiles(as_floats(r.ttft_s for r in done)),
        quantiles(as_floats(r.tpot_s for r in done)),
        quantiles(_gaps(done)),
        quantiles(as_floats(r.e2e_s for r in done)),
    )


def _generator(ordered: Sequence[RequestRecord], settings: RunSettings) -> GeneratorHealth:
    lateness = as_floats(r.lateness_s for r in ordered)
    late = int(np.count_nonzero(lateness > LATE_S))
    limited = sum(r.error is ErrorKind.CONNECTION_LIMIT for r in ordered)
    share = late / len(ordered) if ordered else 0.0
    complaints: list[str] = []
    if share > LATE_SHARE_MAX:
        complaints.append(
            f"{share:.1%} of the requests left more than {LATE_S * 1e3:g} ms late: this program, or the "
            "machine it shares with the server, was the bottleneck; give it a core of its own or a lower rate"
        )
    if limited:
        complaints.append(
            f"{limited} requests were not sent for want of a connection: raise --connections-max, or the "
            "server is far beyond its capacity"
        )
    return GeneratorHealth(percentiles(lateness), share, limited, "; ".join(complaints))


def _reasons(details: Iterable[str]) -> dict[str, int]:
    alike: dict[str, Counter[str]] = defaultdict(Counter)
    for detail in details:
        alike[_reason(detail)][detail.rstrip(", ")] += 1
    # The numbers are kept if all answers were identical.
    counts = Counter(
        {next(iter(texts)) if len(texts) == 1 else masked: texts.total() for masked, texts in alike.items()}
    )
    most = counts.most_common(_REASONS_MAX)
    other = sum(counts.values()) - sum(n for _, n in most)
    return dict(most) | ({"other": other} if other else {})


def _reason(detail: str) -> str:
    """The detail without the numbers after the status, which differ from request to request."""
    status, colon, text = detail.partition(":")
    return f"{status}{colon}{_DIGITS.sub('N', text)}" if colon else _DIGITS.sub("N", detail).rstrip(", ")


def _duration_s(ordered: Sequence[RequestRecord]) -> float:
    if not ordered:
        return 0.0
    return max(r.planned_s if r.ended_s is None else r.ended_s for r in ordered) - ordered[0].planned_s


def _arrivals_s(ordered: Sequence[RequestRecord], duration_s: float) -> float:
    """The time of the arrivals. n requests span n - 1 gaps; if all came at one instant, it is the whole
    run."""
    span_s = ordered[-1].planned_s - ordered[0].planned_s if ordered else 0.0
    return span_s * len(ordered) / (len(ordered) - 1) if span_s > 0 else duration_s


def _short_answers(done: Sequence[RequestRecord]) -> ShortAnswers | None:
    """None if no request tells how long an answer of prescribed length was."""
    shares = [
        r.completion_tokens / r.asked_tokens
        for r in done
        if r.asked_tokens and r.completion_tokens is not None
    ]
    shorter = [share for share in shares if share < 1]
    mean = sum(shorter) / len(shorter) if shorter else None
    return ShortAnswers(len(shorter), len(shares), mean) if shares else None


def _gaps(done: Sequence[RequestRecord]) -> Floats:
    counted = [r for r in done if _has_gaps(r)]
    gap_count = sum(len(r.token_instants_s) - 1 for r in counted)
    stride = -(-gap_count // GAPS_MAX) or 1
    gaps = [np.diff(r.token_instants_s) for r in counted[::stride]]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _has_gaps(record: RequestRecord) -> bool:
    """A record with two instants for more than two tokens holds the first and the last, as the simulator
    keeps them."""
    count = len(record.token_instants_s)
    return count > 2 or (count == 2 and record.tokens_out == 2)


def _rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _cache_hit_ratio(done: Sequence[RequestRecord]) -> float | None:
    counted = [r for r in done if r.cached_tokens is not None and r.prompt_tokens]
    asked = sum(r.prompt_tokens or 0 for r in counted)
    return sum(r.cached_tokens or 0 for r in counted) / asked if asked else None
