"""PromQL built from the catalogue: a metric or a label that does not exist cannot be named. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.telemetry.metric import Metric

SCRAPED_LABELS = frozenset({"namespace", "job", "instance", "pod"})
"""Labels that the scraper adds. Kubernetes adds `namespace`; elsewhere it is missing."""

_OPERATORS = ("!=", "=~", "!~", "=")


@dataclass(frozen=True, slots=True)
class Promql:
    """Builder of PromQL expressions. `scope` is a matcher that every series gets, such as
    namespace=~"$namespace"; empty: none."""

    scope: str = ""

    def of(self, metric: Metric, *, part: str = "", **labels: str) -> str:
        """Return one metric's series. `part` is _bucket, _sum or _count of a histogram. A label's value may
        begin with !=, =~ or !~; otherwise it must be equal."""
        assert bool(part) == (metric.kind == "histogram"), f"{metric.name}: part {part!r}"
        matchers = [self.scope] if self.scope else []
        for name, value in labels.items():
            _check_label(metric, name)
            operator = next((o for o in _OPERATORS if value.startswith(o)), "")
            matchers.append(f'{name}{operator or "="}"{value.removeprefix(operator)}"')
        return f"{metric.name}{part}" + (f"{{{','.join(matchers)}}}" if matchers else "")

    def rate(self, metric: Metric, window: str, *by: str, part: str = "", **labels: str) -> str:
        """Return the rate per second, summed `by` these labels."""
        return self.total(metric, f"rate({self.of(metric, part=part, **labels)}[{window}])", by)

    def increase(self, metric: Metric, window: str, *by: str, **labels: str) -> str:
        """Return the increase within `window`, summed `by` these labels."""
        return self.total(metric, f"increase({self.of(metric, **labels)}[{window}])", by)

    def gauge(self, metric: Metric, how: str, *by: str, **labels: str) -> str:
        """Return a gauge, combined by `how` (sum, max, min or avg) over the series that agree in `by`."""
        return self.total(metric, self.of(metric, **labels), by, how=how)

    def quantile(self, metric: Metric, q: float, window: str, *by: str, **labels: str) -> str:
        """Return a quantile of a histogram."""
        within = self.rate(metric, window, "le", *by, part="_bucket", **labels)
        return f"histogram_quantile({q:g}, {within})"

    def mean(self, metric: Metric, window: str, *by: str, **labels: str) -> str:
        """Return the mean of a histogram."""
        total = self.rate(metric, window, *by, part="_sum", **labels)
        return f"{total} / {self.rate(metric, window, *by, part='_count', **labels)}"

    @staticmethod
    def total(metric: Metric, expression: str, by: Sequence[str], *, how: str = "sum") -> str:
        for name in by:
            _check_label(metric, name)
        return f"{how} by ({', '.join(by)}) ({expression})" if by else f"{how}({expression})"


def _check_label(metric: Metric, name: str) -> None:
    known = {*metric.labels, *SCRAPED_LABELS, *(("le",) if metric.kind == "histogram" else ())}
    assert name in known, f"{metric.name} has no label {name}"
