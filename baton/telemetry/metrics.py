"""The catalogue's metrics, counted in this process and rendered for Prometheus."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from baton.telemetry.catalogue import CATALOGUE
from baton.telemetry.metric import Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST

disable_created_metrics()  # a second series per counter that nobody asks for

Collector = Counter | Gauge | Histogram


class Meter:
    """One process's metrics. Labels are given by name and must be exactly those declared."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._collectors: dict[str, Collector] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Collector] = {}

    def inc(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        child = self._child(metric, labels)
        assert isinstance(child, Counter)
        child.inc(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        child = self._child(metric, labels)
        assert isinstance(child, Gauge)
        child.set(value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        child = self._child(metric, labels)
        assert isinstance(child, Histogram)
        child.observe(value)

    def forget(self, metric: Metric, **labels: str) -> None:
        """Stop exporting one labelled series (a worker that is gone)."""
        values = tuple(labels[name] for name in metric.labels)
        if self._children.pop((metric.name, values), None) is not None:
            self._collectors[metric.name].remove(*values)

    def value(self, metric: Metric, **labels: str) -> float:
        """Return a counter or gauge, 0 if it was never touched. Tests and `baton doctor` read it."""
        found = self._registry.get_sample_value(metric.name, labels)
        return found or 0.0

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _child(self, metric: Metric, labels: dict[str, str]) -> Collector:
        values = tuple(labels.values())
        child = self._children.get((metric.name, values))
        if child is None:
            assert tuple(labels) == metric.labels, f"{metric.name} has labels {metric.labels}"
            collector = self._collector(metric)
            child = collector.labels(*values) if values else collector
            self._children[metric.name, values] = child
        return child

    def _collector(self, metric: Metric) -> Collector:
        if metric.name not in self._collectors:
            assert metric in CATALOGUE, f"{metric.name} is not in the catalogue"
            self._collectors[metric.name] = _create(metric, self._registry)
        return self._collectors[metric.name]


def _create(metric: Metric, registry: CollectorRegistry) -> Collector:
    match metric.kind:
        case "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=registry)
        case "gauge":
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)
        case "histogram":
            return Histogram(
                metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry
            )
