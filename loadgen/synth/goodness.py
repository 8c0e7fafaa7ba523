"""Measures how alike a recorded trace and a synthetic one are. Pure.

A cache-aware router depends on how often prefixes return, and how soon. So the hit ratio of an LRU cache over
its size is compared, besides the distributions of gaps and lengths.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loadgen.expected_cache import block_hit_ratio
from loadgen.formats.base import Trace
from loadgen.synth.lineage import Kind, descents

HIT_RATIO_TOLERANCE = 0.03
"""Allowed difference between the curves at any size."""
KS_TOLERANCE = 0.05
CACHE_SHARES = (0.005, 0.02, 0.05, 0.15, 0.3, 0.6)
"""Sizes of the cache, as shares of the original's distinct blocks."""

_Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    original: float
    synthetic: float


@dataclass(frozen=True, slots=True)
class Distance:
    """The Kolmogorov-Smirnov distance: the largest difference between two distribution functions."""

    name: str
    ks: float


@dataclass(frozen=True, slots=True)
class HitRatio:
    capacity_blocks: int | None
    """None for a cache without bound."""
    original: float
    synthetic: float


@dataclass(frozen=True, slots=True)
class Goodness:
    figures: tuple[Figure, ...]
    distances: tuple[Distance, ...]
    hit_ratios: tuple[HitRatio, ...]
    """Hit ratios of the trace's own blocks in one LRU cache; empty if the trace has no prefixes."""
    hit_ratio_tolerance: float = HIT_RATIO_TOLERANCE
    ks_tolerance: float = KS_TOLERANCE

    @property
    def hit_ratio_gap(self) -> float:
        return max((abs(h.original - h.synthetic) for h in self.hit_ratios), default=0.0)

    @property
    def is_close(self) -> bool:
        worst = max(d.ks for d in self.distances)
        return self.hit_ratio_gap <= self.hit_ratio_tolerance and worst <= self.ks_tolerance

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "hit_ratio_gap": self.hit_ratio_gap, "is_close": self.is_close}


def compare(original: Trace, synthetic: Trace) -> Goodness:
    """Compare two traces of at least two requests each, whose arrivals are already spread inside ticks."""
    samples = [_samples(original), _samples(synthetic)]
    distances = tuple(Distance(name, ks_distance(samples[0][name], samples[1][name])) for name in samples[0])
    a, b = (_figures(trace, sample) for trace, sample in zip((original, synthetic), samples, strict=True))
    return Goodness(
        tuple(Figure(name, a.get(name, 0.0), b.get(name, 0.0)) for name in a | b),
        distances,
        _hit_ratios(original, synthetic),
    )


def ks_distance(a: _Floats, b: _Floats) -> float:
    """0 for the same distribution, 1 for distributions without overlap."""
    a, b = np.sort(a), np.sort(b)
    both = np.concatenate((a, b))
    below_a = np.searchsorted(a, both, side="right") / len(a)
    below_b = np.searchsorted(b, both, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def _samples(trace: Trace) -> dict[str, _Floats]:
    requests = trace.requests
    return {
        "gap between arrivals": np.diff(np.array([r.at_s for r in requests])),
        "input tokens": np.array([r.input_tokens for r in requests], dtype=np.float64),
        "output tokens": np.array([max(1, r.output_tokens) for r in requests], dtype=np.float64),
    }


def _figures(trace: Trace, samples: dict[str, _Floats]) -> dict[str, float]:
    gaps = samples["gap between arrivals"]
    inputs, outputs = samples["input tokens"], samples["output tokens"]
    at_s = np.array([r.at_s for r in trace.requests])
    found = {
        "requests / s": 1 / float(gaps.mean()) if gaps.mean() > 0 else 0.0,
        "CV of gaps": float(gaps.std() / gaps.mean()) if gaps.mean() > 0 else 0.0,
        "autocorrelation of gaps": _correlation(gaps[:-1], gaps[1:]),
        "dispersion of counts in 10 s": _dispersion(at_s, 10.0),
        "dispersion of counts in 60 s": _dispersion(at_s, 60.0),
        "input tokens, mean": float(inputs.mean()),
        "input tokens, p99": float(np.percentile(inputs, 99)),
        "output tokens, mean": float(outputs.mean()),
        "output tokens, p99": float(np.percentile(outputs, 99)),
        "rank correlation of lengths": _correlation(_ranks(inputs), _ranks(outputs)),
    }
    if trace.has_prefixes or trace.has_sessions:
        kinds = [d.kind for d in descents(trace)[0]]
        found["share of turns"] = kinds.count(Kind.TURN) / len(kinds)
        found["share of branches"] = kinds.count(Kind.BRANCH) / len(kinds)
    return found


def _correlation(a: _Floats, b: _Floats) -> float:
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(sample: _Floats) -> _Floats:
    _, places, counts = np.unique(sample, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def _dispersion(at_s: _Floats, window_s: float) -> float:
    """Variance of counts divided by their mean: 1 for Poisson arrivals."""
    counts, _ = np.histogram(at_s, bins=np.arange(at_s[0], at_s[-1] + window_s, window_s))
    whole = counts[:-1] if len(counts) > 1 else counts
    return float(whole.var() / whole.mean()) if whole.mean() > 0 else 0.0


def _hit_ratios(original: Trace, synthetic: Trace) -> tuple[HitRatio, ...]:
    if not original.has_prefixes:
        return ()
    distinct = len({i for r in original.requests for i in r.hash_ids})
    sizes = [max(1, int(float(f"{share * distinct:.2g}"))) for share in CACHE_SHARES]
    return tuple(
        HitRatio(size, _hit_ratio(original, size), _hit_ratio(synthetic, size)) for size in (*sizes, None)
    )


def _hit_ratio(trace: Trace, capacity_blocks: int | None) -> float:
    chains: Sequence[tuple[int, ...]] = [r.hash_ids for r in trace.requests]
    return block_hit_ratio(chains, capacity_blocks=capacity_blocks)
