"""A real cluster whose experts are on ranks of their own: ranks are killed and stopped, drained and scaled,
and every stream goes on with the tokens of transformers."""

import os
import random
import signal

import psutil
import pytest

from baton.core.experts import ExpertRankPhase
from baton.core.operate import DrainExpertRank, RebalanceExperts, ScaleExperts
from tests.integration.cluster import Cluster, eventually
from tests.integration.operating import Operator
from tests.integration.test_loss import Stream
from tests.integration.test_tokens import Reference
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RANKS, LAYERS, EXPERTS = 3, 3, 16
STRENGTH_S = 90.0
"""A machine of two cores takes some ten seconds to start a rank's process."""
SETTINGS = {
    "model__dtype": "float32",
    "engine__block_tokens": 16,
    "engine__kv_bytes": 16 * 2**20,
    "engine__step_tokens_max": 64,
    "experts__parallel": "ranks",
    "experts__ranks": RANKS,
    "experts__replicas": 2,
    "experts__rebalance_s": 2,
    "router__queue_wait_s": 120,
}


def group_of(operator, index=0):
    return operator.state().experts[index]


def is_strong(operator):
    """Whether all wanted ranks are ready and every expert has the replicas that there is memory for."""
    state = operator.state()
    return bool(state.experts) and all(
        len([r for r in g.ranks if r.phase is ExpertRankPhase.READY]) == g.wanted_ranks
        and not g.missing
        and not g.single
        and not g.loads_running
        for g in state.experts
    )


def until_strong(operator):
    try:
        eventually("full strength", lambda: is_strong(operator), timeout_s=STRENGTH_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; {operator.state().experts}") from None


def rank_pids(cluster):
    """Processes of expert ranks, by their ids."""
    found = {}
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        try:
            if "ExpertRankActor" in " ".join(process.cmdline()):
                found[process.pid] = process
        except psutil.Error:
            continue
    return sorted(found)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "moe"
    return make_model(
        path, "qwen3_moe", seed=3, num_experts=EXPERTS, num_experts_per_tok=4, num_hidden_layers=LAYERS
    )


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


@pytest.fixture(scope="module")
def cluster(model):
    with Cluster(model, prefill=0, decode=0, both=2, **SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def operator(cluster):
    found = Operator(cluster)
    until_strong(found)
    return found


def prompts(seed, count=4):
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(rng.randrange(20, 200))] for _ in range(count)]


def check(streams, reference):
    for stream in streams:
        stream.join(60)
        assert stream.error is None, stream.error
        assert stream.finish == "length"
        assert stream.tokens == reference.greedy(stream.prompt, stream.tokens)


def test_tokens_equal_transformers_and_rows_travel(cluster, operator, reference):
    before = group_of(operator)
    check([Stream(cluster, prompt) for prompt in prompts("cold")], reference)

    def counted():
        group = group_of(operator)
        return group if group.rebalances and max(group.expert_loads) else None

    after = eventually("counted", counted, timeout_s=20)
    assert after.callers == 2
    # A full rank gives up a second replica while experts move. When all have moved, each expert has two.
    until_strong(operator)
    assert sum(r.rows for r in after.ranks) > sum(r.rows for r in before.ranks)
    cluster.assert_idle()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("count", [1, 2])
def test_streams_do_not_notice_lost_ranks(cluster, operator, reference, fault, count):
    """Every expert has a second replica, but where two ranks are lost at once."""
    before = group_of(operator).losses
    streams = [Stream(cluster, prompt) for prompt in prompts(f"{fault} {count}")]
    for stream in streams:
        assert stream.first_token.wait(30)
    for pid in random.Random(count).sample(rank_pids(cluster), count):
        os.kill(pid, fault)
    check(streams, reference)
    eventually("all are lost", lambda: group_of(operator).losses == before + count, timeout_s=20)
    until_strong(operator)
    check([Stream(cluster, prompt) for prompt in prompts(f"after {fault} {count}", 2)], reference)
    cluster.assert_idle()


def parked(cluster):
    """Ids of the workers that the router knows to be parked."""
    found = [one for workers in cluster.health()["workers"].values() for one in workers]
    return {one["id"] for one in found if one["parked"]}


def test_streams_wait_for_a_group_that_is_lost_whole(cluster, operator, reference):
    """No rank is left. Its workers keep what they have, take nothing new, and go on when successors came."""
    before = {worker.worker_id: cluster.accounts(worker)["pid"] for worker in cluster.workers()}
    streams = [Stream(cluster, prompt) for prompt in prompts("whole group")]
    for stream in streams:
        assert stream.first_token.wait(30)
    for pid in rank_pids(cluster):
        os.kill(pid, signal.SIGKILL)
    eventually("all are parked", lambda: parked(cluster) == set(before), timeout_s=30, every_s=0.02)
    late = Stream(cluster, prompts("late")[0])
    check([*streams, late], reference)
    until_strong(operator)
    eventually("nobody is parked", lambda: not parked(cluster), timeout_s=30)
    after = {worker.worker_id: cluster.accounts(worker)["pid"] for worker in cluster.workers()}
    assert after == before
    assert sum(cluster.accounts(worker)["experts.missing_s"] for worker in cluster.workers()) > 0
    cluster.assert_idle()


def ready_count(operator):
    return sum(rank.phase is ExpertRankPhase.READY for rank in group_of(operator).ranks)


def test_five_losses_in_a_row(cluster, operator, reference):
    """They come while the ranks before are being replaced, and experts are loaded again. The oldest process
    is hit, which has said hello."""
    before = group_of(operator).losses
    for number in range(5):
        eventually("two ranks are ready", lambda: ready_count(operator) >= 2, timeout_s=STRENGTH_S)
        streams = [Stream(cluster, prompt) for prompt in prompts(f"row {number}", 2)]
        assert streams[0].first_token.wait(30)
        oldest = min(rank_pids(cluster), key=lambda pid: psutil.Process(pid).create_time())
        os.kill(oldest, signal.SIGKILL)
        check(streams, reference)
        eventually("it is noticed", lambda n=number: group_of(operator).losses > before + n, timeout_s=20)
        eventually("every expert is there", lambda: group_of(operator).is_ready, timeout_s=STRENGTH_S)
    until_strong(operator)
    cluster.assert_idle()


def test_orders_are_done_under_streams(cluster, operator, reference):
    name = group_of(operator).ranks[0].name
    streams = [Stream(cluster, prompt) for prompt in prompts("orders")]
    operator.order(RebalanceExperts())
    operator.order(DrainExpertRank(name))
    operator.order(ScaleExperts(2))
    operator.order(ScaleExperts(RANKS))
    check(streams, reference)
    until_strong(operator)
    assert len(group_of(operator).ranks) == RANKS


def test_the_control_plane_s_end_changes_nothing(cluster, operator, reference):
    """Its successor adopts the ranks, and learns from them what they hold."""
    pids = rank_pids(cluster)
    streams = [Stream(cluster, prompt) for prompt in prompts("control")]
    for process in psutil.Process(cluster.process.pid).children():
        if "control" in process.cmdline():
            process.kill()
    check(streams, reference)
    found = Operator(cluster)

    def is_back():
        try:
            return is_strong(found)
        except Exception:  # it is starting
            return False

    eventually("strength is back", is_back, timeout_s=STRENGTH_S)
    assert rank_pids(cluster) == pids
    time_of_epoch = group_of(found).epoch
    check([Stream(cluster, prompt) for prompt in prompts("after control", 2)], reference)
    assert group_of(found).epoch >= time_of_epoch


def test_a_rank_beside_every_worker_of_two_pools(model, reference):
    """Each pool has a group of its own. A worker's end is not its rank's."""
    settings = {**SETTINGS, "experts__parallel": "workers", "experts__ranks": 0, "experts__replicas": 1}
    with Cluster(model, prefill=1, decode=1, **settings) as cluster:
        operator = Operator(cluster)
        eventually(
            "both groups are there",
            lambda: [g.is_ready for g in operator.state().experts] == [True, True],
            timeout_s=STRENGTH_S,
        )
        pids = rank_pids(cluster)
        assert len(pids) == 2
        streams = [Stream(cluster, prompt) for prompt in prompts("two pools")]
        assert streams[0].first_token.wait(30)
        os.kill(cluster.worker("decode").pid, signal.SIGKILL)
        check(streams, reference)
        assert rank_pids(cluster) == pids
        assert {g.role for g in operator.state().experts} == {"prefill", "decode"}
        cluster.await_workers(prefill=1, decode=1)
        cluster.assert_idle()
