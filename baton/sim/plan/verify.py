"""A planned cluster in the fleet simulator: the production router over modelled workers."""

from baton.config import EngineConfig
from baton.config_router import RouterConfig
from baton.core.messages import Role
from baton.sim.fleet.fleet import Fleet
from baton.sim.fleet.spec import FleetSpec, WorkerSpec
from baton.sim.fleet.workload import of_plan
from baton.sim.plan.search import ClusterPlan, Pool, Verdict
from baton.sim.plan.shapes import EngineSize, Objectives
from loadgen.lengths import Plan
from loadgen.records import Outcome

BLOCK_TOKENS = 512


def fleet_spec(plan: ClusterPlan, objectives: Objectives, size: EngineSize) -> FleetSpec:
    workers = tuple((_worker(role, pool, objectives, size), pool.count) for role, pool in plan.pools.items())
    router = RouterConfig(disaggregate=plan.both is None)
    classes = {"": (objectives.ttft_s, objectives.tpot_s)}
    return FleetSpec(workers=workers, router=router, slo_classes=classes)


def _worker(role: Role, pool: Pool, objectives: Objectives, size: EngineSize) -> WorkerSpec:
    node = pool.shape.node
    pool_tokens = int(node.kv_pool_bytes() / node.kv_bytes_per_token)
    return WorkerSpec(
        role=role,
        costs=node.costs(role, chunk_tokens=size.chunk_tokens),
        block_tokens=BLOCK_TOKENS,
        block_count=max(1, pool_tokens // BLOCK_TOKENS),
        kv_token_bytes=node.kv_bytes_per_token,
        max_model_tokens=pool_tokens,
        engine=EngineConfig(
            step_tokens_max=size.chunk_tokens,
            batch_sequences_max=size.batch_max,
            tpot_slo_s=objectives.tpot_s,
            waiting_sequences_max=4096,
        ),
        send_bytes_s=node.transfer_bytes_s,
        receive_bytes_s=node.transfer_bytes_s,
    )


def verify(cluster: ClusterPlan, plan: Plan, objectives: Objectives, size: EngineSize) -> Verdict:
    """Shares of the requests of `plan` that met both objectives, and each. A run whose misses are too many
    already stops, and tells of those that ended."""
    fleet = Fleet(
        fleet_spec(cluster, objectives, size), trace_block_tokens=float(plan.block_tokens) or BLOCK_TOKENS
    )
    misses_max = (1 - objectives.attain) * len(plan.requests) + 1
    fleet.run(of_plan(plan), observer=lambda f: len(f.tally) - f.met <= misses_max)
    met = ttft_met = tpot_met = 0
    for record in fleet.tally:
        if record.outcome is not Outcome.COMPLETED:
            continue
        in_time = record.ttft_s is not None and record.ttft_s <= objectives.ttft_s
        steady = record.tpot_s is None or record.tpot_s <= objectives.tpot_s
        ttft_met += in_time
        tpot_met += steady
        met += in_time and steady
    ended = max(1, len(fleet.tally))
    share = met / ended
    if fleet.is_stopped:
        share = min(share, objectives.attain - 1e-6)
    return Verdict(share, ttft_met / ended, tpot_met / ended)
