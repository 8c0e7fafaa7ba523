"""Elements of HTML and SVG as text, and axes. All text from outside is escaped here."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *children: "Markup | str | float | int | None", **attributes: object) -> Markup:
    """An element. `class_` becomes `class`, `data_tip` becomes `data-tip`, and attributes that are None are
    left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(
        child if isinstance(child, Markup) else escape(_text(child), quote=False)
        for child in children
        if child is not None
    )
    return Markup(f"<{name}{written}>{inner}</{name}>")


def joined(parts: Sequence[Markup]) -> Markup:
    return Markup("".join(parts))


def _text(value: object) -> str:
    # A tenth of a pixel is precise enough and keeps the page small.
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float
    is_log: bool = False

    def px(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start_px + (self.end_px - self.start_px) * ((at - low) / (high - low))

    def ticks(self, wanted: int = 5) -> list[float]:
        return _log_ticks(self.low, self.high) if self.is_log else _linear_ticks(self.low, self.high, wanted)


def linear(high: float, start_px: float, end_px: float) -> Axis:
    """An axis from 0 to a round value at or above `high`."""
    step = _nice_step((high or 1.0) / 4)
    return Axis(0.0, step * max(1, math.ceil((high or 1.0) / step - 1e-9)), start_px, end_px)


def snug(high: float, start_px: float, end_px: float) -> Axis:
    """An axis from 0 to exactly `high`, for the horizontal direction."""
    return Axis(0.0, high or 1.0, start_px, end_px)


def logarithmic(values: Sequence[float], start_px: float, end_px: float) -> Axis:
    """A logarithmic axis around all positive values, with some room."""
    positive = [v for v in values if 0 < v < math.inf] or [1.0]
    low, high = min(positive) / 1.15, max(positive) * 1.15
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    return Axis(low, high, start_px, end_px, is_log=True)


def _linear_ticks(low: float, high: float, wanted: int) -> list[float]:
    step = _nice_step((high - low) / max(1, wanted - 1))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _nice_step(step: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(step))
    return next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= step * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    digits = (1, 2, 5) if decades <= 3 else (1,)
    every = max(1, math.ceil(decades / 6))
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [d * 10.0**e for e in range(first, last + 1, every) for d in digits]
    return [t for t in ticks if low <= t <= high]


@dataclass(frozen=True, slots=True)
class ChartFrame:
    """The plane of a chart, with its axes and labels."""

    x: Axis
    y: Axis
    width: float
    height: float

    def grid(
        self,
        *,
        x_label: str,
        y_label: str,
        x_text: Callable[[float], str],
        y_text: Callable[[float], str],
        y_ticks: Sequence[float] | None = None,
    ) -> Markup:
        bottom, left, right = self.y.start_px, self.x.start_px, self.x.end_px
        parts: list[Markup] = []
        for value in self.y.ticks() if y_ticks is None else y_ticks:
            at = self.y.px(value)
            parts.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
            parts.append(tag("text", y_text(value), x=left - 6, y=at + 4, class_="tick end"))
        for value in self.x.ticks(10 if self.width > 800 else 5):
            at = self.x.px(value)
            parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
            parts.append(tag("text", x_text(value), x=at, y=bottom + 17, class_="tick middle"))
        parts.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
        parts.append(tag("text", x_label, x=right, y=bottom + 33, class_="label end"))
        parts.append(tag("text", y_label, x=4, y=13, class_="label"))
        return joined(parts)

    def svg(self, *parts: Markup, title: str, series: str | None = None) -> Markup:
        """An SVG element. The page's script reads `series` to show values under the pointer."""
        return tag(
            "svg",
            *parts,
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            role="img",
            aria_label=title,
            data_series=series,
        )


def polyline(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)
