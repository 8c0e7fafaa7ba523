"""Figures of samples. Pure."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from loadgen.report.model import QUANTILE_LEVELS, Percentiles, Share

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_Z = 1.959964  # two-sided 95 %
_RESAMPLES = 1000


def percentiles(sample: Iterable[float | None] | Floats) -> Percentiles | None:
    """None for an empty sample; entries that are None or NaN are left out."""
    values = sample if isinstance(sample, np.ndarray) else as_floats(sample)
    values = values[~np.isnan(values)]
    if not values.size:
        return None
    p50, p90, p95, p99 = (float(q) for q in np.percentile(values, (50, 90, 95, 99)))
    return Percentiles(int(values.size), float(values.mean()), p50, p90, p95, p99, float(values.max()))


def as_floats(sample: Iterable[float | None]) -> Floats:
    """The sample as floats, with NaN for None."""
    return np.array([np.nan if v is None else v for v in sample], dtype=np.float64)


def quantiles(values: Floats) -> tuple[float, ...]:
    """The quantiles at `QUANTILE_LEVELS`; empty for an empty sample."""
    known = values[~np.isnan(values)]
    return tuple(float(q) for q in np.quantile(known, QUANTILE_LEVELS)) if known.size else ()


def share_of(met: Bools, *, seed: int = 0) -> Share:
    """The share of requests that met their targets, in the order of planned instants.

    The interval is the wider one, on each side, of Wilson's, which treats requests as independent, and a
    circular block bootstrap's, which does not: in a queue, misses come in groups. Blocks have sqrt(n)
    requests. Wilson's interval remains if all met or all missed, where resampling shows no spread.
    """
    count, hits = int(met.size), int(np.count_nonzero(met))
    if not count:
        return Share(0, 0, 0.0, 0.0, 1.0)
    low, high = wilson(hits, count)
    boot_low, boot_high = _block_bootstrap(met, seed=seed)
    return Share(hits, count, hits / count, min(low, boot_low), max(high, boot_high))


def wilson(met: int, judged: int) -> tuple[float, float]:
    """Wilson's score interval of a binomial share, 95 %."""
    if not judged:
        return 0.0, 1.0
    share, z2 = met / judged, _Z * _Z
    centre = share + z2 / (2 * judged)
    half = _Z * float(np.sqrt(share * (1 - share) / judged + z2 / (4 * judged * judged)))
    scale = 1 + z2 / judged
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _block_bootstrap(met: Bools, *, seed: int) -> tuple[float, float]:
    count = int(met.size)
    block = max(1, round(count**0.5))
    around = np.concatenate([met, met[: block - 1]]).astype(np.float64)
    sums = np.cumsum(np.concatenate([[0.0], around]))
    block_means = (sums[block:] - sums[:-block]) / block  # one mean per possible start
    starts = np.random.default_rng(seed).integers(0, count, size=(_RESAMPLES, -(-count // block)))
    low, high = np.percentile(block_means[starts].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)
