"""The replicas, the demand, the orders and the faults of one control seed, all drawn from the seed."""

import random
from dataclasses import dataclass

from baton.core.messages import Role
from baton.core.operate import Pool
from control_plane.autoscaler.values import AutoscalerSettings, LatencyObjective, PoolBounds
from control_plane.reconcile_events import RestartPolicy

FAULTS = (
    "crash",
    "freeze",
    "mute",
    "slow_end",
    "stuck_drain",
    "late_renewals",
    "fails_to_start",
    "never_starts",
    "control_stall",
    "control_kill",
    "record_lost",
    "router_crash",
    "router_silent",
)
"""Every fault class of the control plane's surroundings."""

MODEL, OTHER_MODEL = "large", "small"
CHURN_S = 420.0
"""Faults, orders and changes of the demand come in this span."""
PAIR = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class ControlScenario:
    """One small cluster under its control plane. Seconds are virtual."""

    faults: frozenset[str]
    pools: tuple[Pool, ...]
    nodes: tuple[str, ...]
    router_count: int
    order_count: int
    settings: AutoscalerSettings | None
    """The settings of the autoscaler of `MODEL`; None where operators alone scale."""
    demand: str
    rate: float
    """Requests per second where the demand is high."""
    demand_period_s: float
    policy: RestartPolicy
    start_s: tuple[float, float]
    """Bounds of the time that a start takes."""
    strikes_max: int
    heartbeat_s: float = 1.0
    member_lease_s: float = 4.0
    member_suspect_s: float = 2.0
    delay_s: float = 0.02
    churn_s: float = CHURN_S
    settles_within_s: float = 120.0
    """After the churn everything is as desired within this time."""


def draw_control(rng: random.Random) -> ControlScenario:
    chance = rng.choice((0.0, 0.25, 0.25, 0.6))
    faults = frozenset(name for name in FAULTS if rng.random() < chance)
    is_pair = rng.random() < 0.75
    is_scaled = rng.random() < 0.65
    pools = [Pool(MODEL, {role: rng.randint(1, 3) for role in (PAIR if is_pair else (Role.AGGREGATED,))})]
    if rng.random() < 0.3:
        pools.append(Pool(OTHER_MODEL, {Role.AGGREGATED: rng.randint(1, 2)}))
    policy = RestartPolicy(
        backoff_s=0.5,
        backoff_max_s=rng.choice((1.0, 6.0)),
        start_timeout_s=20.0,
        drain_timeout_s=8.0,
        stable_s=5.0,
    )
    return ControlScenario(
        faults=faults,
        pools=tuple(pools),
        nodes=tuple(f"node{i}" for i in range(rng.choice((1, 2, 3)))),
        router_count=rng.choice((1, 2, 3)),
        order_count=rng.choice((2, 6)) if is_scaled else rng.choice((6, 12, 20)),
        settings=_draw_settings(rng, is_pair=is_pair) if is_scaled else None,
        demand=rng.choice(("steady", "steps", "flapping", "flapping", "silence")),
        rate=rng.choice((0.5, 2.0, 5.0, 9.0)),
        demand_period_s=rng.choice((30.0, 60.0, 120.0)),
        policy=policy,
        start_s=rng.choice(((1.0, 3.0), (3.0, 9.0), (8.0, 15.0))),
        strikes_max=rng.choice((2, 4)),
    )


def _draw_settings(rng: random.Random, *, is_pair: bool) -> AutoscalerSettings:
    least = rng.choice((0, 1, 1, 2))
    most = rng.choice((3, 5, 8))
    return AutoscalerSettings(
        bounds={role: PoolBounds(least, most) for role in (PAIR if is_pair else (Role.AGGREGATED,))},
        objectives={"": LatencyObjective(2.0, 0.06)},
        interval_s=rng.choice((5.0, 10.0)),
        ranks_max=rng.choice((0, 0, 4, 6)),
        rank_hours_per_day=rng.choice((0.0, 0.0, 0.0, 0.5)),
        headroom=rng.choice((1.0, 1.0, 2.0)),
        patience_s=rng.choice((30.0, 60.0, 90.0)),
        zero_after_s=rng.choice((0.0, 40.0, 80.0)),
        hold_s=30.0,
        window_s=rng.choice((20.0, 60.0)),
        start_s=6.0,
        drain_s=3.0,
        switch_s=3.0,
        is_advice=rng.random() < 0.1,
    )
