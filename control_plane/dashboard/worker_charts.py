"""Charts of one worker, and of several side by side. Pure."""

from collections.abc import Iterable, Sequence

from baton.core.ids import WorkerId, replica_name
from baton.core.operate import ReplicaStatus
from baton.telemetry import catalogue as c
from control_plane.dashboard import charts, tables
from control_plane.dashboard.derive import quantiles_over_time
from control_plane.dashboard.samples import MetricsFrame

COLORS = ("c-blue", "c-orange", "c-green", "c-purple", "c-sky", "c-red", "c-yellow", "c-ink")
"""Colours of as many lines as can be told apart."""


def shown_workers(replicas: Iterable[ReplicaStatus]) -> list[tuple[str, str, str]]:
    """Return name, process and colour of the workers that are drawn, which are the first ones."""
    there = [(r.name, r.worker_id) for r in replicas if r.worker_id]
    return [(name, worker_id, color) for (name, worker_id), color in zip(there, COLORS, strict=False)]


def fleet_charts(
    times: Sequence[float], points: Sequence[MetricsFrame | None], shown: Sequence[tuple[str, str, str]]
) -> dict[str, charts.Options]:
    running: list[charts.ChartLine] = []
    steps: list[charts.ChartLine] = []
    blocks: list[charts.ChartLine] = []
    for name, worker_id, color in shown:
        running.append(
            charts.ChartLine(name, [tables.of_worker(p, c.RUNNING.name, worker_id) for p in points], color)
        )
        own = [_only(point, c.STEP.name, worker_id) for point in points]
        steps.append(charts.ChartLine(name, quantiles_over_time(times, own, c.STEP.name, (0.99,))[0], color))
        blocks.append(charts.ChartLine(name, [tables.held_share(p, worker_id) for p in points], color))
    return {
        "running": charts.timeline(times, running, unit="count"),
        "steps": charts.timeline(times, steps, unit="seconds"),
        "blocks": charts.timeline(times, blocks, unit="share", most=1.0),
    }


def worker_charts(
    times: Sequence[float], points: Sequence[MetricsFrame | None], worker_id: str
) -> dict[str, charts.Options]:
    """Return the charts of one life of a worker."""

    def gauge(name: str) -> list[float | None]:
        return [tables.of_worker(point, name, worker_id) for point in points]

    own = [_only(point, c.STEP.name, worker_id) for point in points]
    p50, p99 = quantiles_over_time(times, own, c.STEP.name, (0.5, 0.99))
    held = [tables.held_share(point, worker_id) for point in points]
    return {
        "sequences": charts.timeline(
            times,
            [
                charts.ChartLine("running", gauge(c.RUNNING.name), "c-blue"),
                charts.ChartLine("waiting", gauge(c.WAITING.name), "c-orange"),
            ],
            unit="count",
        ),
        "steps": charts.timeline(
            times,
            [charts.ChartLine("p50", p50, "c-sky"), charts.ChartLine("p99", p99, "c-purple")],
            unit="seconds",
        ),
        "blocks": charts.timeline(
            times, [charts.ChartLine("held", held, "c-blue", is_area=True)], unit="share", most=1.0
        ),
    }


def _only(point: MetricsFrame | None, name: str, worker_id: str) -> MetricsFrame | None:
    if point is None:
        return None
    label = ("worker", replica_name(WorkerId(worker_id)))
    mine = {
        f"{name}_bucket": {
            labels: value
            for labels, value in point.gained.get(f"{name}_bucket", {}).items()
            if label in labels
        }
    }
    return MetricsFrame(point.at_s, point.span_s, mine, {})
