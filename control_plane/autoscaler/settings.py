"""Conversion of the configuration to the autoscaler's settings."""

from collections.abc import Iterable, Mapping

from baton.config import AutoscaleConfig
from baton.config.router import SloConfig
from baton.core.messages import Role
from control_plane.autoscaler.values import AutoscalerSettings, LatencyObjective, PoolBounds


def objectives_of(slo: SloConfig) -> dict[str, LatencyObjective]:
    """Return the objectives by class; "" stands for requests that choose none."""
    named = {name: LatencyObjective(one.ttft_s, one.tpot_s) for name, one in slo.classes.items()}
    return {"": named.get(slo.default, LatencyObjective()), **named}


def settings_of(
    config: AutoscaleConfig,
    *,
    roles: Iterable[Role],
    objectives: Mapping[str, LatencyObjective],
    hold_s: float,
    is_advice: bool = False,
    ranks: Mapping[Role, int] | None = None,
    expert_ranks: Mapping[Role, int] | None = None,
) -> AutoscalerSettings:
    """Return the settings for `roles` in use: prefill and decode, or aggregated. `hold_s` is
    `router.queue_wait_s`; `ranks` are those of one worker of each role, 1 where none are given;
    `expert_ranks` those that hold a role's experts apart from its workers."""
    bounds = {
        Role.PREFILL: PoolBounds(config.prefill_min, config.prefill_max),
        Role.DECODE: PoolBounds(config.decode_min, config.decode_max),
        Role.AGGREGATED: PoolBounds(config.aggregated_min, config.aggregated_max),
    }
    used = set(roles)
    return AutoscalerSettings(
        bounds={role: bounds[role] for role in Role if role in used},
        objectives=objectives,
        attain=config.attain,
        interval_s=config.interval_s,
        ranks={role: count for role, count in (ranks or {}).items() if role in used},
        expert_ranks={role: count for role, count in (expert_ranks or {}).items() if role in used},
        ranks_max=config.ranks_max,
        rank_hours_per_day=config.rank_hours_per_day,
        caution=config.caution,
        headroom=config.headroom,
        patience_s=config.patience_s,
        zero_after_s=config.zero_after_s,
        hold_s=hold_s,
        season_s=config.season_s,
        window_s=config.window_s,
        start_s=config.start_s,
        drain_s=config.drain_s,
        switch_s=config.switch_s,
        is_advice=is_advice,
    )
