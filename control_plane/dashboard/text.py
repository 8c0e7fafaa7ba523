"""Numbers and times as people read them. Pure."""

import math
import time
from html import escape

NOTHING = "–"
"""Sign for a value that is not known."""


def h(text: object) -> str:
    """Escape a text for HTML, attributes included."""
    return escape(str(text), quote=True)


def number(value: float | None, *, digits: int = 3) -> str:
    """Format with this many significant digits, and no exponent."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}".replace(",", "\u202f")
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(places, 4)}f}".rstrip("0").rstrip(".") or "0"


def seconds(value: float | None, *, digits: int = 3) -> str:
    """Format a latency."""
    if value is None:
        return NOTHING
    if value < 0.9995:
        return f"{number(value * 1000, digits=digits)} ms"
    return f"{number(value, digits=digits)} s"


def share(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    percent = value * 100
    if 99 < percent < 100:
        return f"{math.floor(percent * 100) / 100:.2f} %"  # never rounded up to 100 %
    return f"{percent:.1f} %" if percent < 10 and percent else f"{percent:.0f} %"


def size(value: float | None) -> str:
    """Format bytes in binary multiples."""
    if value is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000 or unit == "TiB":
            return f"{number(value)} {unit}"
        value /= 1024
    raise AssertionError


def rate(value: float | None) -> str:
    return NOTHING if value is None else f"{number(value)}/s"


def span(value: float | None) -> str:
    """Format an approximate duration."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def clock(unix_s: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(unix_s))
    except (ValueError, OverflowError, OSError):  # a process sent what is no time
        return NOTHING


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
