"""Groups of expert ranks over time: their series, charts, and the rates of ranks. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from baton.core.experts import ExpertGroupState
from baton.core.ids import ExpertRankId
from baton.telemetry import catalogue as c
from baton.telemetry.metric import Metric
from control_plane.dashboard import charts
from control_plane.dashboard.derive import Series, gained, rate
from control_plane.dashboard.samples import Labels, MetricsFrame, Table
from control_plane.expert_metrics import BALANCES, group_gauges, group_totals
from control_plane.expert_summary import ready_count

RATES_S = 10.0
"""Time over which rows per second are counted."""

READY: tuple[tuple[str, str], ...] = (("phase", "ready"),)

BALANCE_KEYS = [("mean of layers", "c-blue", "line"), ("worst layer", "c-orange", "line")]
RANK_KEYS = [("ready", "c-green", "line"), ("wanted", "c-grey", "line")]
EVENT_KEYS = [("placements", "c-blue", "line"), ("ranks lost", "c-red", "line")]
MIGRATION_KEYS = [("migrated", "c-purple", "area")]


def group_table(groups: Iterable[ExpertGroupState]) -> Table:
    """Return the groups' series as a scrape of the control plane would have them, without those of single
    ranks, which are too many to keep for hours."""
    table: Table = {}

    def put(metric: Metric, value: float, *labels: tuple[str, str]) -> None:
        table.setdefault(metric.name, {})[tuple(sorted(labels))] = value

    for group in groups:
        name = ("group", group.group)
        for metric, value in (group_gauges(group) | group_totals(group)).items():
            put(metric, value, name)
        put(c.EXPERT_RANKS, float(ready_count(group)), name, *READY)
        for layers, balance in zip(BALANCES, (group.balance, group.balance_worst), strict=True):
            put(c.EXPERT_RANK_BALANCE, balance, name, ("layers", layers))
    return table


class RankRate(msgspec.Struct, frozen=True):
    rows_per_s: float
    busy: float
    """Part of the time that it spent computing."""


class ExpertRankRates:
    """How fast each rank computes, from the totals that it reported in the last seconds."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[ExpertRankId, tuple[float, float]]]] = deque()

    def add(self, at_s: float, groups: Iterable[ExpertGroupState]) -> None:
        """Add the present totals. `at_s` must not fall."""
        ranks = {r.rank_id: (float(r.rows), r.busy_s) for group in groups for r in group.ranks}
        while len(self._looks) > 1 and self._looks[1][0] <= at_s - RATES_S:
            self._looks.popleft()
        if not self._looks or self._looks[-1][0] < at_s:
            self._looks.append((at_s, ranks))

    def rates(self) -> dict[ExpertRankId, RankRate]:
        """Return the rates of the ranks that were there at two times."""
        if len(self._looks) < 2:
            return {}
        now_s, now = self._looks[-1]
        found: dict[ExpertRankId, RankRate] = {}
        for at_s, ranks in self._looks:  # the oldest look that has the rank counts
            for rank_id in ranks.keys() & now.keys() - found.keys():
                if span_s := now_s - at_s:
                    rows, busy_s = (b - a for a, b in zip(ranks[rank_id], now[rank_id], strict=True))
                    found[rank_id] = RankRate(max(0.0, rows / span_s), min(1.0, max(0.0, busy_s / span_s)))
        return found


def group_charts(
    times: Sequence[float], points: Sequence[MetricsFrame | None], group: str
) -> dict[str, charts.Options]:
    """Return the charts of one group."""
    name = ("group", group)

    def gauge(metric: Metric, *labels: tuple[str, str], whole: bool = False) -> Series:
        values = [_only(point, metric, tuple(sorted((name, *labels)))) for point in points]
        return [None if value is None else float(round(value)) for value in values] if whole else values

    def events(metric: Metric) -> Series:
        return [None if point is None else gained(point, metric.name, group=group) for point in points]

    balances = [gauge(c.EXPERT_RANK_BALANCE, ("layers", layers)) for layers in BALANCES]
    counts = (
        gauge(c.EXPERT_RANKS, *READY, whole=True),
        gauge(c.EXPERT_WANTED_RANKS, whole=True),
    )
    happened = events(c.EXPERT_REBALANCES), events(c.EXPERT_RANK_LOSSES)
    migrated = [rate(point, c.EXPERT_MIGRATED_BYTES.name, group=group) for point in points]
    return {
        "balance": charts.timeline(times, _lines(BALANCE_KEYS, balances), unit="share", most=1.0),
        "ranks": charts.timeline(times, _lines(RANK_KEYS, counts, is_step=True), unit="count"),
        "events": charts.timeline(times, _lines(EVENT_KEYS, happened, is_step=True), unit="count"),
        "migrations": charts.timeline(
            times,
            [charts.ChartLine("migrated", migrated, "c-purple", is_area=True)],
            unit="bytes_rate",
        ),
    }


def _lines(
    keys: Iterable[tuple[str, str, str]], values: Iterable[Series], *, is_step: bool = False
) -> list[charts.ChartLine]:
    return [
        charts.ChartLine(name, series, color, is_step=is_step)
        for (name, color, _), series in zip(keys, values, strict=True)
    ]


def _only(point: MetricsFrame | None, metric: Metric, labels: Labels) -> float | None:
    return None if point is None else point.levels.get(metric.name, {}).get(labels)
