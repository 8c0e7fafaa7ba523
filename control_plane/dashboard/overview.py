"""The content of the overview page, from the history. Pure: no browser, no clock."""

from collections.abc import Mapping, Sequence

import msgspec

from baton.config import Config
from baton.core.messages import Role
from baton.core.operate import ClusterState, Decision, Outcome, ReplicaState
from baton.core.transfer_backends import BACKENDS
from baton.telemetry import catalogue as c
from baton.telemetry.metric import Metric
from control_plane.dashboard import charts
from control_plane.dashboard.derive import (
    PARTS,
    Outcomes,
    Series,
    gained,
    level,
    outcome_rates,
    part_means,
    quantiles_over_time,
    rate,
    share_of,
)
from control_plane.dashboard.samples import MetricsFrame, by_label, total

PERCENTILES = (0.5, 0.9, 0.99)
PERCENTILE_COLORS = ("c-sky", "c-blue", "c-purple")
ROLE_COLORS = {Role.PREFILL: "c-blue", Role.DECODE: "c-green", Role.AGGREGATED: "c-purple"}
OUTCOME_COLORS = {"met": "c-green", "missed": "c-yellow", "refused": "c-red", "failed": "c-ink"}
MARKS_MAX = 30

Points = Sequence[MetricsFrame | None]


def objectives(config: Config, what: str) -> list[charts.ObjectiveLine]:
    """Return the objective lines for `what`, which is ttft_s or tpot_s. Classes with the same objective share
    one line."""
    names: dict[float, list[str]] = {}
    for name, slo in config.slo.classes.items():
        if value := getattr(slo, what):
            names.setdefault(value, []).append(name)
    return [charts.ObjectiveLine(", ".join(sorted(of)), value) for value, of in sorted(names.items())]


def load_chart(times: Sequence[float], points: Points) -> charts.Options:
    rates = [outcome_rates(point) for point in points]

    def line(name: str, attribute: str) -> charts.ChartLine:
        values: Series = [None if r is None else getattr(r, attribute) for r in rates]
        return charts.ChartLine(name, values, OUTCOME_COLORS[name], stack="offered")

    lines = [
        line("met", "met"),
        line("missed", "missed"),
        line("refused", "refused"),
        line("failed", "broken"),
    ]
    return charts.timeline(times, lines, unit="rate")


def latency_chart(
    times: Sequence[float], points: Points, metric: Metric, lines: Sequence[charts.ObjectiveLine]
) -> charts.Options:
    found = quantiles_over_time(times, points, metric.name, PERCENTILES)
    drawn = [
        charts.ChartLine(f"p{share * 100:g}", values, color)
        for share, values, color in zip(PERCENTILES, found, PERCENTILE_COLORS, strict=True)
    ]
    return charts.timeline(times, drawn, unit="seconds", objectives=lines)


def replica_chart(times: Sequence[float], points: Points, decisions: Sequence[Decision]) -> charts.Options:
    def serving(role: Role) -> Series:
        # Levels are means over a step, and the number of workers is whole.
        return [
            None
            if point is None or c.REPLICAS.name not in point.levels
            else float(round(total(point.levels[c.REPLICAS.name], role=role.value, state="running")))
            for point in points
        ]

    lines = [
        charts.ChartLine(role.value, values, color, is_step=True)
        for role, color in ROLE_COLORS.items()
        if any(values := serving(role))
    ]
    marks = [
        charts.Mark(d.at_s, f"#{d.number}", decision_color(d.who))
        for d in decisions
        if d.outcome not in (Outcome.REFUSED, Outcome.ADVISED)
    ]
    return charts.timeline(times, lines, unit="count", marks=marks[-MARKS_MAX:])


def decision_color(who: str) -> str:
    return "c-red" if who.startswith("autoscaler") else "c-orange"


def queue_chart(times: Sequence[float], points: Points) -> charts.Options:
    lines = [
        charts.ChartLine("at routers", [level(p, c.QUEUED.name) for p in points], "c-red"),
        charts.ChartLine("at workers", [level(p, c.WAITING.name) for p in points], "c-orange"),
        charts.ChartLine("running", [level(p, c.RUNNING.name) for p in points], "c-blue"),
    ]
    return charts.timeline(times, lines, unit="count")


BACKEND_COLORS: dict[str, str] = dict(
    zip(BACKENDS, ("c-blue", "c-green", "c-purple", "c-orange", "c-red", "c-yellow"), strict=False)
)


def transfer_chart(times: Sequence[float], points: Points) -> charts.Options:
    found = {b for p in points if p for b in by_label(p.gained.get(c.TRANSFER_BYTES.name), "backend")}
    lines = [
        charts.ChartLine(
            backend,
            [rate(p, c.TRANSFER_BYTES.name, backend=backend) for p in points],
            color,
            is_area=True,
        )
        for backend, color in BACKEND_COLORS.items()
        if backend in found
    ]
    stored = [rate(p, c.STORE_LOADED_BYTES.name) for p in points]
    if any(stored):
        lines.append(charts.ChartLine("from the store", stored, "c-sky"))
    return charts.timeline(
        times, lines or [charts.ChartLine("none", [None] * len(times), "c-blue")], unit="bytes_rate"
    )


def hit_chart(times: Sequence[float], points: Points) -> charts.Options:
    lines = [
        charts.ChartLine(
            "prompt tokens from caches",
            [
                share_of(gained(p, c.CACHED_TOKENS.name), gained(p, c.PROMPT_TOKENS.name)) if p else None
                for p in points
            ],
            "c-green",
            is_area=True,
        )
    ]
    return charts.timeline(times, lines, unit="share", most=1.0)


TOKEN_COLORS = {"prompt": "c-blue", "from caches": "c-green", "generated": "c-orange"}


def token_chart(times: Sequence[float], points: Points) -> charts.Options:
    """Return the chart of tokens per second, over answered requests."""
    metrics = (c.PROMPT_TOKENS, c.CACHED_TOKENS, c.GENERATED_TOKENS)
    lines = [
        charts.ChartLine(name, [rate(p, metric.name) for p in points], color)
        for (name, color), metric in zip(TOKEN_COLORS.items(), metrics, strict=True)
    ]
    return charts.timeline(times, lines, unit="rate")


class Bar(msgspec.Struct, frozen=True):
    """A part of the latency breakdown, in seconds."""

    name: str
    begins_s: float
    length_s: float
    is_after: bool
    """True if the part follows the first token."""


def latency_breakdown(past: MetricsFrame | None) -> list[Bar]:
    """Return the latency breakdown of the mean request. Empty: no request reported one."""
    bars: list[Bar] = []
    at_s = 0.0
    for part, length_s in part_means(past).items():
        bars.append(Bar(part, at_s, length_s, is_after=PARTS.index(part) >= PARTS.index("transfer")))
        at_s += length_s
    return bars


class TierUsage(msgspec.Struct, frozen=True):
    """The use of one tier of KV memory."""

    name: str
    used_bytes: float | None
    limit_bytes: float | None
    note: str
    """Meaning of `used_bytes`."""
    hit_share: float | None
    """Share of the requested blocks or tokens that this tier had."""


def _by_worker(frame: MetricsFrame, metric: Metric) -> dict[str, float]:
    return by_label(frame.levels.get(metric.name), "worker")


def _bytes(blocks: Mapping[str, float], block_bytes: Mapping[str, float]) -> float:
    """Sum the bytes over all workers. Models differ in their blocks, and pools in their number."""
    return sum(count * block_bytes.get(worker, 0.0) for worker, count in blocks.items())


def tiers(now: MetricsFrame | None, past: MetricsFrame | None) -> list[TierUsage]:
    """Return the use of each tier. `now` is the latest frame, `past` the window."""
    if now is None:
        return []
    found: list[TierUsage] = []
    block_bytes = _by_worker(now, c.BLOCK_BYTES)
    held, free = (_bytes(_by_worker(now, m), block_bytes) for m in (c.HELD_BLOCKS, c.FREE_BLOCKS))
    if held + free > 0:
        hits = share_of(gained(past, c.PREFIX_HIT_TOKENS.name), gained(past, c.PROMPT_TOKENS.name))
        found.append(TierUsage("KV pools", held, held + free, "held by sequences", hits))
    asked = gained(past, c.STORE_MISSES.name) + gained(past, c.STORE_HITS.name)
    for tier, name in (("host", "host memory"), ("ssd", "SSD")):
        limit = level(now, c.STORE_LIMIT_BYTES.name, tier=tier)
        if limit:
            used = level(now, c.STORE_BYTES.name, tier=tier)
            hits = share_of(gained(past, c.STORE_HITS.name, tier=tier), asked)
            found.append(TierUsage(name, used, limit, "filled", hits))
    return found


class TileValues(msgspec.Struct, frozen=True):
    """The values of the tiles. Rates and percentiles cover the last minute, attainment the window."""

    rates: Outcomes
    attained: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    queued: float | None
    waiting: float | None
    running: float | None
    hit_share: float | None
    serving: int
    wanted: int


def counts(state: ClusterState | None) -> tuple[int, int]:
    """Return the number of replicas that serve, and of those that are wanted."""
    if state is None:
        return 0, 0
    serving = sum(r.state is ReplicaState.RUNNING for r in state.replicas)
    return serving, sum(pool.count(role) for pool in state.pools for role in Role)
