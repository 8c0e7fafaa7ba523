"""Goodput of DeepSeek-V3 on H100 nodes while a node is lost, by the replicas that experts have."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import msgspec

from baton.config import Config
from baton.core.messages import Role
from loadgen.records import RequestOutcome
from loadgen.slo import Slo
from simulator.experts.layout import NODE_GPUS
from simulator.fleet.expert_cluster import ExpertCluster, ExpertClusterSpec
from simulator.fleet.fleet import Fleet
from simulator.fleet.setup import PoolSizes, fleet_spec
from simulator.fleet.workload import FleetRequest

BLOCK_TOKENS, STEP_TOKENS, BATCH = 64, 16_384, 256
SEED = 0


@dataclass(frozen=True, slots=True)
class NodeLossCase:
    """A cluster and its traffic."""

    pool: Role
    """The pool that loses a node."""
    prefill_nodes: int
    decode_nodes: int
    load: str
    rate: float
    """Requests per second."""
    input_tokens: int
    output_tokens: int
    seconds: float
    at_s: float
    back_s: float
    slo: Slo
    window_s: float


class LossWindow(msgspec.Struct, frozen=True):
    """Requests that came in one period."""

    from_s: float
    arrived: int
    met: int


class LossRun(msgspec.Struct, frozen=True):
    """One number of replicas."""

    replicas: float
    slots: dict[str, int]
    kv_tokens: dict[str, int]
    """Tokens of KV that a GPU of each pool has room for."""
    what: str
    """What the loss means."""
    missing: int
    pause_s: float
    windows: list[LossWindow]
    met: float
    failed: int


def run(case: NodeLossCase, replicas: float) -> LossRun:
    """Raises SetupError when the model does not fit."""
    config = Config()
    experts = config.experts.model_copy(
        update={"parallel": "workers", "replicas": replicas, "rows": "int8", "overlap": True}
    )
    sizes = {"block_tokens": BLOCK_TOKENS, "step_tokens_max": STEP_TOKENS, "batch_sequences_max": BATCH}
    engine = config.engine.model_copy(update={**sizes, "tpot_slo_s": case.slo.tpot_s or 0.0})
    config = config.model_copy(
        update={
            "experts": experts,
            "engine": engine,
            "router": config.router.model_copy(update={"any_role": False}),
        }
    )
    pools = PoolSizes(case.prefill_nodes * NODE_GPUS, case.decode_nodes * NODE_GPUS)
    spec = ExpertClusterSpec(
        *("deepseek-v3", "h100", 1.0, pools, case.load),
        once_per_node=True,
        lose_node=(f"{case.pool}@{case.at_s}",),
        node_back_s=case.back_s,
    )
    cluster = ExpertCluster(spec, config)
    machines = cluster.machines(kv_bytes=None)
    fleet = Fleet(
        fleet_spec(
            machines,
            pools,
            block_tokens=BLOCK_TOKENS,
            router=config.router,
            engine=engine,
            slo_classes={"": (case.slo.ttft_s or 0.0, case.slo.tpot_s or 0.0)},
            seed=SEED,
        )
    )
    cluster.lose_nodes(fleet)
    fleet.run(_requests(case))
    planned = cluster.losses[0]
    return LossRun(
        replicas,
        {str(role): pool.layout.slots for role, pool in cluster.pools.items()},
        {str(role): int(one.kv_bytes / one.kv_token_bytes) for role, one in machines.items()},
        planned.words(),
        planned.loss.missing,
        planned.pause_s,
        _windows(case, fleet),
        fleet.met / max(1, len(fleet.stats)),
        sum(record.outcome is not RequestOutcome.COMPLETED for record in fleet.stats),
    )


def _requests(case: NodeLossCase) -> Iterator[FleetRequest]:
    """Draw requests that come as a Poisson process, with answers of all lengths up to twice the mean."""
    random, at_s, number = Random(SEED), 0.0, 0
    while (at_s := at_s + random.expovariate(case.rate)) < case.seconds:
        answer = random.randint(1, 2 * case.output_tokens - 1)
        yield FleetRequest(number, at_s, case.input_tokens, answer, ())
        number += 1


def _windows(case: NodeLossCase, fleet: Fleet) -> list[LossWindow]:
    count = max(1, round(case.seconds / case.window_s))
    arrived, met = [0] * count, [0] * count
    for record in fleet.stats:
        at = min(count - 1, int(record.planned_s / case.window_s))
        arrived[at] += 1
        met[at] += case.slo.is_met(record)
    return [
        LossWindow(number * case.window_s, *counts)
        for number, counts in enumerate(zip(arrived, met, strict=True))
    ]
