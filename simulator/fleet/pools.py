"""The pools of a run: work that was for nothing, and whether the pools swing against each other."""

from collections.abc import Mapping, Sequence

import numpy as np

from loadgen.html.marks import Markup, joined, tag
from loadgen.report import Report
from simulator.fleet.fleet import Fleet, PoolSample

SMOOTH_SAMPLES = 10
LAG_SAMPLES_MAX = 30
PLOT_WIDTH, PLOT_HEIGHT, LEFT = 900, 260, 44


def wasted_share(report: Report, fleet: Fleet) -> float:
    """Return the part of all computed prompt tokens that went to requests that were refused, failed or too
    late."""
    objectives = report.settings.objectives
    stats = fleet.stats
    lost = sum(stats.computed_tokens(i) for i, record in enumerate(stats) if not objectives.is_met(record))
    return (lost + fleet.prompt_tokens_lost) / max(1, fleet.prompt_tokens_computed)


def anti_phase(samples: Sequence[PoolSample]) -> float:
    """Return the lowest correlation of the prefill pool's busy share with the decode pool's, over shifts of
    up to half a minute.

    Rejection by the decode pool's present load swings (Mooncake, section 7.3): prompts admitted while decode
    is idle fill it when they arrive, later ones are refused, and prefill idles. Then one load runs against
    the other, and the correlation is near -1. Loads that rise and fall together, or do not move, give no such
    correlation.
    """
    prefill = _smooth([sample.prefill_busy for sample in samples])
    decode = _smooth([sample.decode_share for sample in samples])
    if len(prefill) < 4 * SMOOTH_SAMPLES or prefill.std() < 1e-3 or decode.std() < 1e-3:
        return 0.0
    lags = range(min(LAG_SAMPLES_MAX, len(prefill) // 4))
    return float(min(np.corrcoef(prefill[: len(prefill) - lag], decode[lag:])[0, 1] for lag in lags))


def _smooth(values: Sequence[float]) -> np.ndarray:
    if len(values) < SMOOTH_SAMPLES:
        return np.array(values)
    return np.convolve(values, np.ones(SMOOTH_SAMPLES) / SMOOTH_SAMPLES, mode="valid")


def pool_chart(samples: Sequence[PoolSample], title: str = "", *, y: int = 0) -> Markup:
    """Draw both pools' loads over time as an SVG: the share of the prefill workers that compute, and of the
    decode workers' blocks that are held. `y` is where it lies in another one, in pixels."""
    end_s = max((sample.at_s for sample in samples), default=1.0)
    curves = (
        ("prefill pool: computing", "#1f6feb", _smooth([sample.prefill_busy for sample in samples])),
        ("decode pool: blocks held", "#d1242f", _smooth([sample.decode_share for sample in samples])),
    )
    parts = [
        tag("rect", x=0, y=0, width=PLOT_WIDTH, height=PLOT_HEIGHT, fill="white"),
        *(_level(share) for share in (0.0, 0.5, 1.0)),
    ]
    for number, (name, colour, values) in enumerate(curves):
        count = max(1, len(values) - 1)
        points = " ".join(
            f"{LEFT + (PLOT_WIDTH - LEFT - 10) * i / count:.1f},{_height(float(value)):.1f}"
            for i, value in enumerate(values)
        )
        parts.append(tag("polyline", points=points, fill="none", stroke=colour, stroke_width=1.5))
        parts.append(tag("text", name, x=LEFT + 10 + 220 * number, y=16, fill=colour, font_size=12))
    seconds = f"0 to {end_s:.0f} s, means of {SMOOTH_SAMPLES} samples"
    parts.append(tag("text", seconds, x=LEFT, y=PLOT_HEIGHT - 6, font_size=11))
    parts.append(tag("text", title, x=PLOT_WIDTH - 10, y=16, text_anchor="end", font_size=12))
    return _drawing(parts, PLOT_HEIGHT, y=y)


def pool_charts(samples: Mapping[str, Sequence[PoolSample]]) -> Markup:
    """Draw charts one below the other, by their titles."""
    charts = [
        pool_chart(of_one, f"{title}: {anti_phase(of_one):+.2f}", y=PLOT_HEIGHT * number)
        for number, (title, of_one) in enumerate(samples.items())
    ]
    return _drawing(charts, PLOT_HEIGHT * len(charts))


def _drawing(parts: Sequence[Markup], height: int, *, y: int = 0) -> Markup:
    return tag(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {PLOT_WIDTH} {height}",
        width=PLOT_WIDTH,
        height=height,
        y=y,
        font_family="sans-serif",
    )


def _height(share: float) -> float:
    return PLOT_HEIGHT - 26 - (PLOT_HEIGHT - 56) * min(1.0, share)


def _level(share: float) -> Markup:
    y = _height(share)
    line = tag("line", x1=LEFT, y1=y, x2=PLOT_WIDTH - 10, y2=y, stroke="#ccc")
    return joined([line, tag("text", f"{share:.0%}", x=4, y=y + 4, font_size=11)])
