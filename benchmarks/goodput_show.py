"""The tables of `baton bench goodput`."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.goodput_result import ATTAIN, Curve, Facts, Point, Ratio
from loadgen.slo import Slo


class GoodputSummary(msgspec.Struct, frozen=True):
    objectives: dict[str, Slo]
    about: dict[str, str]
    """A description of each variant."""
    plans: dict[str, Facts]
    """Facts of the offered plans, by trace and rate."""
    curves: list[Curve]
    ratios: list[Ratio]


def show(console: Console, summary: GoodputSummary) -> None:
    for name, text in summary.about.items():
        console.print(f"[bold]{escape(name)}[/] {escape(text)}")
    for trace in dict.fromkeys(c.trace for c in summary.curves):
        for name, slo in summary.objectives.items():
            curves = [c for c in summary.curves if (c.trace, c.objectives) == (trace, name)]
            if curves:
                console.print(_table(trace, f"{name}: {slo}", curves))
    if summary.ratios:
        console.print(_ratio_table(summary.ratios))
    for name, facts in summary.plans.items():
        console.print(
            f"{escape(name)}: " + escape(", ".join(f"{k} {v}" for k, v in facts.items())), soft_wrap=True
        )


def _table(trace: str, title: str, curves: Sequence[Curve]) -> Table:
    rates = sorted({p.rate for c in curves for p in c.points})
    table = Table(
        title=f"{trace}, {title}: share of offered requests that met both, median (lowest to highest) of the "
        "rounds; below it p90 TTFT s / p90 TPOT ms",
        title_justify="left",
    )
    table.add_column("")
    for rate in rates:
        table.add_column(f"{rate:g}/s", justify="right")
    table.add_column(f"goodput/s at {ATTAIN:.0%}", justify="right")
    table.add_column("highest met/s", justify="right")
    for curve in curves:
        by_rate = {p.rate: p for p in curve.points}
        cells = [_cell(by_rate.get(rate)) for rate in rates]
        table.add_row(curve.variant, *cells, str(curve.goodput), f"{curve.met_per_s_max:.2f}")
    return table


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    spread = ""
    if point.rounds > 1:
        spread = f" ({point.attained_low * 100:.0f} to {point.attained_high * 100:.0f})"
    lost = "".join(
        f" {share:.0%} {what}"
        for what, share in (("refused", point.refused), ("failed", point.failed))
        if share
    )
    times = f"{_number(point.ttft_p90_s, 1)} / {_number(point.tpot_p90_s, 1000)}"
    return f"{point.attained:.0%}{spread}{lost}\n{times}"


def _number(seconds: float | None, factor: float) -> str:
    return "-" if seconds is None else f"{seconds * factor:.{2 if factor == 1 else 0}f}"


def _ratio_table(ratios: Sequence[Ratio]) -> Table:
    table = Table(title="Baton's goodput divided by the best peer's", title_justify="left")
    for column in ("trace", "objectives", "", "goodput/s", "best peer", "goodput/s", "ratio"):
        table.add_column(column)
    for r in ratios:
        ratio = "-" if r.ratio is None else f"{r.ratio:.2f}"
        table.add_row(
            r.trace, r.objectives, r.variant, str(r.goodput), r.best_peer, str(r.peer_goodput), ratio
        )
    return table
