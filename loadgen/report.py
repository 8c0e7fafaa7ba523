"""Figures of a replay, from its records. Pure; `loadgen.show` draws them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from loadgen.records import Outcome, Record


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds; None asks nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met(self, record: Record) -> bool:
        """Completed, and in time. A request with less than two tokens has no TPOT and meets any."""
        if record.outcome is not Outcome.COMPLETED:
            return False
        if self.ttft_s is not None and (record.ttft_s is None or record.ttft_s > self.ttft_s):
            return False
        return self.tpot_s is None or record.tpot_s is None or record.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a sample, seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for, as the report repeats it."""

    trace: str
    trace_format: str
    url: str
    api: str
    model: str
    length_scale: str
    output_scale: str
    time_scale: str
    spread_ticks: bool
    seed: int
    inputs_cut: int
    outputs_cut: int
    planned: int
    slo: Slo
    expected_hit_ratio: float | None
    """None: the server's tokens are not ours, so nothing can be expected."""
    server_block_tokens: int
    server_cache_blocks: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """offered = completed + refused + failed. Latencies: completed requests, from the planned instant."""

    settings: Settings
    offered: int
    completed: int
    refused: int
    failed: int
    errors: dict[str, int]
    """By kind, refusals included."""
    duration_s: float
    """From the first planned instant to the last end."""
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    """Between two events with text; a server that sends several tokens in one event shows fewer."""
    e2e: Percentiles | None
    lateness: Percentiles | None
    """Of this program's own sending; latencies include it."""
    requests_per_s: float
    """Completed."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    goodput_share: float
    """Requests that met the targets, of all offered: a refused or failed one missed them."""
    goodput_per_s: float
    cache_hit_ratio: float | None
    """Cached by all prompt tokens, over requests where the server says; None: it never does."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def percentiles(sample: Iterable[float | None]) -> Percentiles | None:
    """None for an empty sample; None entries are left out."""
    values = np.array([v for v in sample if v is not None], dtype=np.float64)
    if not values.size:
        return None
    p50, p90, p99 = (float(q) for q in np.percentile(values, (50, 90, 99)))
    return Percentiles(int(values.size), float(values.mean()), p50, p90, p99, float(values.max()))


def make_report(records: Sequence[Record], settings: Settings) -> Report:
    """Every record must have an outcome."""
    outcomes = Counter(r.outcome for r in records)
    assert sum(outcomes[o] for o in Outcome) == len(records), "a request without an outcome"
    done = [r for r in records if r.outcome is Outcome.COMPLETED]
    duration_s = _duration_s(records)
    met = sum(settings.slo.is_met(r) for r in records)
    return Report(
        settings=settings,
        offered=len(records),
        completed=outcomes[Outcome.COMPLETED],
        refused=outcomes[Outcome.REFUSED],
        failed=outcomes[Outcome.FAILED],
        errors=dict(Counter(str(r.error) for r in records if r.error is not None)),
        duration_s=duration_s,
        ttft=percentiles(r.ttft_s for r in done),
        tpot=percentiles(r.tpot_s for r in done),
        itl=percentiles(gap for r in done for gap in _gaps(r.token_instants_s)),
        e2e=percentiles(r.e2e_s for r in done),
        lateness=percentiles(r.lateness_s for r in records),
        requests_per_s=_rate(len(done), duration_s),
        prompt_tokens_per_s=_rate(sum(r.prompt_tokens or 0 for r in done), duration_s),
        output_tokens_per_s=_rate(sum(r.tokens_out for r in done), duration_s),
        goodput_share=met / len(records) if records else 0.0,
        goodput_per_s=_rate(met, duration_s),
        cache_hit_ratio=_cache_hit_ratio(done),
    )


def _duration_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    return max(r.ended_s or r.planned_s for r in records) - min(r.planned_s for r in records)


def _gaps(instants_s: list[float]) -> Iterable[float]:
    return (b - a for a, b in pairwise(instants_s))


def _rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _cache_hit_ratio(done: Sequence[Record]) -> float | None:
    told = [r for r in done if r.cached_tokens is not None and r.prompt_tokens]
    asked = sum(r.prompt_tokens or 0 for r in told)
    return sum(r.cached_tokens or 0 for r in told) / asked if asked else None
