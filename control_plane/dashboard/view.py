"""The data that all open pages share, computed once for all of them, and only while a page is open."""

import time
from collections.abc import Callable, Sequence

import msgspec

from baton.config import Config
from baton.core.ids import replica_name
from baton.core.operate import ReplicaStatus
from baton.telemetry import catalogue as c
from control_plane.dashboard import charts, overview
from control_plane.dashboard.checks import Check, checks
from control_plane.dashboard.collector import ClusterCollector
from control_plane.dashboard.derive import (
    AttainmentRow,
    Outcomes,
    attainment,
    buckets_of,
    gained,
    level,
    outcomes,
    quantile,
    share_of,
)
from control_plane.dashboard.expert_groups import group_charts
from control_plane.dashboard.experts import ExpertGroup, ExpertRow, expert_groups
from control_plane.dashboard.history import WINDOWS, TimeWindow
from control_plane.dashboard.problems import Trouble, troubles
from control_plane.dashboard.samples import MetricsFrame
from control_plane.dashboard.sessions import SessionStore
from control_plane.dashboard.text import clock
from control_plane.dashboard.worker_charts import fleet_charts, shown_workers, worker_charts

RECENT_S = 60.0
"""Time that the tiles cover."""

PAST_S = 5.0
"""Longest age of sums over hours before they are computed again."""


class WindowView(msgspec.Struct, frozen=True):
    """The content for one time window, as of its last whole step."""

    charts: dict[str, charts.Options]
    attainment: list[AttainmentRow]
    latency_breakdown: list[overview.Bar]
    tiers: list[overview.TierUsage]


class DashboardModel:
    def __init__(
        self, collector: ClusterCollector, sessions: SessionStore, *, unix_s: Callable[[], float] = time.time
    ) -> None:
        self.collector, self.sessions = collector, sessions
        self.config: Config = collector.config
        self._unix_s = unix_s
        self._views: dict[str, tuple[int, WindowView]] = {}
        self._nows: dict[str, tuple[MetricsFrame | None, overview.TileValues]] = {}
        self._pasts: dict[str, tuple[int, MetricsFrame | None]] = {}
        self.attain = self.config.autoscale.attain

    def looked_at(self, window: TimeWindow) -> str:
        """Return the time that the figures of the window cover, in words."""
        begins_s = self.collector.history.rings[window.key].begins_s(self._unix_s())
        return f"last {window.text}" if begins_s is None else f"since {clock(begins_s)}"

    def step(self, window: TimeWindow) -> int:
        """Return a number that changes whenever there is something new to draw."""
        state = self.collector.state
        decisions = state.decisions if state else ()
        return hash((int(self._unix_s() // window.step_s), decisions[-1].number if decisions else 0))

    def view(self, window: TimeWindow) -> WindowView:
        step = self.step(window)
        known = self._views.get(window.key)
        if known is None or known[0] != step:
            known = self._views[window.key] = (step, self._view(window))
        return known[1]

    def _view(self, window: TimeWindow) -> WindowView:
        now_s, history, config = self._unix_s(), self.collector.history, self.config
        ring = history.rings[window.key]
        times, points = ring.times(now_s), ring.points(now_s)
        past = self._past(window)
        state = self.collector.state
        decisions = state.decisions if state else ()
        ttft, tpot = overview.objectives(config, "ttft_s"), overview.objectives(config, "tpot_s")
        return WindowView(
            charts={
                "load": overview.load_chart(times, points),
                "ttft": overview.latency_chart(times, points, c.TTFT, ttft),
                "tpot": overview.latency_chart(times, points, c.TPOT, tpot),
                "replicas": overview.replica_chart(times, points, decisions),
                "queues": overview.queue_chart(times, points),
                "transfer": overview.transfer_chart(times, points),
                "tokens": overview.token_chart(times, points),
                "hits": overview.hit_chart(times, points),
            },
            attainment=attainment(past),
            latency_breakdown=overview.latency_breakdown(past),
            tiers=overview.tiers(history.latest, past),
        )

    def worker_charts(self, window: TimeWindow, worker_id: str) -> dict[str, charts.Options]:
        now_s, ring = self._unix_s(), self.collector.history.rings[window.key]
        return worker_charts(ring.times(now_s), ring.points(now_s), worker_id)

    def fleet_charts(
        self, window: TimeWindow
    ) -> tuple[dict[str, charts.Options], list[tuple[str, str, str]]]:
        """Return the charts of all workers with the legend that they share."""
        now_s, ring = self._unix_s(), self.collector.history.rings[window.key]
        state = self.collector.state
        shown = shown_workers(state.replicas if state else ())
        drawn = fleet_charts(ring.times(now_s), ring.points(now_s), shown)
        return drawn, [(name, color, "line") for name, _, color in shown]

    def _past(self, window: TimeWindow) -> MetricsFrame | None:
        """Sum the whole window, as of a few seconds ago."""
        step, known = int(self._unix_s() // min(window.step_s, PAST_S)), self._pasts.get(window.key)
        if known is None or known[0] != step:
            ring = self.collector.history.rings[window.key]
            known = self._pasts[window.key] = (step, ring.since(self._unix_s() - window.length_s))
        return known[1]

    def now(self, window: TimeWindow) -> overview.TileValues:
        latest, known = self.collector.history.latest, self._nows.get(window.key)
        if known is None or known[0] is not latest:
            known = self._nows[window.key] = (latest, self._now(window))
        return known[1]

    def _now(self, window: TimeWindow) -> overview.TileValues:
        history, now_s = self.collector.history, self._unix_s()
        recent = history.rings[WINDOWS[0].key].since(now_s - RECENT_S)
        past = self._past(window)
        latest = history.latest
        counted = outcomes(recent.gained.get(c.SLO_REQUESTS.name)) if recent else Outcomes()
        span_s = recent.span_s if recent else 1.0
        ttft, tpot = buckets_of(recent, c.TTFT.name), buckets_of(recent, c.TPOT.name)
        serving, wanted = overview.counts(self.collector.state)
        return overview.TileValues(
            rates=counted.scaled(1 / span_s),
            attained=outcomes(past.gained.get(c.SLO_REQUESTS.name)).attained if past else None,
            ttft_p50_s=quantile(ttft, 0.5),
            ttft_p99_s=quantile(ttft, 0.99),
            tpot_p50_s=quantile(tpot, 0.5),
            tpot_p99_s=quantile(tpot, 0.99),
            queued=level(latest, c.QUEUED.name),
            waiting=level(latest, c.WAITING.name),
            running=level(latest, c.RUNNING.name),
            hit_share=share_of(gained(past, c.CACHED_TOKENS.name), gained(past, c.PROMPT_TOKENS.name)),
            serving=serving,
            wanted=wanted,
        )

    def group_charts(self, window: TimeWindow, group: str) -> dict[str, charts.Options]:
        """Return the charts of a group of expert ranks."""
        now_s, ring = self._unix_s(), self.collector.history.rings[window.key]
        return group_charts(ring.times(now_s), ring.points(now_s), group)

    def experts(self) -> list[ExpertGroup]:
        """Return the expert groups. Empty: no served model has experts, or they are not counted."""
        collector = self.collector
        return expert_groups(collector.state, collector.experts.tokens(), collector.history.latest)

    def worker_experts(self, replica: ReplicaStatus) -> ExpertRow | None:
        """Return one worker's experts. None: its model has none, or they are not counted."""
        name = replica_name(replica.worker_id) if replica.worker_id else ""
        rows = (row for group in self.experts() for row in group.workers)
        return next((row for row in rows if row.name == name), None)

    def checks(self) -> list[Check]:
        """Return the checks over everything that is remembered."""
        past = self._past(WINDOWS[-1])
        latest: MetricsFrame | None = self.collector.history.latest
        if past is not None and latest is not None:
            past = MetricsFrame(past.at_s, past.span_s, past.gained, latest.levels)
        return checks(self.config, self.collector.state, past)

    def troubles(self) -> list[Trouble]:
        collector = self.collector
        unreadable = [key for key, seen in collector.seen.items() if seen.trouble]
        control = (collector.trouble or "silent") if collector.is_lost else ""
        return troubles(
            collector.state,
            collector.history.latest,
            control=control,
            silent_s=collector.silent_s,
            unreadable=unreadable,
        )

    def strictest(self, what: str) -> float | None:
        found: Sequence[charts.ObjectiveLine] = overview.objectives(self.config, what)
        return min((objective.value for objective in found), default=None)
