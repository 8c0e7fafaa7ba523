"""Inputs and outputs of the autoscaler."""

from collections.abc import Mapping

import msgspec

from baton.core.demand import ClassLoad, Traits
from baton.core.messages import Role


class RoleState(msgspec.Struct, frozen=True):
    """The replicas of one role by state, and the work of those that serve."""

    serving: int = 0
    starting: int = 0
    joining: int = 0
    """Replicas that serve or drain in another role and are about to take this one."""
    draining: int = 0
    """Replicas that will end, or leave for another role."""
    waiting_prompt_tokens: int = 0
    """Prompt tokens accepted and not computed."""
    decoding: int = 0
    """Sequences in decode batches or on their way there."""
    context_tokens: int = 0
    """Positions that the decoding sequences hold."""
    busy_share: float = 0.0
    """Part of the interval in which they computed."""
    held_share: float = 0.0
    """Part of their KV blocks that is held."""

    @property
    def have(self) -> int:
        """Replicas that serve, or will without another decision."""
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
    """Sequences at routers that no worker has taken."""
    queued_prompt_tokens: int = 0
    start_s: tuple[float, ...] = ()
    """Times of the starts that ended in this interval; `drain_s` and `switch_s` likewise."""
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
    """Objectives in seconds; 0 means none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class PoolBounds(msgspec.Struct, frozen=True):
    """The smallest and largest number of replicas of one role."""

    least: int
    most: int


class AutoscalerSettings(msgspec.Struct, frozen=True):
    """The settings for one model's pools, filled from `config.AutoscaleConfig`, whose fields say more."""

    bounds: Mapping[Role, PoolBounds]
    """Bounds of the roles in use: prefill and decode, or aggregated."""
    objectives: Mapping[str, LatencyObjective]
    """Objectives by class; "" stands for requests without one."""
    attain: float = 0.95
    interval_s: float = 15.0
    ranks: Mapping[Role, int] = {}
    """Ranks of one worker of each role, which is what it costs; 1 for roles left out."""
    expert_ranks: Mapping[Role, int] = {}
    """Ranks that hold the experts of each role's workers apart from them, while there is any worker."""
    ranks_max: int = 0
    rank_hours_per_day: float = 0.0
    caution: float = 0.75
    headroom: float = 1.0
    patience_s: float = 300.0
    zero_after_s: float = 0.0
    hold_s: float = 30.0
    """Time that routers hold a request while there is no worker."""
    season_s: float = 0.0
    window_s: float = 120.0
    start_s: float = 60.0
    """Assumed time of a start until one was observed; `drain_s` and `switch_s` likewise."""
    drain_s: float = 20.0
    switch_s: float = 20.0
    is_advice: bool = False

    def cost(self, counts: Mapping[Role, int]) -> int:
        """Return the ranks of so many replicas of each role, with those that hold their experts."""
        return sum(
            count * self.ranks.get(role, 1) + self.expert_ranks.get(role, 0)
            for role, count in counts.items()
            if count
        )

    @property
    def has_unlike_shapes(self) -> bool:
        return len({self.ranks.get(role, 1) for role in self.bounds}) > 1


class AutoscalerMemory(msgspec.Struct, frozen=True):
    """Values learnt over hours, kept for the next process. Values learnt within minutes are learnt again."""

    saved_at_s: float = 0.0
    """Unix time."""
    start_s: tuple[float, ...] = ()
    drain_s: tuple[float, ...] = ()
    switch_s: tuple[float, ...] = ()
    corrections: Mapping[Role, float] = {}
    patience: Mapping[Role, float] = {}
    """Factors on the patience."""
    spent: tuple[tuple[float, float], ...] = ()
    """Hours of ranks: (seconds ago, hours)."""
    traits: Mapping[Role, Traits] = {}


class RoleSwitch(msgspec.Struct, frozen=True):
    """A number of serving workers that switch their role."""

    source: Role
    target: Role
    count: int


class RoleSizing(msgspec.Struct, frozen=True):
    """The number of replicas that one role needs, and the figures behind it."""

    demand: float
    """Prefill: seconds of prompt work per second. Decode: output tokens per second."""
    forecast: float
    """Upper end of the forecast demand when a replica started now would serve."""
    error: float
    """Mean absolute error of such forecasts lately, in the same unit."""
    model: str
    """Name of the forecast model in use."""
    correction: float
    """Factor on the forecast, learnt from attainment."""
    needed: int
    """Replicas needed at the upper end of the forecast."""
    floor: int | None
    """Most replicas needed within the patience, below which the pool does not shrink. None: not observed for
    that long."""


class ScalingDecision(msgspec.Struct, frozen=True):
    """The replicas that there should be. `desired` counts replicas that serve or start, after all role
    switches; replicas that drain come on top."""

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
