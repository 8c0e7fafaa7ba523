"""Prometheus rules: recorded series and alerts. Pure.

Objectives are watched as the SRE workbook proposes (chapter 5, "multiwindow, multi-burn-rate alerts"): a long
window says that much of the error budget is going, a short one that it still does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from baton.telemetry import catalogue as cat
from baton.telemetry.promql import Promql

OBJECTIVE = 0.95
"""Part of the requests that should meet their objectives. The chart replaces it."""

BUDGET = f"(1 - {OBJECTIVE:g})"
"""The error budget as it stands in the rules' text, where nothing else looks like it."""

OBJECTIVE_MIN = 0.94
"""Lowest objective for which the fastest watched burn (14.4 times the budget) is at most all requests."""

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")

NOT_PROMISED = "cancelled|refused_quota"
"""Outcomes that count against nobody: requests that clients ended, and those beyond a tenant's own limits."""

RUNBOOK = "docs/operations.md"

Severity = Literal["page", "ticket"]


@dataclass(frozen=True, slots=True)
class Burn:
    """A rate of `factor` times the one that uses up the budget in 30 days, over both windows."""

    factor: float
    long: str
    short: str
    severity: Severity
    hold: str


BURNS = (
    Burn(14.4, "1h", "5m", "page", "2m"),
    Burn(6, "6h", "30m", "page", "15m"),
    Burn(3, "1d", "2h", "ticket", "1h"),
    Burn(1, "3d", "6h", "ticket", "3h"),
)


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expression: str
    hold: str
    """Time for which the expression must hold before the alert fires."""
    severity: Severity
    summary: str
    """One line, with {{ $labels.… }} and {{ $value }} of Prometheus."""
    window: str = ""
    """Window that tells alerts of one name apart."""

    @property
    def anchor(self) -> str:
        """Link to the alert's part of the runbook."""
        return f"{RUNBOOK}#{self.name.lower()}"


def recorded(window: str) -> str:
    return f"baton:slo_bad:ratio_rate{window}"


def _records() -> Iterator[tuple[str, str]]:
    """Yield (name, expression): the part of requests that missed, by model and class. Nothing is recorded for
    a class while all its requests meet their objectives."""
    q = Promql()
    by = ("namespace", "model", "slo_class")
    for window in WINDOWS:
        bad = q.rate(cat.SLO_REQUESTS, window, *by, outcome=f"!~met|{NOT_PROMISED}")
        offered = q.rate(cat.SLO_REQUESTS, window, *by, outcome=f"!~{NOT_PROMISED}")
        yield recorded(window), f"{bad} / {offered}"


def _burn_alerts() -> Iterator[Alert]:
    for burn in BURNS:
        threshold = f"{burn.factor:g} * {BUDGET}"
        name = "BatonSloBurnFast" if burn.severity == "page" else "BatonSloBurnSlow"
        yield Alert(
            name,
            f"{recorded(burn.long)} > {threshold} and {recorded(burn.short)} > {threshold}",
            burn.hold,
            burn.severity,
            f"Class {{{{ $labels.slo_class }}}} of {{{{ $labels.model }}}}: "
            f"{{{{ $value | humanizePercentage }}}} of requests missed their objectives in {burn.long}, "
            f"{burn.factor:g} times what the budget allows",
            window=burn.long,
        )


def _capacity() -> Iterator[Alert]:
    q = Promql()
    yield Alert(
        "BatonNoRouter",
        f"absent({q.of(cat.QUEUED)})",
        "2m",
        "page",
        "No router is scraped: the service is down, or nobody sees it",
    )
    yield Alert(
        "BatonPoolDegraded",
        f"{q.gauge(cat.DEGRADED, 'max', 'namespace', 'model', 'pool')} == 1",
        "2m",
        "page",
        "There is no {{ $labels.pool }} worker of {{ $labels.model }}: the other pool serves, or nobody does",
    )
    refused = q.rate(cat.REQUESTS, "5m", "namespace", "model", outcome="refused")
    offered = q.rate(cat.REQUESTS, "5m", "namespace", "model", outcome="!=invalid")
    yield Alert(
        "BatonRefusing",
        f"{refused} / {offered} > 0.05",
        "10m",
        "page",
        "{{ $value | humanizePercentage }} of requests for {{ $labels.model }} are refused",
    )
    failed = q.rate(cat.REQUESTS, "5m", "namespace", "model", outcome="failed")
    yield Alert(
        "BatonFailing",
        f"{failed} / {offered} > 0.01",
        "5m",
        "page",
        "{{ $value | humanizePercentage }} of requests for {{ $labels.model }} fail",
    )
    yield Alert(
        "BatonReplicasRestarting",
        f"{q.increase(cat.RESTARTS, '15m', 'namespace', 'replica')} > 3",
        "0m",
        "ticket",
        "{{ $labels.replica }} was started anew {{ $value | humanize }} times in 15 minutes",
    )
    yield Alert(
        "BatonReplicasMissing",
        f"{q.gauge(cat.REPLICAS, 'sum', 'namespace', 'model', 'role', state='=~waiting|starting')} > 0",
        "15m",
        "ticket",
        "{{ $value }} {{ $labels.role }} replicas of {{ $labels.model }} do not start",
    )


def _leaks() -> Iterator[Alert]:
    q = Promql()
    worker = ("namespace", "worker")
    idle = " and ".join(
        f"{q.gauge(metric, 'max', *worker)} == 0" for metric in (cat.RUNNING, cat.WAITING, cat.LEASED)
    )
    yield Alert(
        "BatonBlocksLeaking",
        f"{q.gauge(cat.HELD_BLOCKS, 'max', *worker)} > 0 and {idle}",
        "10m",
        "ticket",
        "{{ $labels.worker }} is idle and holds {{ $value }} blocks",
    )
    yield Alert(
        "BatonBlocksQuarantined",
        f"{q.gauge(cat.QUARANTINED_BLOCKS, 'max', *worker)} > 0",
        "10m",
        "ticket",
        "{{ $value }} blocks of {{ $labels.worker }} wait for a read that was given up",
    )
    held = f"min_over_time({q.of(cat.LEASED)}[10m])"
    reads = q.rate(cat.TRANSFER_READS, "10m", "namespace", outcome="ok")
    yield Alert(
        "BatonLeasesLeaking",
        f"{q.total(cat.LEASED, held, worker, how='max')} > 0 unless on (namespace) ({reads} > 0)",
        "5m",
        "ticket",
        "{{ $labels.worker }} keeps KV of {{ $value }} sequences that nobody reads",
    )
    yield Alert(
        "BatonLeasesExpiring",
        f"{q.increase(cat.LEASES_EXPIRED, '10m', *worker)} > 5",
        "5m",
        "ticket",
        "{{ $value | humanize }} leases of {{ $labels.worker }} ended unread in 10 minutes",
    )


def _trust() -> Iterator[Alert]:
    q = Promql()
    yield Alert(
        "BatonEventStreamStalled",
        f"{q.gauge(cat.STALE, 'max', 'namespace', 'worker')} > 0",
        "1m",
        "page",
        "A router hears nothing new of {{ $labels.worker }}",
    )
    yield Alert(
        "BatonPredictorOff",
        f"{q.gauge(cat.PREDICTOR_FALLBACK, 'max', 'namespace', 'model')} == 1",
        "10m",
        "ticket",
        "Predictions for {{ $labels.model }} are too far off: placement is by cached prefix",
    )
    yield Alert(
        "BatonBreakerOpen",
        f"{q.gauge(cat.BREAKER_OPEN, 'max', 'namespace', 'worker')} > 0",
        "5m",
        "ticket",
        "{{ $labels.worker }} keeps failing and gets no new sequences",
    )
    yield Alert(
        "BatonRetriesRefused",
        f"{q.increase(cat.REFUSED_RETRIES, '5m', 'namespace')} > 0",
        "5m",
        "page",
        "More attempts fail than may be made again",
    )
    corrupt = q.increase(cat.TRANSFER_READS, "1h", "namespace", "worker", outcome="corrupt")
    yield Alert(
        "BatonTransferCorrupt",
        f"{corrupt} > 0",
        "0m",
        "page",
        "{{ $labels.worker }} read blocks that differ from their checksums",
    )


def _store() -> Iterator[Alert]:
    q = Promql()
    yield Alert(
        "BatonStoreAway",
        f"{q.gauge(cat.STORE_JOINED, 'max', 'namespace', 'worker')} == 0 and on (namespace) "
        f"{q.gauge(cat.STORE_LIMIT_BYTES, 'max', 'namespace')} > 0",
        "5m",
        "ticket",
        "{{ $labels.worker }} has no session with its host's store node",
    )
    yield Alert(
        "BatonStoreCorrupt",
        f"{q.increase(cat.STORE_CORRUPT, '1h', 'namespace', 'instance', 'tier')} > 0",
        "0m",
        "ticket",
        "{{ $labels.instance }}: blocks of tier {{ $labels.tier }} differ from their checksums",
    )
    yield Alert(
        "BatonStoreDiskFailing",
        f"{q.increase(cat.STORE_IO_ERRORS, '15m', 'namespace', 'instance', 'kind')} > 0",
        "5m",
        "ticket",
        "{{ $labels.instance }}: operations on the SSD fail ({{ $labels.kind }})",
    )
    yield Alert(
        "BatonDirectoryFull",
        f"{q.increase(cat.DIRECTORY_DROPPED, '15m', 'namespace')} > 0",
        "15m",
        "ticket",
        "The control plane's directory drops entries for want of room",
    )


def _expert_ranks() -> Iterator[Alert]:
    q = Promql()
    group = ("namespace", "group")
    yield Alert(
        "BatonExpertsMissing",
        f"{q.gauge(cat.MISSING_EXPERTS, 'max', *group)} > 0",
        "1m",
        "page",
        "No rank of {{ $labels.group }} holds {{ $value }} experts: sequences that need them wait",
    )
    yield Alert(
        "BatonWorkersParked",
        f"{q.gauge(cat.PARKED, 'max', 'namespace', 'worker')} > 0",
        "1m",
        "page",
        "{{ $labels.worker }} has been parked for a minute: no expert rank has what its sequences need",
    )
    ready = q.gauge(cat.EXPERT_RANKS, "sum", *group, phase="ready")
    yield Alert(
        "BatonExpertRanksMissing",
        f"{q.gauge(cat.EXPERT_WANTED_RANKS, 'max', *group)} - {ready} > 0",
        "15m",
        "ticket",
        "{{ $labels.group }} has been {{ $value }} expert ranks short for a quarter of an hour",
    )
    yield Alert(
        "BatonExpertRanksLost",
        f"{q.increase(cat.EXPERT_RANK_LOSSES, '1h', *group)} > 3",
        "0m",
        "ticket",
        "{{ $labels.group }} lost {{ $value | humanize }} expert ranks in an hour",
    )
    yield Alert(
        "BatonExpertsUneven",
        f"{q.gauge(cat.EXPERT_RANK_BALANCE, 'min', *group, layers='mean')} < 0.5",
        "30m",
        "ticket",
        "The busiest rank of {{ $labels.group }} has had more than twice the mean load for half an hour",
    )


def alerts() -> tuple[Alert, ...]:
    """Return all alerts in the order of the runbook. Burn rates share a name by severity."""
    return (*_burn_alerts(), *_capacity(), *_leaks(), *_trust(), *_store(), *_expert_ranks())


def rules() -> dict[str, Any]:
    """Return the content of a Prometheus rule file, which is also the spec of a PrometheusRule."""
    records = [{"record": name, "expr": expression} for name, expression in _records()]
    return {
        "groups": [
            {"name": "baton-slo", "interval": "30s", "rules": records},
            {"name": "baton-alerts", "rules": [_rule(alert) for alert in alerts()]},
        ]
    }


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.hold,
        "labels": {"severity": alert.severity, **({"window": alert.window} if alert.window else {})},
        "annotations": {"summary": alert.summary, "runbook": alert.anchor},
    }
