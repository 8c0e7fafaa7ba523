"""A planned cluster in the fleet simulator, set up as `baton simulate` sets it up: the production router over
modelled workers, and the same requests."""

from dataclasses import replace

from baton.config import Config, EngineConfig
from baton.core import garbage
from baton.core.messages import Role
from loadgen.slo import Slo
from simulator.fleet.fleet import Fleet
from simulator.fleet.setup import PoolSizes, block_tokens_of, fleet_spec, machine_of
from simulator.fleet.simulate import GARBAGE_THRESHOLDS, faster
from simulator.fleet.spec import FleetSpec
from simulator.fleet.workload import of_plan
from simulator.plan.clusters import ClusterPlan, ClusterVerdict
from simulator.plan.region import SLACK
from simulator.plan.shapes import EngineSize, PlannedLoad, PlanObjectives


def spec_of(
    cluster: ClusterPlan, objectives: PlanObjectives, size: EngineSize, *, block_tokens: int
) -> FleetSpec:
    """Describe the fleet. What the environment says of engines and routers holds, except where sizes are
    given here."""
    config = Config()
    sized = {
        "block_tokens": block_tokens,
        "step_tokens_max": size.chunk_tokens,
        "batch_sequences_max": size.batch_max,
        "tpot_slo_s": objectives.tpot_s,
    }
    counts = {role: pool.count for role, pool in cluster.pools.items()}
    pools = PoolSizes(*(counts.get(role, 0) for role in (Role.PREFILL, Role.DECODE, Role.AGGREGATED)))
    specs = [
        fleet_spec(
            machine_of(pool.shape.node),
            pools,
            block_tokens=block_tokens,
            router=config.router,
            engine=EngineConfig.model_validate({**config.engine.model_dump(), **sized}),
            slo_classes={"": (objectives.ttft_s, objectives.tpot_s)},
            refuses_late=config.slo.late == "refuse",
        )
        for pool in cluster.pools.values()
    ]
    # Each of these is the whole cluster on the machines of one pool, from which that pool is taken.
    return replace(specs[0], workers=tuple(spec.workers[i] for i, spec in enumerate(specs)))


def verify(cluster: ClusterPlan, load: PlannedLoad) -> ClusterVerdict:
    """Return the shares of all requests that met both objectives, and each. A run that can no longer come
    near the goal is given up."""
    offered, wanted = len(load.plan.requests), load.objectives
    spec = spec_of(cluster, wanted, load.size, block_tokens=block_tokens_of(load.plan))
    fleet = Fleet(spec, trace_block_tokens=float(load.plan.block_tokens))

    def may_come_near(fleet: Fleet) -> bool:
        missed = len(fleet.stats) - fleet.met + fleet.late_count
        return missed <= (1 - wanted.attain + SLACK) * offered

    with garbage.spared(GARBAGE_THRESHOLDS):
        fleet.run(faster(of_plan(load.plan), load.factor), observer=may_come_near)
    return _verdict(fleet, Slo(wanted.ttft_s, wanted.tpot_s), offered)


def _verdict(fleet: Fleet, slo: Slo, offered: int) -> ClusterVerdict:
    ended = list(fleet.stats)
    met, ttft_met, tpot_met = (
        sum(map(meets, ended)) for meets in (slo.is_met, slo.meets_ttft, slo.meets_tpot)
    )
    late = fleet.late_count
    known = len(ended) + late
    if not fleet.is_stopped:
        return ClusterVerdict(met / offered, ttft_met / offered, tpot_met / offered, so_far=met / offered)
    left = offered - known
    return ClusterVerdict(
        met=(left + met) / offered,
        ttft_met=(left + ttft_met) / offered,
        tpot_met=(left + late + tpot_met) / offered,
        aborted=True,
        so_far=met / max(1, known),
    )
