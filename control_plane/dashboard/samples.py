"""Parsing of a process's /metrics page, and the changes between two scrapes. Pure."""

import math
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry import catalogue as c

Labels = tuple[tuple[str, str], ...]
"""Labels sorted by name."""

Table = dict[str, dict[Labels, float]]
"""Values by the name on the metrics page (`…_bucket`, `…_sum`, `…_total`), then by labels."""

KNOWN_MAX = 200_000
"""Number of series whose parsed text is cached, some 400 bytes each; with more, all are parsed at every
scrape. A worker has a few hundred, and one more for each expert of its model."""

TEXT_BYTES_MAX = 8 * 2**20

APART = frozenset({c.EXPERT_TOKENS.name})
"""Metrics that frames leave out, because they are too many to keep for hours."""

COUNTED = ("_total", "_bucket", "_sum", "_count")
"""Suffixes of names of counters."""


class MetricsReader:
    """A reader of the text format of Prometheus. The text of a series is parsed the first time and looked up
    from then on, which keeps reading many processes each second cheap."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names` are those of the wanted metrics, as in the catalogue; others are skipped."""
        self._names = frozenset(names)
        self._known: dict[str, tuple[str, Labels] | None] = {}

    def read(self, text: str) -> Table:
        """Parse a metrics page. Lines that are not values of wanted metrics are skipped."""
        table: Table = {}
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if not head or line[0] == "#":
                continue
            series = self._series(head)
            if series is not None:
                try:
                    number = float(value)
                except ValueError:
                    continue
                if math.isfinite(number):  # NaN or infinity would spoil every sum that it is part of
                    table.setdefault(series[0], {})[series[1]] = number
        return table

    def _series(self, head: str) -> tuple[str, Labels] | None:
        try:
            return self._known[head]
        except KeyError:
            pass
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        found = self._known[head] = self._parsed(head)
        return found

    def _parsed(self, head: str) -> tuple[str, Labels] | None:
        try:
            (family,) = text_string_to_metric_families(f"{head} 0\n")
            (sample,) = family.samples
        except (ValueError, KeyError, IndexError, TypeError):  # the parser trusts the text in places
            return None
        stem = sample.name
        for end in ("_bucket", "_sum", "_count"):
            stem = stem.removesuffix(end)
        if sample.name not in self._names and stem not in self._names:
            return None
        return sample.name, tuple(sorted(sample.labels.items()))


class MetricsFrame(msgspec.Struct):
    """The changes of all metrics over a span of time, and their levels in it."""

    at_s: float
    """Unix time of its end."""
    span_s: float
    gained: Table
    """Increases of counters."""
    levels: Table
    """Gauges: the mean over the span."""


def is_counted(name: str) -> bool:
    return name.endswith(COUNTED)


def frame_of(
    at_s: float,
    span_s: float,
    looks: Iterable[tuple[Table | None, Table]],
    levels: Mapping[str, Mapping[Labels, float]] | None = None,
) -> MetricsFrame:
    """Build a frame. `looks` has the previous and the present scrape of each process; without a previous one
    its counters are left out. A counter that fell began anew. `levels` adds gauges of our own."""
    gained: Table = {}
    gauges: Table = {}
    for before, now in looks:
        for name, values in now.items():
            if name in APART:
                continue
            if is_counted(name):
                if before is not None:
                    _gain(gained.setdefault(name, {}), before.get(name, {}), values)
            else:
                _level(gauges.setdefault(name, {}), values, by_most=name.endswith("_ratio"))
    for name, values in (levels or {}).items():
        gauges[name] = dict(values)
    return MetricsFrame(at_s, span_s, gained, gauges)


def risen(before: float, now: float) -> float:
    """Return the increase of a counter; one that fell began anew."""
    return now if now < before else now - before


def _gain(into: dict[Labels, float], before: Mapping[Labels, float], now: Mapping[Labels, float]) -> None:
    for labels, value in now.items():
        rise = risen(before.get(labels, 0.0), value)
        if rise:
            into[labels] = into.get(labels, 0.0) + rise


def _level(into: dict[Labels, float], values: Mapping[Labels, float], *, by_most: bool) -> None:
    """Merge a gauge of several processes: values add up, except ratios, whose largest counts."""
    for labels, value in values.items():
        if labels not in into:
            into[labels] = value
        else:
            into[labels] = max(into[labels], value) if by_most else into[labels] + value


def merged(first: MetricsFrame, second: MetricsFrame) -> MetricsFrame:
    """Merge two consecutive frames."""
    span_s = first.span_s + second.span_s
    gained = {name: dict(values) for name, values in first.gained.items()}
    for name, values in second.gained.items():
        mine = gained.setdefault(name, {})
        for labels, value in values.items():
            mine[labels] = mine.get(labels, 0.0) + value
    share = second.span_s / span_s if span_s else 1.0
    levels: Table = {}
    for name, values in second.levels.items():  # gauges missing from the second frame are gone
        before = first.levels.get(name, {})
        levels[name] = {
            labels: value * share + before.get(labels, value) * (1 - share)
            for labels, value in values.items()
        }
    return MetricsFrame(second.at_s, span_s, gained, levels)


def summed(frames: Iterable[MetricsFrame]) -> MetricsFrame | None:
    """Sum the increases of frames in order; levels are those of the last one. None: there are no frames."""
    gained: Table = {}
    span_s, last = 0.0, None
    for frame in frames:
        span_s, last = span_s + frame.span_s, frame
        for name, values in frame.gained.items():
            mine = gained.setdefault(name, {})
            for labels, value in values.items():
                mine[labels] = mine.get(labels, 0.0) + value
    return None if last is None else MetricsFrame(last.at_s, span_s, gained, last.levels)


def total(values: Mapping[Labels, float] | None, **labels: str) -> float:
    """Sum the values that have these labels."""
    if not values:
        return 0.0
    if not labels:
        return sum(values.values())
    wanted = set(labels.items())
    return sum(value for key, value in values.items() if wanted <= set(key))


def by_label(values: Mapping[Labels, float] | None, label: str) -> dict[str, float]:
    """Sum values by one label; those without it are left out."""
    sums: dict[str, float] = {}
    for labels, value in (values or {}).items():
        for name, text in labels:
            if name == label:
                sums[text] = sums.get(text, 0.0) + value
    return sums
