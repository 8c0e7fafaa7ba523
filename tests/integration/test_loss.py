"""Workers are killed and frozen at every phase; every stream goes on as if nothing had happened."""

import os
import random
import signal
import threading
import time

import pytest

from tests.integration.cluster import Cluster, bytes_read, eventually
from tests.integration.test_tokens import Reference
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NEW_TOKENS = 48
PROMPT_TOKENS = 1200
ENDED_S = 30.0
"""Seconds from the moment at which the fault is detectable by which every stream must have ended.

Most of it is the start of the replacement, whose speed is the machine's: this bounds a stream that
hangs, and ``baton bench chaos`` measures how fast streams recover.
"""
DETECT_S = {signal.SIGKILL: 0.5, signal.SIGSTOP: 3.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "llama", "llama", seed=3)


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


@pytest.fixture(scope="module")
def cluster(model):
    settings = {
        "model__dtype": "float32",
        "engine__block_tokens": 16,
        # Small steps, and few of them at once, make every phase long enough to be hit.
        "engine__step_tokens_max": 16,
        "engine__batch_sequences_max": 4,
    }
    with Cluster(model, **settings) as cluster:
        yield cluster


def tokens_of(cluster, prompt):
    answer = cluster.complete(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, return_token_ids=True)
    return answer["choices"][0]["token_ids"]


def prompt_for(seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)]


class Stream(threading.Thread):
    """One streamed request, which counts its tokens."""

    def __init__(self, cluster, prompt):
        super().__init__(daemon=True)
        self.cluster, self.prompt = cluster, prompt
        self.tokens, self.error, self.finish, self.ended_s = [], None, None, None
        self.first_token = threading.Event()
        self.start()

    def run(self):
        try:
            for event in self.cluster.stream(
                self.prompt, max_tokens=NEW_TOKENS, ignore_eos=True, return_token_ids=True
            ):
                choice = event["choices"][0]
                self.tokens += choice.get("token_ids") or []
                if self.tokens:
                    self.first_token.set()
                self.finish = choice["finish_reason"] or self.finish
        except Exception as error:
            self.error = error
        self.ended_s = time.monotonic()


PHASES = ("queued", "prefilling", "mid-transfer", "decoding", "last token")


def reached(cluster, stream, state, workers):
    if state == "queued":
        return True  # the fault comes as soon as the request is sent, behind others
    if state == "prefilling":
        return cluster.accounts(workers["prefill"])["running_count"]
    if state == "mid-transfer":
        accounts = cluster.accounts(workers["decode"])
        return accounts["receiver_count"] and bytes_read(accounts) > workers["read before"]
    if state == "decoding":
        return len(stream.tokens) >= 5
    return len(stream.tokens) >= NEW_TOKENS - 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "freeze"])
@pytest.mark.parametrize("state", PHASES)
def test_streams_survive_the_loss_of_a_worker(cluster, reference, state, fault, role):
    prompt = prompt_for(f"{state} {fault} {role}")
    cluster.await_workers(prefill=1, decode=1)
    undisturbed = tokens_of(cluster, prompt)
    fresh = [(t + 7) % 500 + 3 for t in prompt]
    workers = {name: cluster.worker(name) for name in ("prefill", "decode")}
    workers["read before"] = bytes_read(workers["decode"].accounts)
    victim = workers[role]
    others = [Stream(cluster, prompt_for(f"other {i} {state} {fault} {role}")) for i in range(3)]
    streams = [Stream(cluster, prompt), Stream(cluster, fresh), *others]
    watched = streams[1]
    eventually(
        f"phase {state}",
        lambda: reached(cluster, watched, state, workers) or watched.ended_s,
        timeout_s=30,
        every_s=0.001,
    )
    os.kill(victim.pid, fault)
    for stream in streams:
        stream.join(DETECT_S[fault] + ENDED_S)
        assert stream.error is None, stream.error
        assert stream.finish == "length"
        assert len(stream.tokens) == NEW_TOKENS
    assert streams[0].tokens == undisturbed
    cluster.await_workers(prefill=1, decode=1)
    assert victim.worker_id not in {w.worker_id for w in cluster.workers()}
    # As another request gets them now, and as transformers gives them.
    assert streams[1].tokens == tokens_of(cluster, fresh)
    for stream in streams:
        assert stream.tokens == reference.greedy(stream.prompt, stream.tokens)
    cluster.assert_idle()
