"""What the autoscaler is told, and what it says."""

from collections.abc import Mapping
from math import ceil, log2

import msgspec

from baton.core.costs import StepCosts
from baton.core.messages import Role

BINS_PER_OCTAVE = 2
BINS_MAX = 48
"""Prompts of 2^24 tokens; longer ones go with these."""


def bin_of(tokens: int) -> int:
    """The bin of prompts so long: each is √2 times as wide as the one before."""
    return min(BINS_MAX - 1, ceil(BINS_PER_OCTAVE * log2(max(1, tokens))))


class Bin(msgspec.Struct, frozen=True):
    """Requests with prompts of about one length."""

    requests: int
    prompt_tokens: int
    """Sum of their prompts, cached parts included."""


class ClassLoad(msgspec.Struct, frozen=True):
    """One service class during one interval. Counts and sums, which several routers' can be added up from."""

    arrived: Mapping[int, Bin] = {}
    """By `bin_of` their prompts."""
    started: int = 0
    """Requests that got their first token."""
    started_prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of these prompts: found in a cache or a store."""
    ttft_missed: int = 0
    """Of those that started or gave up: their first token was late, or did not come."""
    ended: int = 0
    """Requests that ended with at least one token after the first."""
    output_tokens: int = 0
    """Of these."""
    context_tokens: int = 0
    """Of these: sum over output tokens of the positions before each, prompt included."""
    tpot_missed: int = 0


class RoleState(msgspec.Struct, frozen=True):
    """The replicas of one role by phase, and what those that serve have to do."""

    serving: int = 0
    starting: int = 0
    joining: int = 0
    """That serve or drain in another role and are about to take this one."""
    draining: int = 0
    """That will end, or leave for another role."""
    waiting_prompt_tokens: int = 0
    """Accepted and not computed."""
    decoding: int = 0
    """Sequences in decode batches or on their way there."""
    context_tokens: int = 0
    """Positions that these hold."""
    busy_share: float = 0.0
    """Of the interval, in which they computed."""
    held_share: float = 0.0
    """Of their KV blocks."""

    @property
    def have(self) -> int:
        """That serve, or will without another decision."""
        return self.serving + self.starting + self.joining

    @property
    def paid(self) -> int:
        return self.serving + self.starting + self.draining


class Observation(msgspec.Struct, frozen=True):
    """The cluster over one interval that ended at `at_s`."""

    at_s: float
    interval_s: float
    classes: Mapping[str, ClassLoad]
    roles: Mapping[Role, RoleState]
    queued: int = 0
    """Sequences without a place, at all routers."""
    queued_prompt_tokens: int = 0
    start_s: tuple[float, ...] = ()
    """How long starts took that ended in this interval; so for drains and flips."""
    drain_s: tuple[float, ...] = ()
    flip_s: tuple[float, ...] = ()

    def of(self, role: Role) -> RoleState:
        return self.roles.get(role, RoleState())

    @property
    def arrived(self) -> int:
        return sum(one.requests for load in self.classes.values() for one in load.arrived.values())

    @property
    def is_idle(self) -> bool:
        busy = any(s.waiting_prompt_tokens or s.decoding for s in self.roles.values())
        return not (busy or self.queued or self.arrived)


class Traits(msgspec.Struct, frozen=True):
    """What one replica can do, as workers say of themselves."""

    costs: StepCosts
    chunk_tokens: int
    batch_max: int
    pool_tokens: int
    """Positions that its KV pool holds."""


class Objective(msgspec.Struct, frozen=True):
    """Seconds; 0: none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class Bounds(msgspec.Struct, frozen=True):
    """Replicas of one role."""

    least: int
    most: int


class Settings(msgspec.Struct, frozen=True):
    """Of one model's pools. Filled from `config.AutoscaleConfig`, whose fields say more."""

    bounds: Mapping[Role, Bounds]
    """Roles that are in use: prefill and decode, or both."""
    objectives: Mapping[str, Objective]
    """By class; "" is of requests without one."""
    attain: float = 0.95
    interval_s: float = 15.0
    workers_max: int = 0
    replica_hours_per_day: float = 0.0
    caution: float = 0.75
    patience_s: float = 300.0
    zero_after_s: float = 0.0
    hold_s: float = 30.0
    """How long routers hold a request while there is no worker."""
    season_s: float = 0.0
    start_s: float = 60.0
    """Until starts were seen; so for the other two."""
    drain_s: float = 20.0
    flip_s: float = 20.0
    is_advice: bool = False


class Flip(msgspec.Struct, frozen=True):
    """So many serving workers change their role."""

    source: Role
    target: Role
    count: int


class Sized(msgspec.Struct, frozen=True):
    """What one role needs, and of what that is made."""

    demand: float
    """Prefill: seconds of prompt work per second. Decode: output tokens per second."""
    forecast: float
    """The same when a replica started now would serve, at its upper end."""
    error: float
    """Mean absolute error of such forecasts lately, in the same unit."""
    model: str
    """Which forecast was taken."""
    correction: float
    """Factor on the forecast, learnt from attainment."""
    needed: int
    """Replicas at the upper end of the forecast."""
    floor: int | None
    """Most that was needed within the patience: fewer there shall not be. None: not watched for so long."""


class Decision(msgspec.Struct, frozen=True):
    """What there should be. `desired` counts replicas that serve or start, flips done; on top is what
    drains."""

    at_s: float
    desired: Mapping[Role, int]
    flips: tuple[Flip, ...]
    starts: Mapping[Role, int]
    stops: Mapping[Role, int]
    reasons: tuple[str, ...]
    sized: Mapping[Role, Sized]
    is_advice: bool

    @property
    def is_change(self) -> bool:
        return bool(self.flips or any(self.starts.values()) or any(self.stops.values()))
