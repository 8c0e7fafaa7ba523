"""The search over the real simulator, against every cluster that costs less."""

import json
import random
from fractions import Fraction
from itertools import product

import pytest

from baton.core.messages import Role
from commands.simulate import simulate
from loadgen.lengths import TraceScaling, make_plan
from loadgen.sources import open_trace
from simulator.fleet.fleet import Fleet
from simulator.fleet.simulate import faster
from simulator.fleet.workload import of_plan
from simulator.hardware import Node, find_gpu
from simulator.models import find_model
from simulator.plan.clusters import ClusterKind, ReplicaShape
from simulator.plan.search import search
from simulator.plan.shapes import EngineSize, PlannedLoad, PlanObjectives, is_slower, kinds, shapes
from simulator.plan.verify import block_tokens_of, spec_of, verify

PRICES = {"a100": 1.79, "l40s": 0.8}
ALIKE = {"h100": 2.2, "a100": 1.0}
"""The first GPU is faster than the second in everything."""
SIZE = EngineSize(2048, 256)
ATTAIN = 0.9


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Files of one trace, by the number of its first requests that they have. A cluster that is too small
    simulates sixty of them in twice the time of forty."""
    rng, at_s, rows = random.Random(5), 0.0, []
    for number in range(60):
        at_s += rng.expovariate(8.0)
        tokens = rng.choice([600, 1500, 3000, 6000, 9000])
        own = [1000 * number + k for k in range((tokens - 1) // 512)]
        rows.append(
            {"timestamp": int(1000 * at_s), "input_length": tokens, "output_length": rng.randrange(20, 200),
             "hash_ids": [number % 7, *own]}
        )  # fmt: skip
    folder = tmp_path_factory.mktemp("plan")
    paths = {count: folder / f"{count}.jsonl" for count in (40, 60)}
    for count, path in paths.items():
        path.write_text("\n".join(map(json.dumps, rows[:count])))
    return paths


@pytest.fixture
def trace(traces):
    return traces[40]


def load_of(trace, *, rate, ttft_s=1.5, tpot_s=0.03):
    plan = make_plan(open_trace(str(trace)), TraceScaling(Fraction(1), Fraction(1)), spread=True, seed=0)
    own_rate = (len(plan.requests) - 1) / (plan.requests[-1].at_s - plan.requests[0].at_s)
    return PlannedLoad(plan, rate / own_rate, rate, PlanObjectives(ttft_s, tpot_s, ATTAIN), SIZE)


def kinds_of(load, prices=PRICES):
    model, block_tokens = find_model("llama-3-8b"), block_tokens_of(load.plan)
    listed = shapes(model, prices, tensors=[1], pipelines=[1], weight_bytes=2, block_tokens=block_tokens)
    return kinds(load, listed)


def whole_run(cluster, load):
    """Simulate to the end, whatever the cluster misses."""
    spec = spec_of(cluster, load.objectives, SIZE, block_tokens=block_tokens_of(load.plan))
    fleet = Fleet(spec, trace_block_tokens=float(load.plan.block_tokens))
    fleet.run(faster(of_plan(load.plan), load.factor))
    assert len(fleet.stats) == len(load.plan.requests)
    return fleet.met / len(load.plan.requests)


def clusters_below(kind, price):
    spans = [range(1, int(price / each) + 1) for each in kind.prices]
    return [c for c in product(*spans) if kind.price_of(c) < price - 1e-6]


@pytest.mark.parametrize(
    ("rate", "prices", "requests"), [(4.0, PRICES, 40), (8.0, PRICES, 40), (8.0, ALIKE, 60)]
)
def test_no_cheaper_cluster_of_any_kind_or_split_attains_the_goal(traces, rate, prices, requests):
    load = load_of(traces[requests], rate=rate)
    found = search(
        kinds_of(load, prices), lambda c: verify(c, load), attain=ATTAIN, simulations_max=100,
        is_slower=is_slower,
    )  # fmt: skip
    assert found.is_complete
    assert found.best is not None
    assert whole_run(found.best.plan, load) == found.best.verdict.met >= ATTAIN
    compared = 0
    for kind in kinds_of(load, prices):
        for counts in clusters_below(kind, found.best.plan.price_per_hour):
            met = whole_run(kind.cluster(counts), load)
            assert met < ATTAIN, (kind.name, counts)
            compared += 1
    assert compared >= 6


def test_a_run_that_was_given_up_would_not_have_done_better_than_its_bound(trace):
    load = load_of(trace, rate=10.0)
    given_up = 0
    for kind in kinds_of(load):
        for counts in product((1, 3), repeat=len(kind.shapes)):
            verdict, met = verify(kind.cluster(counts), load), whole_run(kind.cluster(counts), load)
            given_up += verdict.aborted
            assert met <= verdict.met if verdict.aborted else met == verdict.met
            assert verdict.aborted or met >= ATTAIN - 0.05
    assert given_up >= 4


def test_work_alone_rules_out_no_cluster_that_serves(trace):
    load = load_of(trace, rate=6.0, ttft_s=4.0)
    served = 0
    for kind in kinds_of(load):
        for counts in product(range(1, 3), repeat=len(kind.shapes)):
            if whole_run(kind.cluster(counts), load) >= ATTAIN:
                served += 1
                assert kind.can_do_the_work(counts), (kind.name, counts)
    assert served >= 3


@pytest.mark.parametrize("counts", [{"prefill": 3, "decode": 1}, {"aggregated": 4}])
def test_simulate_says_the_same_of_the_same_cluster(trace, tmp_path, counts):
    load = load_of(trace, rate=3.0)
    (kind,) = (
        k for k in kinds_of(load)
        if [role.value for role, _ in k.shapes] == list(counts)
        and {shape.node.gpu.name for _, shape in k.shapes} == {"a100"}
    )  # fmt: skip
    verdict = verify(kind.cluster(tuple(counts.values())), load)
    report = tmp_path / "report.json"
    simulate(
        str(trace), model="llama-3-8b", gpu="a100", tp=1, ttft_slo=1.5, tpot_slo=0.03, rate=3.0,
        json_to=str(report), **{role: str(count) for role, count in counts.items()},
    )  # fmt: skip
    figures = json.loads(report.read_text())
    assert not verdict.aborted
    assert figures["goodput_share"] == verdict.met


def test_a_kind_is_slower_where_it_is_better_in_nothing():
    model = find_model("llama-3-8b")

    def kind(**gpus):
        return ClusterKind(
            tuple((Role[r], ReplicaShape(Node(model, find_gpu(name)), 1.0)) for r, name in gpus.items()), (1,)
        )

    h100, a100, l40s, h20 = (kind(AGGREGATED=name) for name in ("h100", "a100", "l40s", "h20"))
    assert is_slower(a100, h100)
    assert is_slower(l40s, h100)
    assert not is_slower(h100, a100)
    assert not is_slower(l40s, a100)  # more FLOPs, less memory
    assert not is_slower(h20, h100)  # fewer FLOPs, more memory
    assert is_slower(kind(PREFILL="a100", DECODE="h100"), kind(PREFILL="h100", DECODE="h100"))
    assert not is_slower(kind(PREFILL="a100", DECODE="h100"), kind(PREFILL="h100", DECODE="a100"))
    assert not is_slower(a100, kind(PREFILL="h100", DECODE="h100"))
