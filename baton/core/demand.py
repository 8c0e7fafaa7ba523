"""What routers report to the control plane about requests and workers, so that it can size the pools.

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
"""The last bin holds prompts of 2^24 tokens and longer ones."""


def bin_of(tokens: int) -> int:
    """The bin of prompts with this many tokens; each bin is √2 times as wide as the one before."""
    return min(BINS_MAX - 1, ceil(BINS_PER_OCTAVE * log2(max(1, tokens))))


class Bin(msgspec.Struct, frozen=True):
    """Prompts of about one length. A request counts once, in the bin of its first prompt."""

    requests: UInt64
    prompt_tokens: UInt64
    """The tokens of all prompts, cached parts included. A prompt counts once, however many answers it has."""
    further_prompts: UInt64 = 0
    """Prompts beyond the first of their requests."""

    @property
    def prompts(self) -> int:
        return self.requests + self.further_prompts


class ClassLoad(msgspec.Struct, frozen=True):
    """The load of one service class, as counts and sums that add up over routers."""

    arrived: Mapping[int, Bin] = {}
    """Requests that came and their prompts, by `bin_of` the prompts."""
    started: UInt64 = 0
    """Requests that got their first token, or ended without one."""
    started_prompt_tokens: UInt64 = 0
    """Tokens of the prompts that got their first token."""
    cached_tokens: UInt64 = 0
    """Tokens of these prompts that were found in a cache or a store."""
    ttft_missed: UInt64 = 0
    """Started requests whose first token was late, or did not come."""
    ended: UInt64 = 0
    """Requests that ended with at least one token after the first."""
    output_tokens: UInt64 = 0
    """Tokens that these requests generated, in all their answers."""
    context_tokens: UInt64 = 0
    """The positions before each of these output tokens, prompt included, summed up."""
    tpot_missed: UInt64 = 0


_COUNTS = tuple(name for name in ClassLoad.__struct_fields__ if name != "arrived")


def difference(now: ClassLoad, before: ClassLoad) -> ClassLoad:
    """The load that came between two totals of one router."""
    return _combined([(now, 1), (before, -1)])


def fell(now: ClassLoad, before: ClassLoad) -> bool:
    """True if any count of a router is below what it was, which no count of one life can be."""
    if any(getattr(now, name) < getattr(before, name) for name in _COUNTS):
        return True
    none = Bin(0, 0)
    pairs = ((now.arrived.get(at, none), one) for at, one in before.arrived.items())
    return any(
        later.requests < one.requests
        or later.prompt_tokens < one.prompt_tokens
        or later.further_prompts < one.further_prompts
        for later, one in pairs
    )


def total(loads: Iterable[ClassLoad]) -> ClassLoad:
    return _combined([(load, 1) for load in loads])


def _combined(parts: list[tuple[ClassLoad, int]]) -> ClassLoad:
    bins: dict[int, tuple[int, int, int]] = {}
    for load, sign in parts:
        for at, one in load.arrived.items():
            n, tokens, more = bins.get(at, (0, 0, 0))
            bins[at] = (
                n + sign * one.requests,
                tokens + sign * one.prompt_tokens,
                more + sign * one.further_prompts,
            )
    counts: dict[str, Any] = {
        name: sum(sign * getattr(load, name) for load, sign in parts) for name in _COUNTS
    }
    return ClassLoad({at: Bin(*found) for at, found in bins.items() if found[0] or found[2]}, **counts)


class Traits(msgspec.Struct, frozen=True):
    """What one worker can do, by its own account."""

    costs: StepCosts
    chunk_tokens: int
    """The most tokens of a prompt in one step."""
    batch_max: int
    pool_tokens: UInt64
    """The positions that its KV pool holds."""

    @property
    def is_usable(self) -> bool:
        """True if a pool can be sized by these figures: costs that are numbers, and room for something."""
        has_room = min(self.chunk_tokens, self.batch_max, self.pool_tokens) > 0
        return has_room and self.costs.is_usable and self.costs.step_s(decodes=1) > 0


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's own latest account; it covers the sequences of all routers."""

    worker_id: WorkerId
    role: Role
    age_s: float
    """The age of that account."""
    waiting_tokens: UInt64
    """Tokens of prompts that were accepted and are not computed."""
    decoding: int
    """Sequences in its batch or on their way there."""
    context_tokens: UInt64
    held_share: float
    """The fraction of its blocks that is held."""
    traits: Traits | None = None
    """What the worker can do; None: it has not said what its steps cost."""


class DemandReport(msgspec.Struct, frozen=True):
    """The demand that one router sees for one model."""

    router_id: RouterId
    up_s: float
    """The time since the router began to count."""
    classes: Mapping[str, ClassLoad]
    """Loads by service class; "" has the requests without one."""
    queued: int
    """Sequences that wait for a worker."""
    queued_prompt_tokens: UInt64
    workers: tuple[WorkerLoad, ...]
    model: str = ""
    """The model of these requests and workers; empty: the only one."""


class DemandReply(msgspec.Struct, frozen=True):
    """The control plane's answer to a report."""

    every_s: float
    """The interval at which the control plane wants reports."""
