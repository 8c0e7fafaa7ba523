"""The instants of a synthetic trace of any length. Pure and seeded."""

import math
from collections.abc import Iterator
from random import Random

from loadgen.synth.params import Arrivals

STEPS_PER_CORRELATION = 4
"""Steps of the modulated rate in `modulation_s`."""


def instants_s(arrivals: Arrivals, rng: Random, *, requests_per_s: float) -> Iterator[float]:
    """Rising instants without end; the first is 0.

    Gaps are drawn in units of the expected number of requests, and then mapped to time by a rate that is
    constant in steps. The profile and the modulation keep their seconds at any mean rate.
    """
    steps = _rates(arrivals, rng, requests_per_s)
    start_s, width_s, rate = next(steps)
    at_s = 0.0
    while True:
        yield at_s
        left = rng.gammavariate(arrivals.shape, 1 / arrivals.shape)
        while left > (room := (start_s + width_s - at_s) * rate):
            left -= room
            at_s = start_s + width_s
            start_s, width_s, rate = next(steps)
        at_s += left / rate if rate > 0 else 0.0


def mean_factor(arrivals: Arrivals, until_s: float) -> float:
    """The profile's mean divided by that of its beginning. A rate times this factor is the mean rate until
    then."""
    parts = arrivals.profile
    part_s = arrivals.profile_s / len(parts)
    rounds, rest_s = divmod(until_s, arrivals.profile_s)
    whole = int(rest_s / part_s)
    expected = rounds * part_s * sum(parts) + part_s * sum(parts[:whole])
    expected += (rest_s - whole * part_s) * parts[whole % len(parts)]
    return sum(parts) / len(parts) * until_s / expected if expected > 0 else 1.0


def _rates(arrivals: Arrivals, rng: Random, requests_per_s: float) -> Iterator[tuple[float, float, float]]:
    """The (start, width, rate) of steps, one after the other."""
    parts = arrivals.profile
    mean = sum(parts) / len(parts)
    part_s = arrivals.profile_s / len(parts)
    step_s = min(part_s, arrivals.modulation_s / STEPS_PER_CORRELATION) if arrivals.modulation else part_s
    step_s = part_s / math.ceil(part_s / step_s)  # a part has whole steps
    keeps = math.exp(-step_s / arrivals.modulation_s)
    level = rng.gauss(0.0, 1.0)
    number = 0
    while True:
        part = int((number + 0.5) * step_s / part_s)
        factor = math.exp(arrivals.modulation * level - arrivals.modulation**2 / 2)
        yield number * step_s, step_s, requests_per_s * parts[part % len(parts)] / mean * factor
        level = keeps * level + math.sqrt(1 - keeps**2) * rng.gauss(0.0, 1.0)
        number += 1
