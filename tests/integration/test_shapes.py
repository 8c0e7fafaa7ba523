"""Clusters whose workers have several ranks: tokens, hand-over between unlike shapes, and lost ranks."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.core.messages import Role
from baton.core.operate import DrainWorker, Scale, SwitchRole
from tests.integration.cluster import Cluster, Worker, bytes_read
from tests.integration.operating import Operator, Streams
from tests.integration.test_loss import Stream
from tests.integration.test_tokens import Reference
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NEW_TOKENS = 12
LENGTHS = (1, 16, 17, 333, 900)
SETTINGS = {
    "model__dtype": "float32",
    "engine__block_tokens": 16,
    "engine__threads": 1,
    "engine__kv_bytes": 32 * 2**20,
    # Ranks of several workers share two cores with everything else.
    "engine__rank_timeout_s": 60.0,
}


def followers_of(worker: Worker) -> list[psutil.Process]:
    children = psutil.Process(worker.pid).children()
    found = [child for child in children if "engine.execution.follower" in child.cmdline()]
    return sorted(found, key=lambda child: child.pid)


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [
        ("deepseek_v2", "pp2", "tp2"),
        ("gemma3", "cp2", "tp2"),
        ("llama", "tp2", "cp2"),
    ],
)
def test_a_worker_of_any_shape_reads_from_any_other(
    tmp_path: Path, kind: str, prefill: str, decode: str
) -> None:
    """test_worker_shapes has all pairs of one rank, tensor ranks and stages, in no cluster."""
    path = make_model(tmp_path / kind, kind, seed=7, num_hidden_layers=3)
    rng = random.Random(kind)
    reference = Reference(path)
    prompts = [[rng.randrange(3, reference.vocab) for _ in range(n)] for n in LENGTHS]
    with Cluster(path, prefill=f"1x{prefill}", decode=f"1x{decode}", **SETTINGS) as cluster:

        def served(prompt: list[int]) -> list[int]:
            answer = cluster.complete(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, return_token_ids=True)
            return answer["choices"][0]["token_ids"]

        cold = [served(prompt) for prompt in prompts]
        assert cold == [reference.greedy(*pair) for pair in zip(prompts, cold, strict=True)]
        worker = cluster.worker("decode")
        blocks = sum(-(-n // 16) for n in LENGTHS)
        assert bytes_read(worker.accounts) >= blocks * worker.accounts["block_bytes"]
        assert worker.accounts["step_tokens.prefill"] == 0
        assert [served(prompt) for prompt in prompts] == cold
        cluster.assert_idle()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = make_model(tmp_path_factory.mktemp("m") / "llama", "llama", seed=3, num_hidden_layers=3)
    steps = {"engine__step_tokens_max": 64, "engine__batch_sequences_max": 4}
    with Cluster(path, prefill="1xtp2", decode="1xpp2", **SETTINGS, **steps) as cluster:
        yield cluster


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_loss_of_a_rank_is_the_loss_of_its_worker(
    cluster: Cluster, role: str, rank: int, sign: signal.Signals
) -> None:
    """Streams go on elsewhere, with the same tokens, and the worker is started anew as a whole."""
    cluster.await_workers(prefill=1, decode=1)
    rng = random.Random(f"{role}{rank}{sign}")
    prompts = [[rng.randrange(3, 500) for _ in range(n)] for n in (30, 400, 900)]
    fields = {"max_tokens": 48, "ignore_eos": True, "return_token_ids": True}
    expected = [cluster.complete(prompt, **fields)["choices"][0]["token_ids"] for prompt in prompts]
    worker = cluster.worker(role)
    ranks = [psutil.Process(worker.pid), *followers_of(worker)]
    assert len(ranks) == 2
    streams = [Stream(cluster, prompt) for prompt in prompts]
    streams[0].first_token.wait(60)
    os.kill(ranks[rank].pid, sign)
    for stream in streams:
        stream.join(120)
        assert stream.error is None, stream.error
    assert [stream.tokens for stream in streams] == expected
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    cluster.await_workers(prefill=1, decode=1, timeout_s=120)
    again = cluster.worker(role)
    assert again.worker_id != worker.worker_id
    assert len(followers_of(again)) == 1
    cluster.assert_idle(timeout_s=30)


def shapes_of(cluster: Cluster, operator: Operator) -> set[tuple[str, str]]:
    """Role and shape of every worker, as the control plane knows them. Each has all of its ranks."""
    for worker in cluster.workers():
        assert len(followers_of(worker)) == worker.accounts["rank_count"] - 1 == 1
    return {(replica.role, replica.shape) for replica in operator.state().replicas}


def test_orders_hold_for_workers_of_several_ranks(cluster: Cluster) -> None:
    """Scale, role switch and drain under streams: a worker keeps its shape, whatever its role."""
    cluster.await_workers(prefill=1, decode=1)
    operator = Operator(cluster)
    with Streams(cluster):
        operator.order(Scale(Role.DECODE, 2))
        cluster.await_workers(prefill=1, decode=2)
        assert shapes_of(cluster, operator) == {("prefill", "tp2"), ("decode", "pp2")}
        operator.order(SwitchRole("decode-1", Role.PREFILL))
        cluster.await_workers(prefill=2, decode=1)
        assert shapes_of(cluster, operator) == {("prefill", "tp2"), ("prefill", "pp2"), ("decode", "pp2")}
        operator.order(Scale(Role.PREFILL, 1))
        cluster.await_workers(prefill=1, decode=1)
        old = {worker.pid for worker in cluster.workers()}
        ranks = [child for worker in cluster.workers() for child in followers_of(worker)]
        (kept,) = (r.name for r in operator.state().replicas if r.role is Role.PREFILL)
        operator.order(DrainWorker(kept))
        cluster.await_workers(prefill=1, decode=1)
        assert len({worker.pid for worker in cluster.workers()} - old) == 1
        assert shapes_of(cluster, operator) >= {("decode", "pp2")}
    assert sum(child.is_running() for child in ranks) == 1, "the drained worker's ranks have ended with it"
    cluster.assert_idle(timeout_s=30)
