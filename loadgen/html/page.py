"""The report page is one file that loads nothing, which its content security policy also forbids. Pure.

A colour has the same meaning everywhere. Each run has a letter and a colour (from Okabe and Ito's palette,
which colour-blind people can tell apart).
"""

from collections.abc import Sequence
from importlib import resources

import orjson

from loadgen.html import bars, lines, tables
from loadgen.html.marks import Markup, tag
from loadgen.report.model import Report
from loadgen.report.summary import differences
from loadgen.units import count, per_second, seconds, share

RUNS_MAX = len(lines.LETTERS)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render(reports: Sequence[Report], *, title: str = "", more: Sequence[Markup] = ()) -> str:
    """The page of one run, or of several runs side by side; at least one, at most `RUNS_MAX`. `more` holds
    further sections from the caller."""
    assert 0 < len(reports) <= RUNS_MAX, f"{len(reports)} runs"
    name = title or " / ".join(dict.fromkeys(r.settings.trace for r in reports))
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("title", f"{name} - Baton"),
        Markup(f"<style>{_resource('page.css')}</style>"),
    )
    body = tag(
        "body",
        _head(reports, name),
        tag("main", *_sections(reports), *more),
        tag("div", id="tip", hidden="hidden"),
        Markup(f'<script type="application/json" id="reports">{_json(reports)}</script>'),
        Markup(f"<script>{_resource('page.js')}</script>"),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'


def _resource(name: str) -> str:
    return resources.files("loadgen.html").joinpath(name).read_text("utf-8")


def _json(reports: Sequence[Report]) -> str:
    # A script element must not contain "<", because the parser would look for its end there.
    return orjson.dumps([r.as_json() for r in reports]).decode().replace("<", "\\u003c")


def _head(reports: Sequence[Report], name: str) -> Markup:
    runs = [tag("span", tables.run_name(reports, i), class_="item") for i in range(len(reports))]
    return tag(
        "header",
        tag("h1", name),
        tag("div", *runs, class_="legend runs"),
        *(
            tag("p", tag("b", "The load generator did not keep up. "), r.generator.warning, class_="warning")
            for r in reports
            if r.generator.warning
        ),
        *(
            tag(
                "p",
                f"Stopped early: {r.offered} of {r.settings.planned} requests were offered.",
                class_="warning",
            )
            for r in reports
            if r.interrupted
        ),
        *(
            tag("p", tag("b", f"Not the same {what}: "), _by_run(values), class_="warning")
            for what, values in differences(reports).items()
        ),
        tag("div", *(_tiles(reports, i) for i in range(len(reports)))) if len(reports) == 1 else None,
    )


def _by_run(values: Sequence[str]) -> str:
    return ", ".join(f"{lines.LETTERS[run % RUNS_MAX]} {value}" for run, value in enumerate(values))


def _tiles(reports: Sequence[Report], run: int) -> Markup:
    r = reports[run]
    ttft, tpot, good = r.ttft, r.tpot, r.goodput
    tiles = (
        (
            "Goodput",
            share(r.goodput_share if r.judged else None),
            f"{per_second(r.goodput_per_s)}; 95 %: {share(good.low)} to {share(good.high)}",
        ),
        ("TTFT p50", seconds(ttft.p50 if ttft else None), f"p99 {seconds(ttft.p99 if ttft else None)}"),
        ("TPOT p50", seconds(tpot.p50 if tpot else None), f"p99 {seconds(tpot.p99 if tpot else None)}"),
        (
            "Offered",
            count(r.offered),
            f"{per_second(r.offered_per_s)}; {count(r.refused)} refused, {count(r.failed)} failed",
        ),
        ("Output tokens", per_second(r.output_tokens_per_s), f"prompt {per_second(r.prompt_tokens_per_s)}"),
        ("Objectives", str(r.settings.slo), f"goal {share(r.settings.attain)}"),
    )
    return tag(
        "div",
        *(
            tag("div", tag("span", what), tag("strong", value), tag("small", more), class_="tile")
            for what, value, more in tiles
        ),
        class_="tiles",
    )


def section(title: str, note: str, *parts: Markup | None) -> Markup:
    return tag("section", tag("h2", title), tag("p", note, class_="note") if note else None, *parts)


def _sections(reports: Sequence[Report]) -> list[Markup]:
    several = len(reports) > 1
    note = "Ratios are to the first run; coloured where they differ by more than 2 %." if several else ""
    made = [
        section("Comparison" if several else "Figures", note, tables.summary(reports)),
        _latency_section(reports),
        _time_section(reports),
        _latency_breakdown_section(reports),
        _balance_section(reports),
        _groups_section(reports),
        _scale_section(reports),
        _search_section(reports),
        _reasons_section(reports),
        section("Settings", "", tables.settings(reports)),
    ]
    return [m for m in made if m is not None]


def _latency_section(reports: Sequence[Report]) -> Markup:
    charts = (
        lines.cdf(reports, "ttft", title="TTFT", target=lambda r: r.settings.slo.ttft_s),
        lines.cdf(reports, "tpot", title="TPOT", target=lambda r: r.settings.slo.tpot_s),
        lines.cdf(reports, "itl", title="ITL", target=lambda r: None),
        lines.cdf(reports, "e2e", title="End to end", target=lambda r: None),
    )
    return section(
        "Latency",
        "From the instant at which a request should have left. A curve ends at the share that completed: "
        "requests that were refused or failed never answered. The table is of completed requests.",
        tag("div", *(_figure(c) for c in charts), class_="pair"),
        tables.latencies(reports),
    )


def _figure(chart: Markup, caption: Markup | None = None) -> Markup:
    return tag("figure", caption, chart)


def _time_section(reports: Sequence[Report]) -> Markup:
    most = max((w.offered / r.window_s for r in reports for w in r.windows), default=1.0)
    longest = max((w.start_s + r.window_s for r in reports for w in r.windows), default=1.0)
    charts = [
        _figure(
            bars.over_time(r, i, most_per_s=most, longest_s=longest),
            tag("figcaption", tables.run_name(reports, i), bars.outcome_legend(reports, i)),
        )
        for i, r in enumerate(reports)
    ]
    return section(
        "Goodput over time",
        "Requests by their planned instant and by what became of them; the line is the offered load.",
        *charts,
        _figure(lines.ttft_over_time(reports)),
    )


def _latency_breakdown_section(reports: Sequence[Report]) -> Markup | None:
    reported = [(i, r.latency_breakdown) for i, r in enumerate(reports) if r.latency_breakdown is not None]
    if not reported:
        return None
    longest = max(sum(b.stages.values()) for _, w in reported for b in w.bands)
    parts: list[Markup] = [bars.stage_legend([w for _, w in reported])]
    for run, latency_breakdown in reported:
        caption = tag(
            "p",
            tables.run_name(reports, run),
            f": {count(latency_breakdown.count)} requests",
            class_="caption",
        )
        pair = tag(
            "div",
            _figure(bars.latency_breakdown_chart(latency_breakdown, as_share=False, longest_s=longest)),
            _figure(bars.latency_breakdown_chart(latency_breakdown, as_share=True, longest_s=longest)),
            class_="pair",
        )
        parts += [
            caption,
            pair,
            tag("details", tag("summary", "All stages"), tables.stages(reports[run], run)),
        ]
    return section(
        "Where the time to the first token went",
        "Means over requests whose TTFT is about the row's percentile; the line is the first token.",
        *parts,
    )


def _balance_section(reports: Sequence[Report]) -> Markup | None:
    reported = [(i, r.balance) for i, r in enumerate(reports) if r.balance is not None]
    if not reported:
        return None
    most_prompt = max(w.prompt_tokens for _, b in reported for w in b.workers)
    most_output = max(w.output_tokens for _, b in reported for w in b.workers)
    parts: list[Markup] = []
    for run, balance in reported:
        pair = tag(
            "div",
            _figure(bars.balance_chart(balance.workers, run, kind="prompt", most=most_prompt)),
            _figure(bars.balance_chart(balance.workers, run, kind="output", most=most_output)),
            class_="pair",
        )
        parts += [tag("p", tables.run_name(reports, run), class_="caption"), pair]
    return section("Balance of the pools", "Cached prompt tokens included.", *parts)


def _groups_section(reports: Sequence[Report]) -> Markup | None:
    found = [
        t for t in (tables.groups(reports, "classes"), tables.groups(reports, "tenants")) if t is not None
    ]
    return section("By class and tenant", "", *found) if found else None


def _scale_section(reports: Sequence[Report]) -> Markup | None:
    if all(r.settings.slo.ttft_s is None and r.settings.slo.tpot_s is None for r in reports):
        return None
    return section(
        "SLO scale",
        "Both objectives times one factor, at the rate of this run. The larger dot is the most stringent "
        "scale at which the goal is attained.",
        tag("div", _figure(lines.scales_chart(reports)), tables.scales(reports), class_="pair"),
    )


def _search_section(reports: Sequence[Report]) -> Markup | None:
    found = [(i, r.search) for i, r in enumerate(reports) if r.search is not None]
    if not found:
        return None
    reasons = [
        tag("p", tables.run_name(reports, i), f": {per_second(s.rate_per_s)}; {s.reason}") for i, s in found
    ]
    return section(
        "Goodput search",
        "Every probe with its 95 % interval; hollow: stopped early, because the goal was out of reach.",
        *reasons,
        _figure(lines.search_chart(found, letters=len(reports) > 1)),
    )


def _reasons_section(reports: Sequence[Report]) -> Markup | None:
    reason = tables.reasons(reports)
    return None if reason is None else section("Refused and failed", "", reason)
