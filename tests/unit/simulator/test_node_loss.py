"""The loss of a node of a pool whose experts are divided: what is missing, the pause, and the streams."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import Config
from baton.config.experts import ExpertsConfig
from baton.core.costs import StepCosts
from baton.core.errors import SetupError
from baton.core.messages import Role
from loadgen.records import RequestOutcome
from simulator.experts.layout import ExpertLayout
from simulator.experts.loss import NodeLoss, lose_node
from simulator.experts.pool import ExpertPool
from simulator.experts.popularity import ExpertPopularity
from simulator.fleet.expert_cluster import ExpertCluster, ExpertClusterSpec
from simulator.fleet.fleet import Fleet
from simulator.fleet.node_loss import NodeLosses, PlannedNodeLoss
from simulator.fleet.runs import StepRun
from simulator.fleet.setup import PoolSizes
from simulator.fleet.worker import MacroWorker
from simulator.fleet.workload import FleetRequest
from simulator.hardware import find_gpu
from simulator.models import MODELS, ModelShape
from tests.unit.simulator.test_fleet import assert_at_rest, draws, spec_of
from tests.unit.simulator.test_simulate_command import run

COSTS = StepCosts(0.01, 1e-4, 1e-3, 1e-8, 1e-9)
SMALL = ModelShape("small", 4, 1024, 8, 8, 128, 512, 1000, experts=16, experts_used=2)


def pool(ranks: int, slots: int, node_gpus: int = 4) -> ExpertPool:
    layout = ExpertLayout(ranks, ranks, slots, node_gpus=node_gpus)
    return ExpertPool(SMALL, find_gpu("h100"), layout, ExpertPopularity.parse("zipf:0.5", SMALL))


def missing_without(one: ExpertPool, node: str) -> int:
    nodes = {rank.rank_id: rank.node_id for rank in one.ranks}
    return sum(
        all(nodes[holder] == node for holder in holders) for holders in one.placement.map.replicas().values()
    )


@pytest.mark.parametrize(("ranks", "slots"), [(16, 2), (12, 2), (8, 3), (8, 4)])
def test_the_node_that_alone_has_most_experts_is_lost(ranks, slots):
    one = pool(ranks, slots)
    loss = lose_node(one, file_bytes_s=1e9)
    nodes = {rank.node_id for rank in one.ranks}
    assert loss.missing == max(missing_without(one, node) for node in nodes)
    assert loss.missing == missing_without(one, loss.node_id)


def test_with_two_replicas_of_every_expert_nothing_is_missing():
    loss = lose_node(pool(16, 2))
    assert (loss.missing, loss.load_s) == (0, 0.0)
    assert loss.smaller is not None
    assert (loss.smaller.layout.ranks, loss.smaller.layout.callers) == (12, 12)
    held = loss.smaller.placement.map.replicas()
    assert len(held) == 4 * 16
    assert all(rank.node_id != loss.node_id for rank in loss.smaller.ranks)


def test_what_is_missing_is_read_by_the_nodes_that_are_left():
    one = pool(12, 2)  # 24 slots for 16 experts; 16 without a node
    loss = lose_node(one, file_bytes_s=1e9)
    assert loss.smaller is not None
    assert loss.missing > 0
    # No node reads less than an even part, or more than everything.
    each_s = one.expert_bytes / 1e9
    assert loss.missing / 2 * each_s <= loss.load_s <= loss.missing * each_s


def test_the_rest_use_more_slots_than_planned_if_they_have_memory():
    loss = lose_node(pool(8, 2))  # 16 slots for 16 experts
    assert loss.missing == 4 * 8
    assert loss.smaller is not None
    assert loss.smaller.layout.slots == 4
    assert len(loss.smaller.placement.map.replicas()) == 4 * 16


def test_experts_for_which_the_rest_have_no_memory_are_waited_for():
    model = MODELS["deepseek-v3"]
    popularity = ExpertPopularity.parse("uniform", model)
    tight = ExpertPool(model, find_gpu("h100"), ExpertLayout(16, 16, 16), popularity)
    loss = lose_node(tight)  # 16 more slots of 2.6 GB on each GPU
    assert loss.smaller is None
    assert loss.missing == 58 * 128


def test_deepseek_on_its_published_decode_pool():
    model = MODELS["deepseek-v3"]
    popularity = ExpertPopularity.parse("zipf:1.0", model)

    def of(slots: int) -> ExpertPool:
        return ExpertPool(model, find_gpu("h100"), ExpertLayout(72, 72, slots), popularity)

    single, double = lose_node(of(4)), lose_node(of(8))
    assert single.missing > 1000
    assert double.missing == 0
    assert single.load_s > 1.0
    assert of(4).kv_pool_bytes() - of(8).kv_pool_bytes() == pytest.approx(4 * 58 * model.expert_weights)


# --- in a running cluster -------------------------------------------------------------------------


def planned(
    role=Role.DECODE, *, at_s=5.0, load_s=0.0, smaller: StepCosts | None = COSTS, back_s=10.0, gpus=2
):
    loss = NodeLoss("node-001", 3 if load_s else 0, load_s, None)
    return PlannedNodeLoss(role, at_s, loss, gpus, smaller, noticed_s=0.5, back_s=back_s)


def lost(plan: PlannedNodeLoss, *, seed=1, count=300, rate=20.0):
    spec = spec_of((Role.PREFILL, 4), (Role.DECODE, 6), costs=COSTS, any_role=False)
    fleet = Fleet(spec, trace_block_tokens=32)
    NodeLosses(fleet, plan)
    fleet.run(iter(draws(count, seed=seed, rate=rate)))
    return fleet


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_is_completed_and_nothing_is_held_afterwards(role, seed):
    fleet = lost(planned(role, at_s=2.0), seed=seed, rate=100.0)
    assert Counter(record.outcome for record in fleet.stats) == {RequestOutcome.COMPLETED: 300}
    asked = {request.number: request.output_tokens for request in draws(300, seed=seed, rate=100.0)}
    assert {record.index: record.completion_tokens for record in fleet.stats} == asked
    assert any((record.attempts or 1) > 1 for record in fleet.stats)
    assert len(fleet.workers) in (8, 10)
    assert_at_rest(fleet)


def test_the_successors_serve_with_the_costs_from_before():
    slow = StepCosts(*(4 * cost for cost in (COSTS.base_s, COSTS.prompt_token_s, COSTS.decode_s)), 0.0)
    fleet = lost(planned(smaller=slow, back_s=4.0), count=400)
    decode = [worker for worker in fleet.workers if worker.spec.role is Role.DECODE]
    assert len(decode) == 6
    assert all(worker.spec.costs == COSTS for worker in decode)
    assert {f"decode-{number}.0" for number in (4, 5)}.isdisjoint(worker.worker_id for worker in decode)
    later = [record for record in fleet.stats if record.planned_s > 12.0]
    assert any("decode-6.0" in record.served_by for record in later)


def test_a_stream_pauses_for_as_long_as_experts_are_loaded():
    spec = spec_of((Role.PREFILL, 1), (Role.DECODE, 3), any_role=False)

    def ended_s(load_s: float) -> float:
        fleet = Fleet(replace(spec, hop_s=0.0), trace_block_tokens=32)
        NodeLosses(fleet, planned(at_s=0.05, load_s=load_s, gpus=1))
        fleet.run(iter([FleetRequest(0, 0.0, 32, 200, (1,))]))
        (record,) = fleet.stats
        assert "decode-2.0" not in record.served_by
        return record.ended_s or 0.0

    assert ended_s(3.0) - ended_s(1.0) == pytest.approx(2.0, abs=0.05)


def test_without_room_for_the_experts_nothing_is_computed_until_the_node_is_back():
    plan = planned(smaller=None, back_s=8.0)
    assert plan.pause_s == 8.0
    fleet = lost(plan)
    during = [
        r
        for r in fleet.stats
        if r.ended_s is not None and 5.1 < r.ended_s < 12.9 and r.completion_tokens != 1
    ]
    assert during == []


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 50),
    first_s=st.floats(0.001, 0.1),
    growth_s=st.floats(0, 0.001),
    pause_s=st.floats(0, 9),
)
def test_a_pause_makes_a_run_longer_by_itself(count, first_s, growth_s, pause_s):
    run_of = StepRun(0.0, count, 1, [], 1, first_s, growth_s, False, 1)
    paused = replace(run_of, pause_s=pause_s)
    assert paused.seconds(count) == pytest.approx(run_of.seconds(count) + pause_s)
    assert paused.step_at(-1.0) == 1


def test_a_pause_ends_the_step_under_way_later_and_begins_none():
    fleet = Fleet(spec_of((Role.AGGREGATED, 1)))
    (worker,) = fleet.workers
    assert isinstance(worker, MacroWorker)
    worker.engine.pause(3.0)
    fleet.run(iter([FleetRequest(0, 0.0, 32, 2, (1,))]))
    (record,) = fleet.stats
    assert 3.0 < (record.ended_s or 0.0) < 3.2
    assert worker.usage().busy_s < 0.2


# --- the cluster as it is asked for ---------------------------------------------------------------


def cluster(*losses: str, prefill=24, decode=24, **experts) -> ExpertCluster:
    settings_of = ExpertsConfig(parallel="workers", rows="int8", **experts)
    config = Config().model_copy(update={"experts": settings_of})
    spec = ExpertClusterSpec(
        "deepseek-v3",
        "h100",
        1.0,
        PoolSizes(prefill, decode),
        "zipf:1.0",
        once_per_node=True,
        lose_node=losses,
    )
    return ExpertCluster(spec, config)


def test_pools_have_maps_of_their_own_and_only_prompts_go_once_per_node():
    found = cluster(replicas=1.125)
    assert found.pools[Role.PREFILL].layout.once_per_node
    assert not found.pools[Role.DECODE].layout.once_per_node
    assert found.pools[Role.DECODE].layout.slots == 12


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        ("decode", "write a role and a time"),
        ("chef@4", "write a role"),
        ("aggregated@4", "no aggregated pool"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(loss, complaint):
    with pytest.raises(SetupError, match=complaint):
        cluster(loss)


def test_one_node_alone_cannot_be_lost():
    with pytest.raises(SetupError, match="on one node alone"):
        cluster("decode@4", prefill=24, decode=8)


EXPERTS = (
    "--model",
    "deepseek-v3",
    "--weight-bytes",
    "1",
    "--aggregated",
    "0",
    "--prefill",
    "16",
    "--decode",
    "24",
)
PARALLEL = ("--set", "experts.parallel=workers", "--set", "experts.rows=int8")


def test_the_command_says_what_a_loss_means_and_reports_its_options(tmp_path):
    out = tmp_path / "out.json"
    done = run(
        tmp_path, *EXPERTS, *PARALLEL, "--lose-node", "decode@3", "--node-back", "5", "--json", str(out)
    )
    assert done.exit_code == 0, done.output
    assert "3 s: the decode pool loses a node;" in done.stderr
    report = json.loads(out.read_bytes())
    assert report["settings"]["options"]["lose_node"] == "decode@3"
    assert report["settings"]["options"]["expert_slots"] == "16 (prefill), 11 (decode)"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--lose-node", "decode@3"), "--lose-node needs --set experts.parallel=workers"),
        (("--rows-once-per-node",), "--rows-once-per-node needs"),
        ((*PARALLEL, "--tp", "2"), "workers of one GPU (--tp 1)"),
        ((*PARALLEL, "--autoscale", "baton"), "without --costs and --autoscale"),
        ((*PARALLEL, "--search", "--lose-node", "decode@3"), "leave --lose-node out"),
        ((*PARALLEL, "--model", "llama-3-8b"), "no experts to divide"),
        ((*PARALLEL, "--decode", "8"), "take more workers"),
    ],
)
def test_options_of_experts_that_cannot_be_meant_are_refused(tmp_path, arguments, complaint):
    done = run(tmp_path, *EXPERTS, *arguments)
    assert done.exit_code == 2, done.output
    assert complaint in " ".join(done.stderr.replace("│", "").split())
