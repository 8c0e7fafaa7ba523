"""The type of a metric. `catalogue` lists them all."""

from dataclasses import dataclass
from typing import Literal

Unit = Literal[
    "seconds",
    "bytes",
    "tokens",
    "blocks",
    "ratio",
    "requests",
    "sequences",
    "steps",
    "workers",
    "ranks",
    "experts",
    "replicas",
    "rows",
    "pairs",
    "routers",
    "nodes",
    "sessions",
    "events",
    "epoch",
]
Kind = Literal["counter", "gauge", "histogram"]

LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
SHORT_BUCKETS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = LATENCY_BUCKETS
