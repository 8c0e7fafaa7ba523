"""The macro worker gives the times that the production worker gives, step by step, for the same load."""

import random
from statistics import mean

import pytest

from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.messages import Role
from loadgen.records import RequestOutcome, RequestRecord
from simulator.fleet.fleet import Fleet, MakeWorker
from simulator.fleet.spec import FleetSpec, FleetWorkerSpec
from simulator.fleet.worker import MacroWorker
from simulator.fleet.workload import FleetRequest
from tests.unit.simulator.full_worker import FullWorker

COSTS = StepCosts(0.006, 4e-5, 2e-4, 2e-7, 1e-9)
BLOCK_TOKENS = 32


class InStep(MacroWorker):
    """A worker that reports at the instants at which the production worker does: blocks that came free are
    news then."""

    def begin(self, heartbeat_s: float, *, phase_s: float) -> None:
        super().begin(heartbeat_s, phase_s=heartbeat_s)


def demands_of(count: int, *, rate: float, seed: int) -> list[FleetRequest]:
    rng = random.Random(seed)
    at_s, requests = 0.0, list[FleetRequest]()
    for number in range(count):
        at_s += rng.expovariate(rate)
        shared = [100 * rng.randrange(8) + i for i in range(rng.choice((2, 5, 20)))]
        ids = (*shared, *(100_000 + 1000 * number + i for i in range(rng.choice((1, 4, 30)))))
        requests.append(
            FleetRequest(
                number, at_s, BLOCK_TOKENS * len(ids) - rng.randrange(32), rng.choice((5, 30, 90)), ids
            )
        )
    return requests


def spec_of(*pools: tuple[Role, int], block_count: int, tpot_slo_s: float) -> FleetSpec:
    engine = EngineConfig(
        block_tokens=BLOCK_TOKENS,
        step_tokens_max=512,
        batch_sequences_max=32,
        speculation="off",
        tpot_slo_s=tpot_slo_s,
    )
    kinds = tuple(
        (
            FleetWorkerSpec(
                role,
                COSTS,
                BLOCK_TOKENS,
                block_count,
                kv_token_bytes=10_000.0,
                max_model_tokens=8192,
                engine=engine,
                send_bytes_s=1e9,
                receive_bytes_s=1e9,
            ),
            count,
        )
        for role, count in pools
    )
    return FleetSpec(kinds, RouterConfig(policy="least_loaded", queue_wait_s=120.0))


def records_of(spec: FleetSpec, requests: list[FleetRequest], make_worker: MakeWorker) -> list[RequestRecord]:
    fleet = Fleet(spec, trace_block_tokens=BLOCK_TOKENS, make_worker=make_worker)
    fleet.run(iter(requests))
    records = sorted(fleet.stats, key=lambda record: record.index)
    assert all(record.outcome is RequestOutcome.COMPLETED for record in records)
    return records


@pytest.mark.parametrize(
    ("pools", "rate", "block_count", "tpot_slo_s", "tolerance"),
    [
        pytest.param(((Role.PREFILL, 2), (Role.DECODE, 1)), 36.0, 4000, 0.0, 0.08, id="apart"),
        pytest.param(((Role.PREFILL, 2), (Role.DECODE, 2)), 42.0, 260, 0.0, 0.08, id="few-blocks"),
        pytest.param(((Role.AGGREGATED, 2),), 30.0, 4000, 0.0, 0.08, id="aggregated"),
        pytest.param(((Role.AGGREGATED, 2),), 27.0, 4000, 0.02, 0.08, id="aggregated-with-objective"),
    ],
)
def test_times_are_those_of_the_production_worker(
    pools: tuple[tuple[Role, int], ...], rate: float, block_count: int, tpot_slo_s: float, tolerance: float
) -> None:
    spec = spec_of(*pools, block_count=block_count, tpot_slo_s=tpot_slo_s)
    requests = demands_of(250, rate=rate, seed=5)
    full = records_of(spec, requests, FullWorker)
    macro = records_of(spec, requests, InStep)
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        expected = mean(getattr(record, name) for record in full)
        assert mean(getattr(record, name) for record in macro) == pytest.approx(expected, rel=tolerance), name
    hits = [sum(record.cached_tokens or 0 for record in records) for records in (full, macro)]
    assert hits[1] == pytest.approx(hits[0], rel=0.1)
