"""Blocks that a host's store has are seconds saved at the workers of that host."""

import pytest

from baton.core.costs import PhaseTimings, StepCosts
from baton.core.ids import NodeId
from baton.core.messages import Role, WorkerHello
from baton.core.store import BlockLocation, NodeRef, Tier
from router.decisions.cluster.view import ClusterView
from router.decisions.prediction.forecast import Prediction, SequenceNeeds
from router.decisions.prediction.predictor import Predictor
from router.decisions.stored_prefix import stored_prefix

COSTS = StepCosts(0.005, 2e-4, 1e-3, 1e-7)
BLOCKS, BLOCK_TOKENS = 100, 32


def hello(name, host):
    return WorkerHello(
        name,
        Role.AGGREGATED,
        "f",
        "m",
        BLOCK_TOKENS,
        1000,
        32_000,
        costs=COSTS,
        block_bytes=400_000,
        host=host,
    )


@pytest.fixture
def cluster():
    view = ClusterView(silence_s=3.0)
    for name, host in (("near", "a"), ("far", "b"), ("none", "c")):
        view.join(hello(name, host), f"{name}:1")
    return view


def held(tier, count=BLOCKS):
    location = BlockLocation(NodeRef(NodeId("n1"), "n1:1"), tier)
    return stored_prefix([(location,)] * count, {NodeId("n1"): "a", NodeId("n2"): "b"})


def needs(stored, tokens=BLOCKS * BLOCK_TOKENS):
    return SequenceNeeds(tokens, 0, 16, 0.0, 0.0, 0.0, stored=stored)


def predict(cluster, worker, stored, cached=0):
    predictor = Predictor(error_max=1.0)
    return predictor.prefill(cluster[worker].snapshot, needs(stored), cached, now_s=0.0)


def test_memory_of_the_own_host_beats_a_peers_and_that_beats_computing(cluster):
    stored = held(Tier.HOST)
    near, far, none = (predict(cluster, w, stored) for w in ("near", "far", "none"))
    assert near.ttft_s < far.ttft_s < none.ttft_s / 4
    assert none.store_load_s == 0.0
    assert near.store_load_s > 0.0


def test_what_the_pool_has_is_not_brought(cluster):
    whole, half = (
        predict(cluster, "near", held(Tier.SSD), cached) for cached in (0, BLOCKS * BLOCK_TOKENS // 2)
    )
    assert 0 < half.raw_store_load_s < whole.raw_store_load_s


def test_blocks_after_a_gap_are_of_no_use(cluster):
    assert predict(cluster, "near", held(Tier.HOST, 0) or None).raw_store_load_s == 0.0


def test_a_store_that_is_slow_is_believed_to_be(cluster):
    predictor = Predictor(error_max=1e9)
    wanted, worker = needs(held(Tier.SSD)), cluster["near"].snapshot
    first = predictor.prefill(worker, wanted, 0, now_s=0.0)
    for _ in range(30):
        said = predictor.prefill(worker, wanted, 0, now_s=0.0)
        slow = PhaseTimings(wait_s=0.0, load_s=4 * first.raw_store_load_s, compute_s=said.raw_compute_s)
        elapsed_s = slow.load_s + slow.compute_s + 0.001
        predictor.observe_first_token(worker, Prediction(said, 0.0, 0.0, 0.0), elapsed_s, slow)
    learnt = predictor.prefill(worker, wanted, 0, now_s=0.0)
    assert learnt.store_load_s > 2 * first.store_load_s
