"""What the autoscaler is told, and what it says."""

from collections.abc import Mapping

import msgspec

from baton.core.demand import Bin, ClassLoad, Traits, bin_of
from baton.core.messages import Role

__all__ = (
    "AutoscalerMemory",
    "AutoscalerSettings",
    "Bin",
    "Bounds",
    "ClassLoad",
    "LatencyObjective",
    "Observation",
    "RoleSizing",
    "RoleState",
    "RoleSwitch",
    "ScalingDecision",
    "Traits",
    "bin_of",
)


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
    switch_s: tuple[float, ...] = ()

    def of(self, role: Role) -> RoleState:
        return self.roles.get(role, RoleState())

    @property
    def arrived(self) -> int:
        return sum(one.requests for load in self.classes.values() for one in load.arrived.values())

    @property
    def is_idle(self) -> bool:
        busy = any(s.waiting_prompt_tokens or s.decoding for s in self.roles.values())
        return not (busy or self.queued or self.arrived)


class LatencyObjective(msgspec.Struct, frozen=True):
    """Seconds; 0: none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class Bounds(msgspec.Struct, frozen=True):
    """Replicas of one role."""

    least: int
    most: int


class AutoscalerSettings(msgspec.Struct, frozen=True):
    """Of one model's pools. Filled from `config.AutoscaleConfig`, whose fields say more."""

    bounds: Mapping[Role, Bounds]
    """Roles that are in use: prefill and decode, or both."""
    objectives: Mapping[str, LatencyObjective]
    """By class; "" is of requests without one."""
    attain: float = 0.95
    interval_s: float = 15.0
    workers_max: int = 0
    replica_hours_per_day: float = 0.0
    caution: float = 0.75
    headroom: float = 1.0
    patience_s: float = 300.0
    zero_after_s: float = 0.0
    hold_s: float = 30.0
    """How long routers hold a request while there is no worker."""
    season_s: float = 0.0
    window_s: float = 120.0
    start_s: float = 60.0
    """Until starts were seen; so for the other two."""
    drain_s: float = 20.0
    switch_s: float = 20.0
    is_advice: bool = False


class AutoscalerMemory(msgspec.Struct, frozen=True):
    """What it learnt over hours, for its next life. What it learns in minutes is learnt again."""

    saved_at_s: float = 0.0
    """Unix time."""
    start_s: tuple[float, ...] = ()
    drain_s: tuple[float, ...] = ()
    switch_s: tuple[float, ...] = ()
    corrections: Mapping[Role, float] = {}
    patience: Mapping[Role, float] = {}
    """Factors."""
    spent: tuple[tuple[float, float], ...] = ()
    """Replica hours: (seconds ago, hours)."""
    traits: Mapping[Role, Traits] = {}


class RoleSwitch(msgspec.Struct, frozen=True):
    """So many serving workers change their role."""

    source: Role
    target: Role
    count: int


class RoleSizing(msgspec.Struct, frozen=True):
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


class ScalingDecision(msgspec.Struct, frozen=True):
    """What there should be. `desired` counts replicas that serve or start, flips done; on top is what
    drains."""

    at_s: float
    desired: Mapping[Role, int]
    switches: tuple[RoleSwitch, ...]
    starts: Mapping[Role, int]
    stops: Mapping[Role, int]
    reasons: tuple[str, ...]
    sized: Mapping[Role, RoleSizing]
    is_advice: bool

    @property
    def is_change(self) -> bool:
        return bool(self.switches or any(self.starts.values()) or any(self.stops.values()))
