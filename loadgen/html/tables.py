"""Tables of the page. Every figure carries its place in the page's JSON (`data-figure`) and its full value
(`data-value`). Pure."""

from collections.abc import Sequence

from loadgen.html.bars import STAGE_NAMES, letter
from loadgen.html.lines import run_class
from loadgen.html.marks import Markup, joined, tag
from loadgen.report.model import Percentiles, Report, ReportGroup, ScalePoint
from loadgen.report.summary import Show, look_up, ratio_to_first, summary_rows
from loadgen.slo import Slo
from loadgen.units import count, per_second, seconds, share, tick_seconds, times


def cell(value: float | None, show: Show, *, run: int, path: str, more: Markup | None = None) -> Markup:
    return tag(
        "td",
        show(value),
        more,
        class_="number",
        data_figure=f"{run}.{path}",
        data_value=None if value is None else repr(value),
    )


def run_name(reports: Sequence[Report], run: int) -> Markup:
    several = len(reports) > 1
    return tag("span", badge(run) if several else None, " " if several else None, reports[run].label)


def badge(run: int) -> Markup:
    return tag("b", letter(run), class_=f"run-badge {run_class(run)}")


def summary(reports: Sequence[Report]) -> Markup:
    """One row per figure, one column per run. Each later run has its ratio to the first beside it."""
    head = [tag("th", run_name(reports, i), class_="number") for i in range(len(reports))]
    body: list[Markup] = []
    for (name, path, show, better), values in summary_rows(reports):
        cells: list[Markup] = []
        for run, value in enumerate(values):
            ratio = None if show is count else ratio_to_first(values, run)
            more = None if ratio is None else tag("small", f" {times(ratio)}", class_=_judged(ratio, better))
            if path == "goodput_share":
                g = reports[run].goodput
                more = joined([tag("small", f" [{share(g.low)} to {share(g.high)}]"), more or Markup()])
            cells.append(cell(value, show, run=run, path=path, more=more))
        body.append(tag("tr", tag("th", name, scope="row"), *cells))
    if len(reports) > 1:
        return table([tag("th", ""), *head], body)
    half = -(-len(body) // 2)
    return tag("div", *(table([], part) for part in (body[:half], body[half:])), class_="pair")


def _judged(ratio: float, better: str) -> str | None:
    if not better or 0.98 <= ratio <= 1.02:
        return None
    return "better" if (ratio > 1) == (better == "high") else "worse"


def table(head: Sequence[Markup], body: Sequence[Markup]) -> Markup:
    inner = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("div", inner, class_="scroll")


_GROUP_COLUMNS: tuple[tuple[str, str, Show], ...] = (
    ("offered", "offered", count),
    ("refused", "refused", count),
    ("failed", "failed", count),
    ("goodput", "goodput_share", share),
    ("TTFT met", "ttft_attained.share", share),
    ("TPOT met", "tpot_attained.share", share),
    ("TTFT p50", "ttft.p50", seconds),
    ("TTFT p99", "ttft.p99", seconds),
    ("TPOT p50", "tpot.p50", seconds),
    ("TPOT p99", "tpot.p99", seconds),
    ("output tokens", "output_tokens_per_s", per_second),
    ("hits", "cache_hit_ratio", share),
)
GROUPS_SHOWN_MAX = 40


def groups(reports: Sequence[Report], kind: str) -> Markup | None:
    """Figures per class or per tenant of all runs (`kind` is `classes` or `tenants`); None if no request
    names one."""
    body: list[Markup] = []
    for run, report in enumerate(reports):
        members: tuple[ReportGroup, ...] = getattr(report, kind)
        for i, group in enumerate(members[:GROUPS_SHOWN_MAX]):
            cells = [
                cell(_number(look_up(group, path)), show, run=run, path=f"{kind}.{i}.{path}")
                for _, path, show in _GROUP_COLUMNS
            ]
            slo = "several" if group.slo is None else _targets(group.slo)
            first = badge(run) if len(reports) > 1 else None
            name = tag("th", group.name or "(none)", scope="row")
            body.append(tag("tr", tag("td", first) if first else None, name, tag("td", slo), *cells))
        if len(members) > GROUPS_SHOWN_MAX:
            body.append(
                tag("tr", tag("td", f"{len(members) - GROUPS_SHOWN_MAX} more in the JSON", colspan=15))
            )
    if not body:
        return None
    name = "class" if kind == "classes" else "tenant"
    head = [tag("th", n) for n in (["run"] if len(reports) > 1 else []) + [name, "TTFT, TPOT objective"]]
    return table([*head, *(tag("th", n, class_="number") for n, _, _ in _GROUP_COLUMNS)], body)


def _targets(slo: Slo) -> str:
    return ", ".join("-" if t is None else tick_seconds(t) for t in (slo.ttft_s, slo.tpot_s))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def stages(report: Report, run: int) -> Markup:
    """Mean and percentiles of every stage of the latency breakdown."""
    assert report.latency_breakdown is not None
    names = ("mean", "p50", "p90", "p99", "max")
    body = [
        tag(
            "tr",
            tag("th", tag("i", class_=f"key s-{stage}"), STAGE_NAMES[stage], scope="row"),
            *(
                cell(
                    _number(getattr(figures, n)),
                    seconds,
                    run=run,
                    path=f"latency_breakdown.stages.{stage}.{n}",
                )
                for n in names
            ),
        )
        for stage, figures in report.latency_breakdown.stages.items()
    ]
    return table([tag("th", "stage"), *(tag("th", n, class_="number") for n in names)], body)


def latencies(reports: Sequence[Report]) -> Markup:
    """All percentiles of all latencies."""
    columns = ("count", "mean", "p50", "p90", "p95", "p99", "max")
    body: list[Markup] = []
    for latency, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "end to end")):
        for run, report in enumerate(reports):
            figures: Percentiles | None = getattr(report, latency)
            cells = [
                cell(
                    _number(getattr(figures, c, None)),
                    count if c == "count" else seconds,
                    run=run,
                    path=f"{latency}.{c}",
                )
                for c in columns
            ]
            who = tag("td", run_name(reports, run)) if len(reports) > 1 else None
            body.append(tag("tr", tag("th", name, scope="row"), who, *cells))
    run_head = [tag("th", "run")] if len(reports) > 1 else []
    return table([tag("th", ""), *run_head, *(tag("th", c, class_="number") for c in columns)], body)


def reasons(reports: Sequence[Report]) -> Markup | None:
    """Reasons for refusals and failures; None if all requests completed."""
    body = [
        tag("tr", tag("td", run_name(reports, run)), tag("td", reason), tag("td", count(n), class_="number"))
        for run, report in enumerate(reports)
        for reason, n in [
            *((f"refused, {w}", n) for w, n in report.refusals.items()),
            *((f"failed, {w}", n) for w, n in report.failures.items()),
        ]
    ]
    return (
        table([tag("th", "run"), tag("th", "reason"), tag("th", "requests", class_="number")], body)
        if body
        else None
    )


def settings(reports: Sequence[Report]) -> Markup:
    """The settings of each run, one column per run."""
    columns = [_settings_of(r) for r in reports]
    names = list(dict.fromkeys(name for column in columns for name in column))
    body = [
        tag("tr", tag("th", name, scope="row"), *(tag("td", column.get(name, "-")) for column in columns))
        for name in names
    ]
    return table([tag("th", ""), *(tag("th", run_name(reports, i)) for i in range(len(reports)))], body)


def _settings_of(report: Report) -> dict[str, str]:
    s = report.settings
    values = {
        "kind": s.kind,
        "trace": f"{s.trace} ({s.trace_format})" if s.trace_format else s.trace,
        "target": s.target,
        "model": s.model,
        "objectives": str(s.slo),
        "goal": share(s.attain),
        "planned requests": count(s.planned),
        "duration": seconds(report.duration_s),
        "time scale": s.time_scale,
        "seed": str(s.seed),
    }
    values |= {f"objectives of {name}": str(slo) for name, slo in s.class_slos.items()}
    return values | {name.replace("_", " "): str(value) for name, value in s.options.items()}


def scales(reports: Sequence[Report]) -> Markup:
    """Attainment by SLO scale, one column per run, with the highest rates if they were searched."""
    found = [
        (run, i, point)
        for run, report in enumerate(reports)
        for i, point in enumerate(report.slo_scales.points)
    ]
    by_scale: dict[float, list[Markup]] = {scale: [] for scale in sorted({p.scale for _, _, p in found})}
    for scale, cells in by_scale.items():
        for run in range(len(reports)):
            here = next(((i, p) for r, i, p in found if r == run and p.scale == scale), None)
            cells.append(tag("td", "-", class_="number") if here is None else _scale_cell(run, *here))
    body = [tag("tr", tag("th", f"{s:g}x", scope="row"), *cells) for s, cells in by_scale.items()]
    heads = [
        tag("th", badge(run) if len(reports) > 1 else "attained", class_="number")
        for run in range(len(reports))
    ]
    return table([tag("th", "scale"), *heads], body)


def _scale_cell(run: int, index: int, point: ScalePoint) -> Markup:
    path = f"slo_scales.points.{index}.share"
    rate = point.rate_per_s
    more = None if rate is None else tag("small", f" up to {per_second(rate)}")
    return cell(point.share, share, run=run, path=path, more=more)
