"""Fits the parameters of an arrival process to its instants. Pure.

The rate's profile over the trace (or over the day, for traces of days) is divided out. The remaining
covariance between counts of neighbouring windows is slow modulation, which falls exponentially with distance.
The remaining variance of single gaps belongs to the renewal process.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.synth.params import Arrivals

DAY_S = 86_400.0
PROFILE_PARTS_MAX = 24
PROFILE_REQUESTS_MIN = 200
"""Minimum requests per part, so that its rate is known to some 7 %."""
WINDOW_REQUESTS = 10
LAGS = 12

_Floats = np.ndarray[Any, np.dtype[np.float64]]


def fit_arrivals(instants_s: Sequence[float]) -> Arrivals:
    """Fit at least two sorted instants."""
    at_s = np.asarray(instants_s, dtype=np.float64)
    at_s = at_s - at_s[0]
    span_s = float(at_s[-1]) or 1.0
    rate = (len(at_s) - 1) / span_s
    profile, profile_s = _profile(at_s, span_s)
    modulation, modulation_s = _modulation(at_s, rate, profile, profile_s)
    expected = np.diff(_passed(at_s, rate, profile, profile_s))
    spread = (
        float(expected.var() / expected.mean() ** 2) if len(expected) > 1 and expected.mean() > 0 else 1.0
    )
    # If the rate is log-normal with variance s^2, gaps have (1 + s^2) (1 + c^2) - 1 where steady ones have
    # c^2.
    wider = math.exp(modulation**2)
    own = max(0.05, (1 + spread) / wider - 1)
    return Arrivals(
        rate_per_s=_digits(rate),
        shape=_digits(1 / own),
        modulation=_digits(modulation),
        modulation_s=_digits(modulation_s),
        profile=tuple(round(float(p), 3) for p in profile),
        profile_s=_digits(profile_s),
    )


def _profile(at_s: _Floats, span_s: float) -> tuple[_Floats, float]:
    daily = span_s > 1.5 * DAY_S
    period_s = DAY_S if daily else span_s
    parts = max(1, min(PROFILE_PARTS_MAX, len(at_s) // PROFILE_REQUESTS_MIN))
    counts, _ = np.histogram(at_s % period_s if daily else at_s, bins=parts, range=(0.0, period_s))
    width_s = period_s / parts
    whole, left_s = divmod(span_s, period_s)
    # An unfinished day contains its first hours once more than its last.
    seen_s = whole * width_s + np.clip(left_s - width_s * np.arange(parts), 0.0, width_s)
    rates = counts / np.maximum(seen_s, 1e-9) if daily else counts / width_s
    return rates / rates.mean(), period_s


def _passed(at_s: _Floats, rate: float, profile: _Floats, profile_s: float) -> _Floats:
    """The number of requests that the profile expects before each instant."""
    edges = np.concatenate(([0.0], np.cumsum(profile))) / len(profile)
    turns, part = np.divmod(at_s / profile_s, 1.0)
    inside = np.interp(part, np.linspace(0.0, 1.0, len(profile) + 1), edges)
    return rate * profile_s * (turns * edges[-1] + inside)


def _modulation(at_s: _Floats, rate: float, profile: _Floats, profile_s: float) -> tuple[float, float]:
    """(standard deviation of the log rate, seconds in which its correlation falls to 1/e)."""
    passed = _passed(at_s, rate, profile, profile_s)
    windows = int(passed[-1] // WINDOW_REQUESTS)
    if windows < 4 * LAGS:
        return 0.0, 1.0
    # Windows have equal expectation, so that the profile drops out.
    counts, _ = np.histogram(passed, bins=windows, range=(0.0, windows * WINDOW_REQUESTS))
    off = counts / counts.mean() - 1
    lagged = np.array([float(np.mean(off[:-k] * off[k:])) for k in range(1, LAGS + 1)])
    noise = float(off.var()) / math.sqrt(windows)
    above = int(np.argmax(lagged < noise)) if bool((lagged < noise).any()) else LAGS
    if above < 2:
        return (math.sqrt(max(0.0, math.log1p(lagged[0]))), WINDOW_REQUESTS / rate) if above else (0.0, 1.0)
    slope, intercept = np.polyfit(np.arange(1, above + 1), np.log(lagged[:above]), 1)
    fall = max(-float(slope), 1 / (4 * LAGS))  # a slower fall cannot be distinguished from the profile
    variance = min(math.exp(float(intercept)), float(off.var()))
    return math.sqrt(math.log1p(max(0.0, variance))), WINDOW_REQUESTS / rate / fall


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
