"""Charts as options of ECharts. Pure.

Colours are CSS variables of dashboard.css, so that a chart changes from light to dark with the page.
Colour-blind readers can tell them apart (Okabe and Ito, "Color Universal Design", 2008).
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from control_plane.dashboard.derive import Series
from control_plane.dashboard.text import h

Options = dict[str, Any]

AXIS_MARGIN_PX = {"left": 8, "right": 20, "top": 12, "bottom": 4}


class ChartLine(msgspec.Struct, frozen=True):
    name: str
    values: Series
    color: str
    """Name of a colour in dashboard.css, without the dashes."""
    is_area: bool = False
    stack: str = ""
    dash: str = "solid"
    is_step: bool = False


class ObjectiveLine(msgspec.Struct, frozen=True):
    """A horizontal line at an objective."""

    name: str
    value: float


class Mark(msgspec.Struct, frozen=True):
    """An instant marked on the time axis."""

    at_s: float
    text: str
    color: str


TICKS_MAX = 8
"""Most ticks of a logarithmic axis; with more, only powers of ten are labelled."""

FORMATS = {
    "seconds": (
        "v => v == null ? '–' : v < 0.9995 ? +(v * 1000).toPrecision(3) + ' ms' : +v.toPrecision(3) + ' s'"
    ),
    "rate": (
        "v => v == null ? '–' : v < 1000 ? +v.toPrecision(3) + '/s' : +(v / 1000).toPrecision(3) + ' k/s'"
    ),
    "count": "v => v == null ? '–' : +v.toPrecision(3) + ''",
    "share": "v => v == null ? '–' : +(v * 100).toPrecision(3) + ' %'",
    "bytes_rate": (
        "v => { if (v == null) return '–'; const u = ['B', 'kB', 'MB', 'GB', 'TB']; let i = 0; "
        "while (v >= 1000 && i < 4) { v /= 1000; i += 1; } return +v.toPrecision(3) + ' ' + u[i] + '/s'; }"
    ),
}
"""Number formats in JavaScript, by unit."""


def timeline(
    times: Sequence[float],
    lines: Sequence[ChartLine],
    *,
    unit: str,
    objectives: Sequence[ObjectiveLine] = (),
    marks: Sequence[Mark] = (),
    most: float | None = None,
) -> Options:
    """Return a chart of lines over time. `most` ends the axis; None ends it where the data ends, objectives
    included."""
    series = [_series(times, line) for line in lines]
    if objectives and series:
        series[0]["markLine"] = _objectives(objectives)
    if marks:
        series.append(_marks(times, marks))
    axis: Options = {
        "type": "value",
        "min": 0,
        ":max": f"v => Math.max(v.max * 1.08, {max((o.value * 1.12 for o in objectives), default=0.0)}) || 1",
        "splitNumber": 3,
        "axisLabel": {
            ":formatter": FORMATS[unit],
            "color": "var(--dim)",
            "fontSize": 11,
            "showMaxLabel": False,
        },
        "splitLine": {"lineStyle": {"color": "var(--grid)"}, "showMaxLine": False},
    }
    if unit == "count":
        axis["minInterval"] = 1
    if unit == "seconds":
        _make_log(axis, [*(o.value for o in objectives), *(v for line in lines for v in line.values if v)])
    if most is not None:
        axis.pop(":max")
        axis |= {"max": most, "interval": most / 4}
        axis["axisLabel"]["showMaxLabel"] = True
    return {
        "animation": False,
        "grid": {**AXIS_MARGIN_PX, "containLabel": True},
        "textStyle": {"fontFamily": "inherit", "fontSize": 11},
        "tooltip": _tooltip(unit),
        "xAxis": _time_axis(times),
        "yAxis": axis,
        "series": series,
    }


def _make_log(axis: Options, values: Sequence[float]) -> None:
    """Make the axis logarithmic, since latencies of all percentiles and classes differ by orders of
    magnitude."""
    found = [value for value in values if value > 0] or [0.01, 1.0]
    low, high = _rounded(min(found) * 0.9, up=False), _rounded(max(found) * 1.1, up=True)
    if high / low < 8:
        low = _rounded(high / 8, up=False)
    axis.pop(":max")
    axis |= {"type": "log", "logBase": 10, "min": low, "max": high}
    ticks = [low]
    while ticks[-1] < high * 0.999:
        ticks.append(_rounded(ticks[-1] * 1.5, up=True))
    if len(ticks) > TICKS_MAX:
        ticks = [tick for tick in ticks if f"{tick:e}"[0] == "1"]
    for part in ("axisLabel", "axisTick"):
        axis[part] = {**axis.get(part, {}), "customValues": ticks}
    axis["axisTick"]["show"] = False
    axis["axisLabel"]["showMaxLabel"] = True


def _rounded(value: float, *, up: bool) -> float:
    """Round to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    steps = [1.0, 2.0, 5.0, 10.0]
    found = (
        next(s for s in steps if s * power >= value * 0.999999)
        if up
        else max(s for s in steps if s * power <= value * 1.000001)
    )
    return float(f"{found * power:.6g}")


def _time_axis(times: Sequence[float]) -> Options:
    return {
        "type": "time",
        "min": round(times[0] * 1000),
        "max": round(times[-1] * 1000),
        "splitNumber": 4,
        "axisLabel": {
            "color": "var(--dim)",
            "fontSize": 11,
            "hideOverlap": True,
            ":formatter": "v => new Date(v).toTimeString().slice(0, 5)",
        },
        "axisLine": {"lineStyle": {"color": "var(--line)"}},
        "axisTick": {"show": False},
        "splitLine": {"show": False},
    }


def _tooltip(unit: str) -> Options:
    return {
        "trigger": "axis",
        "confine": True,
        "transitionDuration": 0,
        "backgroundColor": "var(--panel)",
        "borderColor": "var(--line)",
        "textStyle": {"color": "var(--ink)", "fontSize": 12},
        "axisPointer": {
            "lineStyle": {"color": "var(--dim)"},
            "label": {"show": False},
        },
        ":valueFormatter": FORMATS[unit],
    }


def _series(times: Sequence[float], line: ChartLine) -> Options:
    color = f"var(--{line.color})"
    series: Options = {
        "type": "line",
        "name": line.name,
        "showSymbol": False,
        "emphasis": {"disabled": True},
        "itemStyle": {"color": color},
        "lineStyle": {"color": color, "width": 0 if line.stack else 1.8, "type": line.dash},
        "data": [
            [round(at_s * 1000), None if value is None else float(f"{value:.4g}")]
            for at_s, value in zip(times, line.values, strict=True)
        ],
    }
    if line.is_area or line.stack:
        series["areaStyle"] = {"color": color, "opacity": 0.85 if line.stack else 0.18}
    if line.stack:
        series["stack"] = line.stack
    if line.is_step:
        series["step"] = "end"
    return series


def _objectives(objectives: Sequence[ObjectiveLine]) -> Options:
    return {
        "silent": True,
        "symbol": "none",
        "precision": 9,  # digits of the line's position; the default of 2 draws 25 ms as 30 ms
        "lineStyle": {"color": "var(--objective)", "type": "dashed", "width": 1.5},
        "label": {
            "position": "insideEndTop",
            "color": "var(--objective)",
            "backgroundColor": "var(--panel)",
            "padding": [1, 3],
            "fontSize": 11,
            "formatter": "{b}",
        },
        "data": [{"name": o.name, "yAxis": o.value} for o in objectives],
    }


def _marks(times: Sequence[float], marks: Sequence[Mark]) -> Options:
    """Return a series of its own for decisions, which are no numbers."""
    shown = sorted((mark for mark in marks if times[0] <= mark.at_s <= times[-1]), key=lambda mark: mark.at_s)
    labels = mark_labels(shown, apart_s=(times[-1] - times[0]) * LABEL_SHARE)
    return {
        "type": "line",
        "name": "decisions",
        "data": [],
        "tooltip": {"show": False},
        "markLine": {
            "silent": True,
            "symbol": ["none", "none"],
            "label": {
                "position": "end",
                "fontSize": 10,
                "formatter": "{b}",
                "color": "var(--dim)",
                "distance": 2,
            },
            "data": [
                {
                    "name": h(label),
                    "xAxis": round(mark.at_s * 1000),
                    "label": {"show": bool(label)},
                    "lineStyle": {"color": f"var(--{mark.color})", "type": "dotted", "width": 1.2},
                }
                for mark, label in zip(shown, labels, strict=True)
            ],
        },
    }


LABEL_SHARE = 0.09
"""Part of a chart's width within which two labels would overlap."""


def mark_labels(marks: Sequence[Mark], *, apart_s: float) -> list[str]:
    """Return the label above each mark, oldest first. Marks that are too close share one label, `#3–5`, above
    the first of them."""
    labels: list[str] = []
    heads: list[int] = []
    for index, mark in enumerate(marks):
        if heads and mark.at_s - marks[heads[-1]].at_s < apart_s:
            labels[heads[-1]] = f"{marks[heads[-1]].text}–{mark.text.removeprefix('#')}"
            labels.append("")
        else:
            heads.append(index)
            labels.append(mark.text)
    return labels
