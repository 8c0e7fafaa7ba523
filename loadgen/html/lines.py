"""Line charts: latency distributions, attainment by SLO scale and by rate, TTFT over time. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

from loadgen.html.marks import ChartFrame, Markup, linear, logarithmic, polyline, snug, tag
from loadgen.report.model import Report, SearchResult
from loadgen.units import seconds, share, three_digits, tick_seconds

HALF_WIDTH, HALF_HEIGHT = 520.0, 290.0
WIDE = 1060.0
LETTERS = "ABCDEFGH"
LETTER_PX, ROW_PX = 6.5, 13.0
"""Size of the small texts beside lines."""


@dataclass(frozen=True, slots=True)
class RunCurve:
    """The curve of one run."""

    run: int
    name: str
    points: Sequence[tuple[float, float]]
    style: str = ""


def run_class(run: int) -> str:
    return f"r{run % len(LETTERS)}"


def cdf(
    reports: Sequence[Report], latency: str, *, title: str, target: Callable[[Report], float | None]
) -> Markup:
    """Share of all judged requests that were answered within a time. Refused and failed requests never were,
    so a curve ends at the share that completed."""
    lines: list[RunCurve] = []
    for run, report in enumerate(reports):
        values: tuple[float, ...] = getattr(report.distributions, latency)
        top = report.completed / report.judged if report.judged else 0.0
        points = [(v, level * top) for v, level in zip(values, report.distributions.levels, strict=False)]
        if points:
            lines.append(RunCurve(run, report.label, points))
    if not lines:
        return tag("p", f"No {title}: nothing was measured.", class_="none")
    shown = [p[0] for line in lines for p in line.points if p[1] >= 0.005 * line.points[-1][1]]
    targets = sorted({t for r in reports if (t := target(r)) is not None})
    plane = ChartFrame(
        logarithmic([*shown, *targets], 58, HALF_WIDTH - 14),
        linear(1.0, HALF_HEIGHT - 42, 24),
        HALF_WIDTH,
        HALF_HEIGHT,
    )
    return plane.svg(
        plane.grid(
            x_label=f"{title}, log scale",
            y_label="requests answered within",
            x_text=tick_seconds,
            y_text=lambda v: f"{v:.0%}",
        ),
        *(drawn(plane, line, letters=len(reports) > 1) for line in lines),
        *uprights(plane, [(t, f"objective {seconds(t)}", "target") for t in targets]),
        title=f"{title}: cumulative distribution",
        series=hover(plane, lines, seconds, share),
    )


def scales_chart(reports: Sequence[Report]) -> Markup:
    """The second rows of DistServe's figures 8 and 9."""
    lines = [
        RunCurve(run, r.label, _scale_points(r), "dotted-points")
        for run, r in enumerate(reports)
        if len(r.slo_scales.points) > 1
    ]
    if not lines:
        return tag("p", "One SLO scale only.", class_="none")
    plane = ChartFrame(
        logarithmic([p[0] for line in lines for p in line.points], 58, HALF_WIDTH - 14),
        linear(1.0, HALF_HEIGHT - 42, 24),
        HALF_WIDTH,
        HALF_HEIGHT,
    )
    goals = sorted({r.settings.attain for r in reports})
    return plane.svg(
        plane.grid(
            x_label="SLO scale: factor for both objectives",
            y_label="requests that meet both",
            x_text=lambda v: f"{v:g}x",
            y_text=lambda v: f"{v:.0%}",
        ),
        *(drawn(plane, line, letters=len(reports) > 1) for line in lines),
        *levels(plane, [(goal, f"goal {goal:.0%}") for goal in goals]),
        *(
            _mark(plane, run, r.slo_scales.most_stringent, r.settings.attain, "most stringent scale")
            for run, r in enumerate(reports)
            if r.slo_scales.most_stringent is not None
            and plane.x.low <= r.slo_scales.most_stringent <= plane.x.high
        ),
        title="Attainment by SLO scale",
        series=hover(plane, lines, lambda v: f"scale {v:g}", share),
    )


def _scale_points(report: Report) -> list[tuple[float, float]]:
    """The points of the chart, including the most stringent scale, which the marks lie on."""
    scales = report.slo_scales
    points = {p.scale: p.share for p in scales.points}
    exact = scales.most_stringent
    if exact is not None and min(points) < exact < max(points):
        points.setdefault(exact, report.settings.attain)
    return sorted(points.items())


def _mark(plane: ChartFrame, run: int, x: float, y: float, what: str) -> Markup:
    tip = f"{LETTERS[run % 8]}: {what} {three_digits(x)}"
    return tag(
        "circle",
        tag("title", tip),
        cx=plane.x.px(x),
        cy=plane.y.px(y),
        r=5,
        class_=f"mark {run_class(run)}",
        data_tip=tip,
    )


def search_chart(found: Sequence[tuple[int, SearchResult]], *, letters: bool) -> Markup:
    """Every probe of every search, with rate, attainment and interval."""
    rates = [p.rate_per_s for _, s in found for p in s.probes]
    plane = ChartFrame(
        logarithmic(rates, 58, WIDE - 14), linear(1.0, HALF_HEIGHT - 42, 24), WIDE, HALF_HEIGHT
    )
    parts: list[Markup] = []
    found_at: list[tuple[float, str, str]] = []
    parts += levels(plane, [(goal, f"goal {goal:.0%}") for goal in sorted({s.attain for _, s in found})])
    for run, search in found:
        for probe in search.probes:
            x = plane.x.px(probe.rate_per_s)
            state = ", stopped early" if probe.aborted else ""
            tip = (
                f"{LETTERS[run % 8]}: {three_digits(probe.rate_per_s)} /s: {share(probe.share)} of "
                f"{probe.judged} ({share(probe.low)} to {share(probe.high)}){state}"
            )
            whisker = tag(
                "line", x1=x, x2=x, y1=plane.y.px(probe.low), y2=plane.y.px(probe.high), class_="whisker"
            )
            dot = tag(
                "circle",
                cx=x,
                cy=plane.y.px(probe.share),
                r=5,
                class_="hollow" if probe.aborted else "dot",
            )
            parts.append(tag("g", tag("title", tip), whisker, dot, class_=run_class(run), data_tip=tip))
        if search.rate_per_s is not None:
            name = f"{LETTERS[run % 8]} " if letters else ""
            text = f"{name}{three_digits(search.rate_per_s)} /s"
            found_at.append((search.rate_per_s, text, f"found {run_class(run)}"))
    parts += uprights(plane, found_at)
    return plane.svg(
        plane.grid(
            x_label="offered requests per second, log scale",
            y_label="requests that meet both objectives",
            x_text="{:g}".format,
            y_text=lambda v: f"{v:.0%}",
        ),
        *parts,
        title="Goodput search: every probe",
    )


def ttft_over_time(reports: Sequence[Report]) -> Markup:
    """p50 and p99 of TTFT in each window of planned instants."""
    lines: list[RunCurve] = []
    for run, report in enumerate(reports):
        for name, style in (("ttft_p50", ""), ("ttft_p99", "thin")):
            points = [
                (w.start_s + report.window_s / 2, value)
                for w in report.windows
                if (value := getattr(w, name)) is not None
            ]
            if points:
                lines.append(RunCurve(run, f"{report.label} {name[-3:]}", points, style))
    if not lines:
        return tag("p", "No TTFT: nothing completed.", class_="none")
    targets = sorted({t for r in reports if (t := r.settings.slo.ttft_s) is not None})
    plane = ChartFrame(
        snug(max(r.windows[-1].start_s + r.window_s for r in reports if r.windows), 58, WIDE - 14),
        logarithmic([*(p[1] for line in lines for p in line.points), *targets], 200, 24),
        WIDE,
        242,
    )
    return plane.svg(
        plane.grid(
            x_label="planned instant, s",
            y_label="TTFT, log scale: p50 solid, p99 thin",
            x_text="{:g}".format,
            y_text=tick_seconds,
        ),
        *(drawn(plane, line, letters=False) for line in lines),
        *levels(plane, [(t, f"objective {seconds(t)}") for t in targets]),
        title="TTFT over time",
        series=hover(plane, lines, lambda v: f"{three_digits(v)} s", seconds),
    )


def drawn(plane: ChartFrame, line: RunCurve, *, letters: bool) -> Markup:
    points = [(plane.x.px(x), plane.y.px(y)) for x, y in line.points]
    parts = [polyline(points, f"line {line.style}".strip())]
    if line.style == "dotted-points":
        parts += [tag("circle", cx=x, cy=y, r=2.5, class_="dot") for x, y in points]
    if letters:
        x, y = _letter_place(points, line.run)
        parts.append(tag("circle", cx=x, cy=y, r=8, class_="badge"))
        parts.append(tag("text", LETTERS[line.run % 8], x=x, y=y + 4, class_="badge-text"))
    return tag("g", *parts, class_=run_class(line.run))


def _letter_place(points: Sequence[tuple[float, float]], run: int) -> tuple[float, float]:
    """A point of the curve for the run's letter. Each run has its own height, so that letters of similar
    curves do not overlap."""
    top, bottom = min(y for _, y in points), max(y for _, y in points)
    wanted = bottom - (bottom - top) * (0.5 + 0.11 * (run % 4))
    return min(points, key=lambda p: abs(p[1] - wanted))


def uprights(plane: ChartFrame, marks: Sequence[tuple[float, str, str]]) -> list[Markup]:
    """Vertical lines from (value, text, class). Texts that would overlap are placed in rows."""
    rows: list[list[tuple[float, float]]] = []
    made: list[Markup] = []
    for value, text, class_ in sorted(marks):
        x = plane.x.px(value)
        is_left = x > (plane.x.start_px + plane.x.end_px) / 2
        width = LETTER_PX * len(text)
        span = (x - 5 - width, x - 5) if is_left else (x + 5, x + 5 + width)
        row = next((i for i, row in enumerate(rows) if all(not _overlap(span, s) for s in row)), len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(span)
        made.append(_upright(plane, x, text, is_left=is_left, row=row, class_=class_))
    return made


def _upright(plane: ChartFrame, x: float, text: str, *, is_left: bool, row: int, class_: str) -> Markup:
    top, side = plane.y.end_px, "end" if is_left else "start"
    at = {"x": x + (-5 if is_left else 5), "y": top - 1 + row * ROW_PX}
    return tag(
        "g",
        tag("line", x1=x, x2=x, y1=plane.y.start_px, y2=top - 4, class_="rule"),
        tag("text", text, **at, class_=f"rule-text {side}"),
        class_=class_,
    )


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] + LETTER_PX and other[0] < one[1] + LETTER_PX


def levels(plane: ChartFrame, marks: Sequence[tuple[float, str]]) -> list[Markup]:
    """Horizontal lines from (value, text). Texts that would overlap are placed side by side."""
    made: list[Markup] = []
    before_px, x = float("inf"), plane.x.end_px
    for value, text in sorted(marks):
        y = plane.y.px(value)
        is_near = abs(before_px - y) < ROW_PX
        x = x if is_near else plane.x.end_px
        made.append(
            tag(
                "g",
                tag("line", x1=plane.x.start_px, x2=plane.x.end_px, y1=y, y2=y, class_="rule"),
                tag("text", text, x=x, y=y - 4, class_="rule-text end"),
                class_="target",
            )
        )
        before_px, x = y, x - LETTER_PX * (len(text) + 1)
    return made


def hover(
    plane: ChartFrame,
    lines: Sequence[RunCurve],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> str:
    """The pixels and text of every point, for the page's script."""
    series = [
        {
            "run": line.run,
            "name": line.name,
            "points": [
                [round(plane.x.px(x), 1), round(plane.y.px(y), 1), f"{x_text(x)}: {y_text(y)}"]
                for x, y in line.points
            ],
        }
        for line in lines
    ]
    return orjson.dumps(series).decode()
