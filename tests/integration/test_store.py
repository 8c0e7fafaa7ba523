"""A cluster with a store: blocks come back from host memory and SSD, whatever process died in between."""

import os
import random
import signal
import threading

import msgspec
import pytest

from baton.core.hashing import root_hash
from baton.core.messages import Phase, StepOutput
from baton.core.store_admin import AskStatus
from baton.wire.link import LinkBroken
from baton.wire.local import ask_store
from tests.integration.cluster import Cluster, eventually, loop
from tests.integration.test_worker_process import session, start
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BLOCK_TOKENS, BLOCK_BYTES = 16, 8192
PROMPT_TOKENS = 1000
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
TRIES = 3
"""Prompts whose blocks are to come back. A busy machine may compute some before it has found them."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    settings = {
        "model__dtype": "float32",
        "engine__block_tokens": BLOCK_TOKENS,
        "engine__kv_bytes": int(1.3 * PROMPT_BLOCKS) * BLOCK_BYTES,
        # Steps as small as these make computing a prompt take about a second.
        "engine__step_tokens_max": 16,
        "engine__batch_sequences_max": 4,
        # All prompts of these tests fit, so that what is found does not depend on how fast the disk is.
        "store__host_bytes": 32 * PROMPT_BLOCKS * BLOCK_BYTES,
        "store__ssd_dir": folder / "ssd",
        "store__ssd_io": "buffered",
        # The cost of a load compared with computing is tested elsewhere, and varies on a busy machine.
        "store__load": "always",
        "store__lookup_timeout_s": 2,
    }
    with Cluster(make_model(folder / "llama", "llama", seed=3), **settings) as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def socket(cluster):
    line = next(line for line in cluster.log if "store node of this host starts at" in line)
    return line.rsplit(" ", 1)[1]


def prompt_for(seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)]


def answer(cluster, seed):
    asked = cluster.complete(prompt_for(seed), max_tokens=8, ignore_eos=True, return_token_ids=True)
    return asked["choices"][0]["token_ids"]


def loaded(cluster, tier):
    """Number of blocks that the prefill worker loaded from the store."""
    return cluster.worker("prefill").accounts.get(f"store.loaded_blocks.{tier}", 0)


def answers_of(cluster, first_seed):
    """{seed: answer} of TRIES new prompts."""
    return {seed: answer(cluster, seed) for seed in range(first_seed, first_seed + TRIES)}


def come_back(cluster, cold, tier, *, least):
    """Every answer is that of the first time, and at least so many blocks of one prompt come from a tier."""
    loads = []
    for seed, expected in cold.items():
        push_out(cluster, 100 + seed)
        before = loaded(cluster, tier)
        assert answer(cluster, seed) == expected
        loads.append(loaded(cluster, tier) - before)
        if loads[-1] >= least:
            return
    raise AssertionError(f"blocks that came from {tier}: {loads}")


def push_out(cluster, *seeds):
    """Evict everything from the KV pools, by new prompts."""
    for seed in seeds:
        answer(cluster, seed)


def all_written(cluster):
    def written():
        accounts = [worker.accounts for worker in cluster.workers()]
        return not any(a["store.offers_queued"] or a["store.offers_in_flight"] for a in accounts)

    eventually("all blocks are in the store", written, timeout_s=20)


def joined(cluster, node_pid=None):
    accounts = [worker.accounts for worker in cluster.workers()]
    return len(accounts) == 2 and all(a["store.joined"] for a in accounts)


def node(socket):
    """The node's status; None while it is away."""
    try:
        return loop().run(ask_store(socket, AskStatus()))
    except LinkBroken:
        return None


def test_evicted_blocks_come_back_from_host_memory(cluster):
    cold = answers_of(cluster, 10)
    all_written(cluster)
    come_back(cluster, cold, "host", least=PROMPT_BLOCKS // 4)
    cluster.assert_idle()


def test_blocks_outlive_the_worker(cluster):
    cold = answers_of(cluster, 20)
    all_written(cluster)
    os.kill(cluster.worker("prefill").pid, signal.SIGKILL)
    cluster.await_workers(prefill=1, decode=1)
    eventually("the new worker joins the store", lambda: joined(cluster), timeout_s=20)
    assert loaded(cluster, "host") == 0
    come_back(cluster, cold, "host", least=PROMPT_BLOCKS // 2)
    cluster.assert_idle()


def test_blocks_outlive_the_node_on_ssd(cluster, socket):
    cold = answers_of(cluster, 30)
    all_written(cluster)
    status = eventually("all blocks are on SSD", lambda: _with_all_on_ssd(socket), timeout_s=60)
    os.kill(status.pid, signal.SIGKILL)
    push_out(cluster, 199)  # this cluster has no store

    def is_back():
        again = node(socket)
        return again and again.node_id != status.node_id and again.accounts["ssd.block_count"] and again

    again = eventually("a new node with the old one's blocks", is_back, timeout_s=30)
    # The new node has what was computed since the kill, and what was on its way to the old one, but not
    # everything that the old one had.
    assert again.accounts["host.block_count"] <= 2 * PROMPT_BLOCKS
    eventually("the workers join it", lambda: joined(cluster), timeout_s=20)
    come_back(cluster, cold, "ssd", least=1)
    cluster.assert_idle()


def _with_all_on_ssd(socket):
    status = node(socket)
    is_still = status and not status.accounts["io_in_flight"]
    return is_still and status.accounts["ssd.block_count"] >= status.accounts["host.block_count"] and status


def test_a_node_that_dies_while_it_is_asked_costs_nobody_the_answer(cluster, socket):
    cold = answer(cluster, 4)
    all_written(cluster)
    push_out(cluster, 104)
    pid = node(socket).pid
    os.kill(pid, signal.SIGSTOP)  # it will not answer requests
    answers = []
    asking = threading.Thread(target=lambda: answers.append(answer(cluster, 4)), daemon=True)
    asking.start()
    prefill = cluster.worker("prefill")

    def is_asking():
        accounts = cluster.accounts(prefill)
        return accounts["running_count"] or accounts["store.load_count"] or answers

    try:
        eventually("the worker asks", is_asking, timeout_s=10, every_s=0.005)
    finally:
        os.kill(pid, signal.SIGKILL)
    asking.join(60)
    assert answers == [cold]
    eventually("the workers join the next node", lambda: joined(cluster), timeout_s=30)
    cluster.assert_idle()


async def test_tenants_get_nothing_of_each_other(cluster):
    prompt = prompt_for(5)
    prefill = cluster.worker("prefill")

    async def run(one, name, salt):
        ask = start(name, Phase.AGGREGATED, prompt, one.hello, max_tokens=2)
        root = root_hash(one.hello.fingerprint, salt)
        one.link.send(msgspec.structs.replace(ask, cache_root=root))
        await one.finished(name)
        said = [o for m in one.of(StepOutput) for o in m.outputs if o.seq_id == name]
        return max(o.cached_token_count or 0 for o in said)

    async with session(prefill) as one:
        assert await run(one, "a/0", b"alpha") == 0
        all_written(cluster)
        store_only = 0
        for attempt in range(4):  # a busy machine may not load in time, and then computes
            for index in range(2):  # out of the pool
                await run(one, f"other{attempt}{index}/0", f"filler {attempt}{index}".encode())
            all_written(cluster)
            store_only = await run(one, f"a{attempt}/1", b"alpha")
            if store_only >= PROMPT_TOKENS // 4:
                break
        assert store_only >= PROMPT_TOKENS // 4
        assert await run(one, "b/0", b"beta") == 0
    cluster.assert_idle()
