"""Whatever a request asks for holds across the hand-over from prefill to decode, and across the loss of the
decode worker in mid-stream: nothing is repeated, missing or different."""

import json
import os
import random
import signal

import pytest

from tests.integration.cluster import Cluster
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS = {
    "sampled": {"temperature": 0.9, "top_p": 0.95, "min_p": 0.001, "seed": 11, "ignore_eos": True},
    "penalties": {
        "temperature": 0.7,
        "seed": 5,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {"17": 2.5, "18": -100},
        "ignore_eos": True,
    },
    "logprobs": {"logprobs": 3, "ignore_eos": True},
    "grammar": {"temperature": 1.0, "seed": 3, "guided_json": SCHEMA},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "llama", "llama", seed=3)


@pytest.fixture(scope="module")
def cluster(model_path):
    # Small steps make a stream last long enough to be struck in its middle.
    with Cluster(model_path, model__dtype="float32", engine__block_tokens=16) as cluster:
        yield cluster


def prompt_of(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


def collect(events):
    """Token ids, logprobs and text of a streamed completion; its finish reason."""
    tokens, logprobs, text, finish = [], [], "", None
    for event in events:
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            text += choice["text"]
            if choice.get("logprobs"):
                logprobs += choice["logprobs"]["token_logprobs"]
            finish = choice["finish_reason"] or finish
    return tokens, logprobs, text, finish


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_the_decode_worker_changes_nothing(cluster, kind):
    fields = {"max_tokens": 160 if kind == "grammar" else 400, "return_token_ids": True, **KINDS[kind]}
    prompt = prompt_of(700, seed=kind)
    cluster.await_workers(prefill=1, decode=1)
    tokens, logprobs, text, finish = collect(cluster.stream(prompt, **fields))
    placed = cluster.metric("baton_router_placements_total", kind="split")
    assert placed > 0
    victim = cluster.worker("decode")
    events, seen = [], 0
    for event in cluster.stream(prompt, **fields):
        events.append(event)
        seen += sum(len(choice.get("token_ids") or []) for choice in event["choices"])
        if seen >= 4 and victim is not None:
            os.kill(victim.pid, signal.SIGKILL)
            victim = None
    assert victim is None, "the stream was over before the worker could be killed"
    assert collect(events)[0] == tokens
    assert collect(events)[2:] == (text, finish)
    assert collect(events)[1] == pytest.approx(logprobs, abs=1e-3)
    assert len(logprobs) == (len(tokens) if kind == "logprobs" else 0)
    if kind == "grammar" and finish == "stop":
        answer = json.loads(text)
        assert set(answer) == {"name", "age"}
        assert isinstance(answer["age"], int)
    cluster.await_workers(prefill=1, decode=1)
    cluster.assert_idle()


def test_choices_share_the_prompt_and_differ_by_their_seeds(cluster):
    prompt = prompt_of(1200, seed=2)
    before = cluster.worker("prefill").accounts["step_tokens.prefill"]
    fields = {"temperature": 1.0, "seed": 9, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    answer = cluster.complete(prompt, n=4, **fields)
    computed = cluster.worker("prefill").accounts["step_tokens.prefill"] - before
    ids = [tuple(choice["token_ids"]) for choice in answer["choices"]]
    assert len(set(ids)) == 4
    assert ids[0] == tuple(cluster.complete(prompt, **fields)["choices"][0]["token_ids"])
    assert answer["usage"]["prompt_tokens"] == 1200
    assert computed <= 1200 + 3 * 16, "each choice computed the prompt anew"
