"""What routers tell the control plane of the requests that come and of the workers they see, for whoever
decides how many workers there shall be.

Counts are totals since the router started: a report that is lost, or heard twice, or heard by another life of
the control plane, does no harm.
"""

from collections.abc import Iterable, Mapping
from math import ceil, log2
from typing import Any

import msgspec

from baton.core.costs import StepCosts
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role
from baton.core.wire_types import UInt64

BINS_PER_OCTAVE = 2
BINS_MAX = 48
"""Prompts of 2^24 tokens; longer ones go with these."""


def bin_of(tokens: int) -> int:
    """The bin of prompts so long: each is √2 times as wide as the one before."""
    return min(BINS_MAX - 1, ceil(BINS_PER_OCTAVE * log2(max(1, tokens))))


class Bin(msgspec.Struct, frozen=True):
    """Requests with prompts of about one length."""

    requests: UInt64
    prompt_tokens: UInt64
    """Sum of their prompts, cached parts included."""


class ClassLoad(msgspec.Struct, frozen=True):
    """One service class. Counts and sums, which several routers' can be added up from."""

    arrived: Mapping[int, Bin] = {}
    """By `bin_of` their prompts."""
    started: UInt64 = 0
    """Requests that got their first token, or ended without one."""
    started_prompt_tokens: UInt64 = 0
    cached_tokens: UInt64 = 0
    """Of these prompts: found in a cache or a store."""
    ttft_missed: UInt64 = 0
    """Of those that started: their first token was late, or did not come."""
    ended: UInt64 = 0
    """Requests that ended with at least one token after the first."""
    output_tokens: UInt64 = 0
    """Of these."""
    context_tokens: UInt64 = 0
    """Of these: sum over output tokens of the positions before each, prompt included."""
    tpot_missed: UInt64 = 0


_COUNTS = tuple(name for name in ClassLoad.__struct_fields__ if name != "arrived")


def difference(now: ClassLoad, before: ClassLoad) -> ClassLoad:
    """What came between two totals of one router."""
    return _combined([(now, 1), (before, -1)])


def total(loads: Iterable[ClassLoad]) -> ClassLoad:
    return _combined([(load, 1) for load in loads])


def _combined(parts: list[tuple[ClassLoad, int]]) -> ClassLoad:
    bins: dict[int, tuple[int, int]] = {}
    for load, sign in parts:
        for at, one in load.arrived.items():
            n, tokens = bins.get(at, (0, 0))
            bins[at] = (n + sign * one.requests, tokens + sign * one.prompt_tokens)
    counts: dict[str, Any] = {
        name: sum(sign * getattr(load, name) for load, sign in parts) for name in _COUNTS
    }
    return ClassLoad({at: Bin(n, tokens) for at, (n, tokens) in bins.items() if n}, **counts)


class Traits(msgspec.Struct, frozen=True):
    """What one worker can do, as it says of itself."""

    costs: StepCosts
    chunk_tokens: int
    """Of a prompt, in one step."""
    batch_max: int
    pool_tokens: UInt64
    """Positions that its KV pool holds."""


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker, as it said last; of all routers' sequences there."""

    worker_id: WorkerId
    role: Role
    age_s: float
    """Of what it said."""
    waiting_tokens: UInt64
    """Of prompts accepted and not computed."""
    decoding: int
    """Sequences in its batch, or on their way there."""
    context_tokens: UInt64
    held_share: float
    """Of its blocks."""
    traits: Traits | None = None
    """None: it has not said what its steps cost."""


class DemandReport(msgspec.Struct, frozen=True):
    """Of one router and one model."""

    router_id: RouterId
    up_s: float
    """Since it began to count."""
    classes: Mapping[str, ClassLoad]
    """By name; "": requests without one."""
    queued: int
    """Sequences without a place."""
    queued_prompt_tokens: UInt64
    workers: tuple[WorkerLoad, ...]
    model: str = ""
    """Whose requests and workers these are; empty: of the only one."""


class DemandHeard(msgspec.Struct, frozen=True):
    """The answer."""

    every_s: float
    """How often the control plane wants to hear this."""
