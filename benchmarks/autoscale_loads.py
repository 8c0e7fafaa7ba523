"""Loads that change in known ways: a trace or generated lengths, at a rate that a profile multiplies."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from random import Random
from zlib import crc32

import msgspec

from baton.core.errors import SetupError
from loadgen.lengths import ReplayPlan, TraceScaling, make_plan
from loadgen.traces import read_trace
from simulator.fleet.workload import FleetRequest, of_plan

Profile = Callable[[float], float]
"""Maps seconds to a factor on the rate."""


class MeanLengths(msgspec.Struct, frozen=True):
    """Mean tokens of a log-normal distribution."""

    prompt: int
    output: int


class AutoscaleLoad(msgspec.Struct, frozen=True):
    """Requests over time."""

    name: str
    duration_s: float
    rate: float
    """Requests per second where the profile is 1. For a trace, 0 means its own rate."""
    profile: str
    trace: str = ""
    length_scale: float = 1.0
    keep: int = 1
    """One conversation of a trace in this many is kept: the same arrivals and sharing on a smaller
    cluster."""
    lengths: MeanLengths = MeanLengths(8000, 3000)
    later: MeanLengths | None = None
    """Lengths from the middle of the run on."""
    start_s: float = 120.0
    seed: int = 0


def profile_of(name: str, duration_s: float) -> Profile:
    """Raises SetupError for an unknown profile."""

    def ramp(at_s: float) -> float:
        return 0.4 + min(1.0, at_s / (0.8 * duration_s))

    profiles: dict[str, Profile] = {
        "steady": lambda at_s: 1.0,
        # The rate is high for a quarter of the time. The question is what provisioning for it costs in the
        # rest.
        "step": lambda at_s: 1.3 if 0.4 <= at_s / duration_s < 0.65 else 0.4,
        "spike": lambda at_s: 1.7 if 0.5 <= at_s / duration_s < 0.6 else 0.5,
        "ramp": ramp,
        # One day within the run: low at both ends, high in the middle.
        "day": lambda at_s: 0.35 + 1.15 * math.sin(math.pi * at_s / duration_s) ** 2,
    }
    if name not in profiles:
        raise SetupError(f"no profile {name!r}: choose one of {', '.join(profiles)}")
    return profiles[name]


SCATTER = 0.7
"""Standard deviation of the logarithm of lengths."""


def drawn(load: AutoscaleLoad) -> Iterator[FleetRequest]:
    """Poisson arrivals at the profile's rate, thinned from its highest rate."""
    rng = Random(f"{load.seed}/{load.name}")
    profile = profile_of(load.profile, load.duration_s)
    peak = max(profile(load.duration_s * i / 200) for i in range(201))
    at_s, number = 0.0, 0
    while True:
        at_s += rng.expovariate(load.rate * peak)
        if at_s >= load.duration_s:
            return
        if rng.random() * peak > profile(at_s):
            continue
        is_late = load.later is not None and at_s >= load.duration_s / 2
        mean = load.later if is_late and load.later is not None else load.lengths
        prompt, output = (
            max(2, int(tokens * math.exp(rng.gauss(-(SCATTER**2) / 2, SCATTER))))
            for tokens in (mean.prompt, mean.output)
        )
        yield FleetRequest(number, at_s, prompt, output, ())
        number += 1


def of_trace(load: AutoscaleLoad) -> tuple[list[FleetRequest], ReplayPlan]:
    """The trace's requests in their order, with gaps divided by the profile. The trace is repeated, without
    sharing prefixes with earlier repetitions, until the time is over. Raises SetupError if no request is
    kept."""
    scale = Fraction(load.length_scale).limit_denominator(64)
    plan = make_plan(
        read_trace(Path(load.trace)), TraceScaling(scale, scale, Fraction(1)), spread=True, seed=0
    )
    requests = [request for request in of_plan(plan) if _is_kept(request, load.keep)]
    if len(requests) < 2:
        raise SetupError(
            f"--keep {load.keep} leaves {len(requests)} requests of {load.trace}: give a smaller --keep"
        )
    span_s = requests[-1].at_s - requests[0].at_s
    own = (len(requests) - 1) / span_s
    factor = load.rate / own if load.rate else 1.0
    profile = profile_of(load.profile, load.duration_s)
    found: list[FleetRequest] = []
    at_s, number = 0.0, 0
    while True:
        copy, index = divmod(number, len(requests))
        request = requests[index]
        gap_s = request.at_s - requests[index - 1].at_s if index else 1 / own
        at_s += gap_s / factor / profile(at_s)
        if at_s >= load.duration_s:
            return found, plan
        found.append(request._replace(number=number, at_s=at_s, copy=copy))
        number += 1


def _is_kept(request: FleetRequest, keep: int) -> bool:
    """Turns of one conversation share their second block, so the whole conversation is kept or dropped."""
    ids = request.hash_ids
    return crc32(f"{ids[1] if len(ids) > 1 else request.number}".encode()) % keep == 0
