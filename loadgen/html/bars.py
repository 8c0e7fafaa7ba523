"""Bar charts: requests over time, the latency breakdown, the balance of the pools. Pure."""

from collections.abc import Sequence

from loadgen.html.lines import LETTERS, WIDE, run_class
from loadgen.html.marks import Axis, ChartFrame, Markup, joined, linear, polyline, snug, tag
from loadgen.report.model import LatencyStages, Report, ReportWindow, WorkerWork
from loadgen.report.phases import AFTER_FIRST_TOKEN
from loadgen.units import count, seconds, share, tick_seconds

OUTCOMES = (
    ("met", "met both objectives"),
    ("late", "completed, too late"),
    ("refused", "refused"),
    ("failed", "failed"),
    ("cancelled", "given up by the client, as planned"),
)
STAGE_NAMES = {
    "client": "client's lateness",
    "tokenize": "tokenise",
    "queue": "queue in the router",
    "route": "route",
    "retries": "lost attempts",
    "wait": "wait at the worker",
    "load": "load from the store",
    "prefill": "prefill",
    "first_hop": "messages to the first token",
    "rest": "network and the rest",
    "transfer": "transfer to decode",
    "first_decode": "first decode step",
}
_BAR_LEFT, _ROW = 170.0, 30.0
WORKERS_NAMED_MAX = 32


def over_time(report: Report, run: int, *, most_per_s: float, longest_s: float) -> Markup:
    """Offered requests of each window by outcome, as rates."""
    plane = ChartFrame(snug(longest_s, 58, WIDE - 14), linear(most_per_s, 170, 24), WIDE, 212)
    parts = [_window_bar(plane, w, report.window_s) for w in report.windows]
    outline: list[tuple[float, float]] = []
    for w in report.windows:
        y = plane.y.px(w.offered / report.window_s)
        outline += [(plane.x.px(w.start_s), y), (plane.x.px(w.start_s + report.window_s), y)]
    return plane.svg(
        plane.grid(
            x_label=f"planned instant, s (windows of {report.window_s:g} s)",
            y_label="requests per second",
            x_text="{:g}".format,
            y_text="{:g}".format,
        ),
        tag("g", *parts, class_=run_class(run)),
        polyline(outline, "offered") if outline else Markup(),
        title="Offered requests over time by what became of them",
    )


def _window_bar(plane: ChartFrame, window: ReportWindow, window_s: float) -> Markup:
    counts = {
        "met": window.met,
        "late": window.completed - window.met,
        "refused": window.refused,
        "failed": window.failed,
        "cancelled": window.cancelled,
    }
    left, right = plane.x.px(window.start_s), plane.x.px(window.start_s + window_s)
    parts: list[Markup] = []
    below = 0
    for name, _ in OUTCOMES:
        if counts[name]:
            bottom, top = plane.y.px(below / window_s), plane.y.px((below + counts[name]) / window_s)
            parts.append(
                tag(
                    "rect",
                    x=left + 0.4,
                    y=top,
                    width=max(0.5, right - left - 0.8),
                    height=bottom - top,
                    class_=f"o-{name}",
                )
            )
        below += counts[name]
    text = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    tip = f"{window.start_s:g} to {window.start_s + window_s:g} s: {window.offered} offered: {text or 'none'}"
    return tag("g", tag("title", tip), *parts, data_tip=tip)


def outcome_legend(reports: Sequence[Report], run: int) -> Markup:
    r = reports[run]
    counts = (r.met, r.completed - r.met, r.refused, r.failed, r.cancelled)
    items = [
        tag("span", tag("i", class_=f"key o-{name}"), f"{text} ", tag("b", count(number)), class_="item")
        for (name, text), number in zip(OUTCOMES, counts, strict=True)
        if number
    ]
    return tag("div", *items, class_=f"legend {run_class(run)}")


def latency_breakdown_chart(latency_breakdown: LatencyStages, *, as_share: bool, longest_s: float) -> Markup:
    """One row per band of TTFT, in seconds or in shares of the row's own time."""
    height = 30 + _ROW * len(latency_breakdown.bands) + 40
    width = WIDE / 2
    span = Axis(0, 1, 96, width - 14) if as_share else snug(longest_s, 96, width - 14)
    plane = ChartFrame(span, Axis(0, 1, height - 42, 24), width, height)
    rows = [
        _latency_breakdown_row(plane, latency_breakdown, i, as_share=as_share)
        for i in range(len(latency_breakdown.bands))
    ]
    return plane.svg(
        plane.grid(
            x_label="share of the time to the second token" if as_share else "seconds to the second token",
            y_label="TTFT about",
            x_text=(lambda v: f"{v:.0%}") if as_share else tick_seconds,
            y_text=str,
            y_ticks=(),
        ),
        *rows,
        title="Where the time to the first and second token went",
    )


def _latency_breakdown_row(
    plane: ChartFrame, latency_breakdown: LatencyStages, row: int, *, as_share: bool
) -> Markup:
    band = latency_breakdown.bands[row]
    top = 30 + _ROW * row
    whole = sum(band.stages.values()) or 1.0
    parts = [tag("text", f"{band.name} {seconds(band.ttft_s)}", x=90, y=top + 15, class_="tick end")]
    at = 0.0
    for stage, took_s in band.stages.items():
        if stage == AFTER_FIRST_TOKEN[0]:
            x = plane.x.px(at / whole if as_share else at)
            parts.append(tag("line", x1=x, x2=x, y1=top - 3, y2=top + 25, class_="first-token"))
        scaled = (at / whole, (at + took_s) / whole) if as_share else (at, at + took_s)
        left, right = plane.x.px(scaled[0]), plane.x.px(scaled[1])
        tip = f"{band.name}: {STAGE_NAMES[stage]} {seconds(took_s)}, {share(took_s / whole)}"
        if right - left > 0.2:
            box = tag("rect", x=left, y=top, width=right - left, height=22, class_=f"s-{stage}")
            parts.append(tag("g", tag("title", tip), box, data_tip=tip))
        at += took_s
    return joined(parts)


def stage_legend(latency_breakdowns: Sequence[LatencyStages]) -> Markup:
    """The stages that take at least one part in 500 of some row."""
    seen = [
        stage
        for stage in STAGE_NAMES
        if any(b.stages[stage] > 0.002 * sum(b.stages.values()) for w in latency_breakdowns for b in w.bands)
    ]
    items = [
        tag("span", tag("i", class_=f"key s-{stage}"), STAGE_NAMES[stage], class_="item") for stage in seen
    ]
    items.append(tag("span", tag("i", class_="key first-token-key"), "first token", class_="item"))
    return tag("div", *items, class_="legend")


def balance_chart(workers: Sequence[WorkerWork], run: int, *, kind: str, most: int) -> Markup:
    """The load of each worker, where `kind` is `prompt` or `output`. A few workers are shown by name, many
    as a profile sorted by load."""
    served = [w for w in workers if (w.prefill_requests if kind == "prompt" else w.decode_requests)]
    loads = {w.name: w.prompt_tokens if kind == "prompt" else w.output_tokens for w in served}
    requests = {w.name: w.prefill_requests if kind == "prompt" else w.decode_requests for w in served}
    title = "Prompt tokens by prefill worker" if kind == "prompt" else "Output tokens by decode worker"
    if len(served) > WORKERS_NAMED_MAX:
        return _profile(sorted(loads.values(), reverse=True), run, title=title, most=most)
    height = 28 + 24 * len(served) + 40
    width = WIDE / 2
    plane = ChartFrame(linear(most, _BAR_LEFT, width - 70), Axis(0, 1, height - 42, 24), width, height)
    parts: list[Markup] = []
    for row, (name, tokens) in enumerate(loads.items()):
        top = 28 + 24 * row
        left, right = plane.x.px(0), plane.x.px(tokens)
        tip = f"{name}: {count(tokens)} tokens of {requests[name]} requests"
        bar = tag("rect", x=left, y=top, width=max(1.0, right - left), height=17, class_="bar")
        parts.append(tag("g", tag("title", tip), bar, data_tip=tip))
        parts.append(tag("text", _short(name), x=_BAR_LEFT - 6, y=top + 13, class_="tick end"))
        parts.append(tag("text", count(tokens), x=right + 5, y=top + 13, class_="tick"))
    return _with_mean(plane, parts, list(loads.values()), run, title=title)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:10]}…{name[-12:]}"


def _with_mean(
    plane: ChartFrame, parts: Sequence[Markup], loads: Sequence[int], run: int, *, title: str
) -> Markup:
    mean = sum(loads) / len(loads) if loads else 0.0
    x = plane.x.px(mean)
    rule = tag("line", x1=x, x2=x, y1=plane.y.start_px, y2=24, class_="rule")
    return plane.svg(
        plane.grid(
            x_label=f"tokens; dashed: mean {count(mean)}",
            y_label=title,
            x_text=_thousands,
            y_text=str,
            y_ticks=(),
        ),
        tag("g", *parts, class_=run_class(run)),
        tag("g", rule, class_="target"),
        title=title,
    )


def _thousands(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def _profile(loads: Sequence[int], run: int, *, title: str, most: int) -> Markup:
    width, height = WIDE / 2, 230.0
    plane = ChartFrame(linear(len(loads), 58, width - 14), linear(most, height - 42, 24), width, height)
    points = [(plane.x.px(i + 0.5), plane.y.px(load)) for i, load in enumerate(loads)]
    mean = sum(loads) / len(loads)
    y = plane.y.px(mean)
    return plane.svg(
        plane.grid(x_label="workers, most loaded first", y_label=title, x_text=count, y_text=_thousands),
        tag("g", polyline(points, "line"), class_=run_class(run)),
        tag(
            "g",
            tag("line", x1=plane.x.start_px, x2=plane.x.end_px, y1=y, y2=y, class_="rule"),
            tag("text", f"mean {count(mean)}", x=plane.x.end_px, y=y - 4, class_="rule-text end"),
            class_="target",
        ),
        title=title,
    )


def letter(run: int) -> str:
    return LETTERS[run % len(LETTERS)]
