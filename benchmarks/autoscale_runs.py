"""One load under one rule, in the fleet simulator."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.core.messages import Role
from benchmarks.autoscale_loads import AutoscaleLoad, drawn, of_trace
from control_plane.autoscaler.record import Journal
from control_plane.autoscaler.values import AutoscalerSettings, LatencyObjective, PoolBounds
from simulator.fleet.fleet import Fleet
from simulator.fleet.scaling import FleetScaling, Rule, ScalingSpec
from simulator.fleet.scaling_rules import RuleName, make_rule
from simulator.fleet.setup import STEP_TOKENS, PoolSizes, fleet_spec, machine_of
from simulator.fleet.spec import FleetSpec
from simulator.fleet.workload import FleetRequest
from simulator.hardware import Node, find_gpu
from simulator.models import find_model

BLOCK_TOKENS = 512
REPLICAS_MAX = 64
HPA_TARGET = 0.7
POLICY = "cached_prefix"
"""The router's placement policy. The default policy repeats its predictions for all waiting requests after
every event; with pools that are too small, as here, the simulator would do nothing else."""
STEADY_WARM_S = 900.0
"""Reversals under steady load are counted from here on, because the rule still learns before."""


class AutoscaleCase(msgspec.Struct, frozen=True):
    """A load, and the cluster under it."""

    load: AutoscaleLoad
    model: str = "llama-3-70b"
    gpu: str = "h20"
    tensor: int = 4
    ttft_slo_s: float = 20.0
    tpot_slo_s: float = 0.03
    attain: float = 0.95
    first: tuple[int, int] | None = None
    """Prefill and decode workers at the start; None means the size for the load's first ten minutes."""


class AutoscaleRun(msgspec.Struct, frozen=True):
    """The result of one rule under one load."""

    load: str
    rule: str
    met: float
    """Share of all requests that met both targets."""
    gpu_hours: float
    ttft_missed: float
    tpot_missed: float
    refused: int
    starts: int
    stops: int
    switches: int
    reversals: int
    """Scaling reversals of both roles, over the whole run."""
    turns_per_hour: Mapping[str, float]
    """Reversals by role, per hour from `STEADY_WARM_S` on."""
    drain_s_max: float
    replicas: str = ""
    requests: int = 0


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """A case that is ready to run."""

    case: AutoscaleCase
    demands: list[FleetRequest]
    trace_block_tokens: float
    cached: list[int]
    """Prompt tokens of each request that a cache without bound would hold."""

    def spec(self, pools: PoolSizes) -> FleetSpec:
        case = self.case
        machine = machine_of(Node(find_model(case.model), find_gpu(case.gpu), tensor=case.tensor))
        # Workers run only the phases of their role, so that the size of a pool is all that it has. Everything
        # else is as in `baton simulate`.
        return fleet_spec(
            machine,
            pools,
            block_tokens=BLOCK_TOKENS,
            router=RouterConfig(any_role=False, policy=POLICY),
            engine=EngineConfig(
                block_tokens=BLOCK_TOKENS,
                step_tokens_max=STEP_TOKENS,
                batch_sequences_max=256,
                tpot_slo_s=case.tpot_slo_s,
            ),
            slo_classes={"": (case.ttft_slo_s, case.tpot_slo_s)},
            heartbeat_s=1.0,
        )

    def settings(self, *, can_switch: bool = True, headroom: float = 1.0) -> AutoscalerSettings:
        case, bounds = self.case, PoolBounds(1, REPLICAS_MAX)
        return AutoscalerSettings(
            bounds={Role.PREFILL: bounds, Role.DECODE: bounds},
            objectives={"": LatencyObjective(case.ttft_slo_s, case.tpot_slo_s)},
            attain=case.attain,
            headroom=headroom,
            start_s=case.load.start_s,
            hold_s=30.0,
            # Role switches that take longer than starts are not made.
            switch_s=20.0 if can_switch else math.inf,
        )

    def run(self, rule: RuleName, pools: PoolSizes, *, goal: float = 0.0, **more: Any) -> AutoscaleRun:
        """Run a rule by its name."""
        made = make_rule(rule, self.settings(**more), target=HPA_TARGET)
        return self.run_rule(made, rule, pools, goal=goal)

    def run_rule(self, rule: Rule, name: str, pools: PoolSizes, *, goal: float = 0.0) -> AutoscaleRun:
        """Run a rule, and stop as soon as `goal` is out of reach; then only the misses are meaningful."""
        fleet = Fleet(self.spec(pools), trace_block_tokens=self.trace_block_tokens)
        spec = ScalingSpec(start_s=self.case.load.start_s, gpus_per_worker=self.case.tensor)
        scaling = FleetScaling(fleet, spec, rule)
        scaling.begin()
        missed_max = (1 - goal) * len(self.demands)
        fleet.run(iter(self.demands), observer=lambda f: len(f.stats) - f.met <= missed_max)
        return self._summarised(fleet, scaling, name, pools)

    def _summarised(self, fleet: Fleet, scaling: FleetScaling, rule: str, pools: PoolSizes) -> AutoscaleRun:
        case = self.case
        ttft_missed = tpot_missed = refused = 0
        for record in fleet.stats:
            refused += record.ttft_s is None
            ttft_missed += record.ttft_s is not None and record.ttft_s > case.ttft_slo_s
            tpot_missed += record.tpot_s is not None and record.tpot_s > case.tpot_slo_s
        count = max(1, len(self.demands) if not fleet.is_stopped else len(fleet.stats))
        journal = scaling.rule.journal
        return AutoscaleRun(
            load=case.load.name,
            rule=rule,
            met=fleet.met / count,
            gpu_hours=scaling.gpu_s / 3600,
            ttft_missed=ttft_missed / count,
            tpot_missed=tpot_missed / count,
            refused=refused,
            starts=scaling.starts,
            stops=scaling.stops,
            switches=scaling.switches,
            reversals=sum(journal.reversals().values()),
            turns_per_hour=self._turns(journal),
            drain_s_max=scaling.drain_s_max,
            replicas=str(pools) if rule == "static" else "",
            requests=len(fleet.stats),
        )

    def _turns(self, journal: Journal) -> dict[str, float]:
        hours = max(1.0, self.case.load.duration_s - STEADY_WARM_S) / 3600
        late = journal.reversals(since_s=STEADY_WARM_S)
        return {role.value: count / hours for role, count in late.items()}


def stage(case: AutoscaleCase) -> PreparedCase:
    """Raises SetupError for a trace that cannot be read."""
    if case.load.trace:
        demands, plan = of_trace(case.load)
        block_tokens = float(plan.block_tokens)
        return PreparedCase(case, demands, block_tokens, cached_tokens(demands, block_tokens))
    demands = list(drawn(case.load))
    return PreparedCase(case, demands, 0.0, [0] * len(demands))


def cached_tokens(demands: list[FleetRequest], block_tokens: float) -> list[int]:
    """Cached tokens of each prompt, in blocks that earlier prompts of the same copy of the trace had. The
    last, partial block and the last token are always computed."""
    seen: set[tuple[int, int]] = set()
    found: list[int] = []
    for demand in demands:
        keys = [(demand.copy, block) for block in demand.hash_ids[:-1]]
        count = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        found.append(min(demand.input_tokens - 1, int(count * block_tokens)))
        seen.update(keys)
    return found
