"""The fleet simulator: a queue that theory knows, accounts that balance, and rules that production has as
well."""

import random
from dataclasses import replace
from itertools import islice

import pytest

from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.messages import Role
from loadgen.lengths import TraceScaling, make_plan
from loadgen.records import RequestOutcome
from loadgen.traces import Trace, TraceFormat, TraceRequest
from simulator.fleet.fleet import Fleet
from simulator.fleet.spec import FleetSpec, FleetWorkerSpec, StoreSpec
from simulator.fleet.worker import MacroWorker
from simulator.fleet.workload import FleetRequest, merged, of_plan, poisson

COSTS = StepCosts(0.004, 2e-5, 1e-4, 1e-8, 1e-9)


def spec_of(
    *pools: tuple[Role, int],
    costs: StepCosts = COSTS,
    block_count: int = 4000,
    block_tokens: int = 32,
    step_tokens: int = 512,
    overlap: bool = True,
    link_bytes_s: float = 1e10,
    **router: object,
) -> FleetSpec:
    engine = EngineConfig(
        block_tokens=block_tokens, step_tokens_max=step_tokens, overlap_steps=overlap, tpot_slo_s=0.0
    )
    kinds = tuple(
        (
            FleetWorkerSpec(
                role,
                costs,
                block_tokens,
                block_count,
                kv_token_bytes=1000.0,
                max_model_tokens=100_000,
                engine=engine,
                send_bytes_s=link_bytes_s,
                receive_bytes_s=link_bytes_s,
            ),
            count,
        )
        for role, count in pools
    )
    settings: dict[str, object] = {"policy": "least_loaded", "queue_wait_s": 60.0, **router}
    return FleetSpec(kinds, RouterConfig.model_validate(settings), slo_classes={"": (1.0, 0.05)})


def draws(count: int, *, seed: int, rate: float = 20.0, prefixes: int = 6) -> list[FleetRequest]:
    """Yield short prompts, some of which begin alike."""
    rng = random.Random(seed)
    at_s, requests = 0.0, list[FleetRequest]()
    for number in range(count):
        at_s += rng.expovariate(rate)
        shared = [1000 * rng.randrange(prefixes) + i for i in range(rng.randrange(1, 8))]
        ids = (*shared, *(100_000 + 100 * number + i for i in range(rng.randrange(1, 6))))
        tokens = 32 * len(ids) - rng.randrange(32)
        requests.append(FleetRequest(number, at_s, tokens, rng.randrange(1, 60), ids))
    return requests


def ran(spec: FleetSpec, requests: list[FleetRequest]) -> Fleet:
    fleet = Fleet(spec, trace_block_tokens=spec.workers[0][0].block_tokens)
    fleet.run(iter(requests))
    return fleet


def assert_at_rest(fleet: Fleet) -> None:
    fleet.check()
    for worker in fleet.workers:
        assert isinstance(worker, MacroWorker)
        assert worker.is_idle
        assert worker.pool.held_count == 0
        worker.pool.check()
        worker.cache.check()
        assert worker.engine.context_tokens == 0
        assert worker.engine.running_count == worker.engine.waiting_count == 0
        assert not worker.sender.flows
        assert not worker.receiver.flows


def test_uniform_prompts_wait_as_long_as_an_m_d_1_queue_says() -> None:
    """The mean time in the system is D + R·D²/(2(1 - R·D)), with D a service and R the rate."""
    tokens, load = 512, 0.6
    service_s = COSTS.prompt_s(0, tokens, chunk_tokens=512)
    rate = load / service_s
    spec = replace(
        spec_of((Role.PREFILL, 1), (Role.DECODE, 1), overlap=False, block_tokens=512),
        hop_s=0.0,
        heartbeat_s=1.0,
    )
    fleet = Fleet(spec)
    fleet.run(poisson(rate=rate, count=20_000, input_tokens=tokens, output_tokens=1, seed=3))
    waits = [record.ttft_s or 0.0 for record in fleet.stats]
    expected_s = service_s + rate * service_s**2 / (2 * (1 - load))
    assert sum(waits) / len(waits) == pytest.approx(expected_s, rel=0.02)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "pools",
    [
        ((Role.PREFILL, 2), (Role.DECODE, 2)),
        ((Role.AGGREGATED, 2),),
        ((Role.PREFILL, 1), (Role.AGGREGATED, 2)),
    ],
)
def test_all_requests_end_and_nothing_is_held(pools: tuple[tuple[Role, int], ...], seed: int) -> None:
    """Accounts balance even where blocks are so few that decode workers refuse and preempt."""
    requests = draws(300, seed=seed)
    fleet = ran(spec_of(*pools, block_count=40 if seed % 2 else 4000, policy="cached_prefix"), requests)
    assert sorted(record.index for record in fleet.stats) == list(range(300))
    for record in fleet.stats:
        if record.outcome is RequestOutcome.COMPLETED:
            assert record.completion_tokens == requests[record.index].output_tokens
            assert record.ttft_s is not None
            assert record.ttft_s > 0
    if not seed % 2:
        assert all(record.outcome is RequestOutcome.COMPLETED for record in fleet.stats)
    assert_at_rest(fleet)


def test_a_run_is_a_function_of_its_seed() -> None:
    spec = spec_of((Role.PREFILL, 2), (Role.DECODE, 1), policy="random")
    one, two = (list(ran(spec, draws(100, seed=1)).stats) for _ in range(2))
    assert one == two


def test_prefixes_are_found_where_they_were_computed() -> None:
    spec = spec_of((Role.PREFILL, 1), (Role.DECODE, 1), policy="cached_prefix")
    first = FleetRequest(0, 0.0, 100, 5, (1, 2, 3, 4))
    again = FleetRequest(1, 5.0, 110, 5, (1, 2, 3, 9))
    records = {r.index: r for r in ran(spec, [first, again]).stats}
    assert (records[0].cached_tokens, records[1].cached_tokens) == (0, 96)


def test_kv_that_is_not_there_yet_delays_the_second_token_only() -> None:
    fast, slow = (
        spec_of((Role.PREFILL, 1), (Role.DECODE, 1), link_bytes_s=bytes_s) for bytes_s in (1e12, 1e6)
    )
    request = FleetRequest(0, 0.0, 1000, 10, ())
    quick, late = (next(iter(ran(spec, [request]).stats)) for spec in (fast, slow))
    assert late.ttft_s == pytest.approx(quick.ttft_s)
    # 1 MB at 1 MB/s, of which one chunk moves while the next is computed
    assert late.e2e_s is not None
    assert quick.e2e_s is not None
    assert late.e2e_s - quick.e2e_s == pytest.approx(1.0, rel=0.05)


def test_copies_of_a_trace_share_nothing_and_keep_its_load() -> None:
    requests = tuple(TraceRequest(float(i), 512, 5, (i,)) for i in range(100))
    plan = make_plan(Trace(TraceFormat.MOONCAKE, requests), TraceScaling(), spread=False, seed=0)
    requests = list(of_plan(plan, copies=5))
    assert len(requests) == 500
    assert [d.at_s for d in requests] == sorted(d.at_s for d in requests)
    assert {d.copy for d in requests} == set(range(5))
    assert max(d.at_s for d in requests) <= 101
    in_first_half = sum(d.at_s < 50 for d in requests)
    assert 240 <= in_first_half <= 260


def test_streams_are_merged_in_order() -> None:
    one = poisson(rate=5, count=20, input_tokens=10, output_tokens=2, seed=1, tenant="a")
    two = poisson(rate=50, count=20, input_tokens=10, output_tokens=2, seed=2, tenant="b")
    both = list(islice(merged([one, two]), 40))
    assert [d.number for d in both] == list(range(40))
    assert [d.at_s for d in both] == sorted(d.at_s for d in both)


def test_the_store_brings_back_what_the_pool_lost() -> None:
    """A pool holds one prompt: the second time its blocks come from host memory, and the prompt is faster."""
    dear = StepCosts(0.004, 1e-3, 1e-4, 1e-8)
    plain = spec_of((Role.AGGREGATED, 1), costs=dear, block_count=40)
    stored = replace(plain, store=StoreSpec(host_bytes=32e6, host_bytes_s=1e9))
    ids = tuple(range(30))
    requests = [
        FleetRequest(0, 0.0, 960, 2, ids),
        FleetRequest(1, 10.0, 960, 2, tuple(range(100, 130))),
        FleetRequest(2, 20.0, 960, 2, ids),
    ]
    without, with_store = ({r.index: r for r in ran(spec, requests).stats} for spec in (plain, stored))
    assert (without[2].cached_tokens or 0) < 300
    assert (with_store[2].cached_tokens or 0) >= 896
    assert (with_store[2].ttft_s or 9) < (without[2].ttft_s or 0) / 4


@pytest.mark.parametrize("seed", range(3))
def test_with_a_store_all_requests_end_and_nothing_is_held(seed: int) -> None:
    spec = replace(
        spec_of((Role.PREFILL, 2), (Role.DECODE, 2), block_count=60, policy="cached_prefix"),
        store=StoreSpec(host_bytes=2e6, ssd_bytes=4e6, ssd_read_bytes_s=1e7, peer_bytes_s=1e7),
    )
    fleet = ran(spec, draws(250, seed=seed))
    assert len(fleet.stats) == 250
    assert_at_rest(fleet)
