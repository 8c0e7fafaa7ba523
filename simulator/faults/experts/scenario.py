"""The ranks, the callers and the faults of one small expert group, all drawn from the seed."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum, auto

from control_plane.experts.group_values import ExpertGroupPolicy
from control_plane.reconcile_events import RestartPolicy

EXPERT_FAULTS = (
    "rank_kill",
    "rank_stop",
    "rank_slow",
    "node_loss",
    "two_at_once",
    "start_fails",
    "load_fails",
    "link_breaks",
    "link_stalls",
    "caller_crash",
    "streams_break",
    "maps_late",
    "kills_lost",
    "control_restart",
    "control_stall",
    "nodes_left",
    "scaling",
    "rebalances",
    "all_lost",
)
"""Every fault class of an expert group's surroundings, and every order of an operator."""


class RankMoment(StrEnum):
    """What an expert rank is doing when it is struck."""

    IDLE = auto()
    DISPATCH = auto()
    """Rows are on their way to it."""
    COMPUTE = auto()
    COMBINE = auto()
    """Results are on their way from it."""
    LOAD = auto()


@dataclass(frozen=True, slots=True)
class ExpertScenario:
    """One small group. Seconds are virtual."""

    faults: frozenset[str]
    wanted: int
    nodes: int
    callers: int
    lanes: int
    """Dispatches that a caller has under way at once."""
    layers: int
    experts: int
    experts_used: int
    """Experts that each token is sent to."""
    tokens_max: int
    policy: ExpertGroupPolicy
    answer_timeout_s: float
    compute_timeout_s: float
    park_after_s: float
    think_s: float
    """Time between two steps of a lane."""
    latency_s: float
    row_s: float
    """Time in which a rank computes a row."""
    load_s: float
    start_s: float
    strikes_max: int
    churn_s: float = 7.0
    """Faults strike in this span."""
    begins_s: float = 2.0
    settles_within_s: float = 45.0
    """Everything is as wanted so long after the last fault."""

    @property
    def expert_total(self) -> int:
        return self.layers * self.experts

    def slots(self, ranks: int) -> int:
        """Experts of each layer that a rank has memory for, as production sizes it."""
        return -int(-self.experts * self.policy.replicas // max(1, ranks))


def draw_experts(rng: random.Random) -> ExpertScenario:
    chance = rng.choice((0.0, 0.12, 0.12, 0.3))
    faults = frozenset(name for name in EXPERT_FAULTS[:-1] if rng.random() < chance)
    layers, experts = rng.choice(((1, 4), (1, 8), (2, 4), (2, 6)))
    load_s = rng.choice((0.01, 0.03, 0.1))
    restart = RestartPolicy(
        backoff_s=0.1, backoff_max_s=1.0, start_timeout_s=4.0, drain_timeout_s=3.0, stable_s=2.0
    )
    policy = ExpertGroupPolicy(
        restart=restart,
        replicas=rng.choice((1.0, 1.5, 2.0, 2.0)),
        rebalance_s=rng.choice((1.0, 3.0)),
        gain_min=rng.choice((0.02, 0.05)),
        half_life_s=2.0,
        # One expert may migrate in a second or so. What no rank holds is loaded without waiting.
        bytes_per_s=rng.choice((0.7, 2.0, 10.0)),
        first_wait_s=2.0,
        rebuild_s=1.5,
        adopt_s=3.0,
        silence_s=2.0,
        caller_gone_s=3.0,
        kill_again_s=0.5,
    )
    is_pressed = rng.random() < 0.3
    if is_pressed:  # ranks are lost again and again, and their memory is scarce
        faults |= {"rank_kill", "two_at_once", "node_loss"}
        policy = replace(policy, replicas=rng.choice((1.0, 1.5)))
    scenario = ExpertScenario(
        faults=faults,
        wanted=rng.choice((3, 4)) if is_pressed else rng.randint(2, 4),
        nodes=rng.choice((2, 2, 3)),
        callers=rng.randint(1, 3),
        lanes=rng.choice((1, 2)),
        layers=layers,
        experts=experts,
        experts_used=rng.choice((1, 2, 2)),
        tokens_max=rng.choice((1, 4)),
        policy=policy,
        answer_timeout_s=0.4,
        compute_timeout_s=2.0,
        park_after_s=0.5,
        think_s=rng.choice((0.05, 0.12)),
        latency_s=rng.choice((0.0005, 0.002, 0.01)),
        row_s=rng.choice((0.0005, 0.004)),
        load_s=load_s,
        start_s=2.0 if is_pressed else rng.choice((0.2, 1.0)),
        strikes_max=5 if is_pressed else rng.choice((1, 3)),
    )
    # The last draw, so that seeds from before this fault stay as they were.
    return replace(scenario, faults=faults | {"all_lost"}) if rng.random() < chance else scenario
