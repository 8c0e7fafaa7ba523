"""Every kind of request, all in flight at once, survives the loss of the worker that computes it: the answers
are those of an undisturbed run, and every request really was placed again."""

import json
import os
import random
import signal
import threading
from typing import Any

import pytest

from tests.adapters import make_adapter
from tests.integration.cluster import Cluster, eventually
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

HELD_S = 120
LEASE_S = 30
LONG = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 64}
TOOL = {
    "type": "function",
    "function": {
        "name": "sum_up",
        "parameters": {
            "type": "object",
            "properties": {"numbers": LONG},
            "required": ["numbers"],
            "additionalProperties": False,
        },
    },
}
SEEDED = {"temperature": 0.9, "seed": 11}
MANY = {"max_tokens": 300, "ignore_eos": True}
STREAM = {"stream": True, "return_token_ids": True}

STREAMED: dict[str, dict[str, Any]] = {
    "greedy": {**MANY},
    "seed and temperature": {**MANY, **SEEDED, "top_p": 0.95, "min_p": 0.001},
    "penalties": {
        **MANY,
        **SEEDED,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {"17": 2.5, "18": -100},
    },
    "logprobs": {**MANY, "logprobs": 3},
    "choices": {**MANY, **SEEDED, "n": 3},
    "echo": {**MANY, "echo": True, "logprobs": 1},
    "least length": {"max_tokens": 300, **SEEDED, "min_tokens": 250, "stop_token_ids": list(range(260, 276))},
    "json schema": {"max_tokens": 300, **SEEDED, "guided_json": LONG},
    "regular expression": {"max_tokens": 300, **SEEDED, "guided_regex": "[a-f ]{280,320}"},
    "an adapter": {**MANY, "model": "own"},
    "repeated text": {**MANY, "prompt": [40, 41, 42, 43, 44] * 12},
    "tools": {"max_tokens": 300, **SEEDED, "tools": [TOOL], "tool_choice": "required"},
    "chat with logprobs": {**MANY, "logprobs": True, "top_logprobs": 2},
}
CHAT = ("tools", "chat with logprobs")
AGGREGATED: dict[str, dict[str, Any]] = {
    "best of": {"max_tokens": 200, "ignore_eos": True, **SEEDED, "n": 1, "best_of": 2, "logprobs": 1},
    "prompt logprobs": {"max_tokens": 300, "ignore_eos": True, "prompt_logprobs": 2},
}
PREFILL_ONLY: dict[str, dict[str, Any]] = {
    "beams": {"max_tokens": 6, "n": 3, "use_beam_search": True},
    "embeddings": {},
}


def prompt_of(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    path = make_model(folder / "llama", "llama", seed=3)
    template = path / "chat_template.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + template.read_text())
    own = make_adapter(path, folder / "own", seed=5)
    settings = {
        "model__dtype": "float32",
        "engine__block_tokens": 16,
        "engine__step_tokens_max": 64,
        # A worker's first grammar loads the tokenizer, on cores that are busy here.
        "engine__prepare_s": 100,
        "router__queue_wait_s": 240,
        # A stopped worker is not lost, and what it will read is kept for it.
        "router__worker_silence_s": HELD_S,
        "cluster__member_suspect_s": HELD_S,
        "cluster__member_lease_s": 2 * HELD_S,
        "transfer__lease_s": LEASE_S,
    }
    with Cluster(path, **settings, model__adapters=json.dumps([f"own={own}"])) as cluster:
        yield cluster


class Asked(threading.Thread):
    """One request of a kind, and the part of its answer that has come so far."""

    def __init__(self, cluster, kind, prompt_tokens):
        super().__init__(daemon=True)
        self.cluster, self.kind = cluster, kind
        fields = STREAMED.get(kind) or AGGREGATED.get(kind) or PREFILL_ONLY[kind]
        self.body: dict[str, Any] = {"model": cluster.model, "temperature": 0, **fields}
        self.path = "/v1/completions"
        prompt = prompt_of(prompt_tokens, kind)
        if kind in CHAT:
            self.path = "/v1/chat/completions"
            text = " ".join(f"number {token}" for token in prompt[: prompt_tokens // 6])
            self.body["messages"] = [{"role": "user", "content": text}]
        elif kind == "embeddings":
            self.path = "/v1/embeddings"
            self.body = {"model": cluster.model, "input": prompt}
        else:
            self.body.setdefault("prompt", prompt)
        if kind in STREAMED:
            self.body |= STREAM
        if kind not in PREFILL_ONLY:
            self.body["baton"] = {"timings": True}
        self.events: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.start()

    def run(self):
        try:
            with self.cluster.http.stream("POST", self.path, json=self.body) as answer:
                assert answer.status_code == 200, answer.read()
                if not self.body.get("stream"):
                    self.events.append(json.loads(answer.read()))
                    return
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
                assert line == "data: [DONE]" or not line
        except Exception as error:
            self.error = error

    @property
    def token_count(self):
        return sum(len(c.get("token_ids") or []) for event in self.events for c in event["choices"])

    @property
    def attempts(self):
        return next(event["baton"]["attempts"] for event in self.events if "baton" in event)

    def result(self):
        """The part of the answer, by choice, that must not depend on the loss."""
        assert self.error is None, f"{self.kind}: {self.error}"
        if not self.body.get("stream"):
            [answer] = self.events
            return plain({k: answer[k] for k in ("choices", "data", "usage") if k in answer})
        found: dict[int, dict[str, Any]] = {}
        for event in self.events:
            assert "error" not in event, event
            for choice in event["choices"]:
                add(found.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": []}), choice)
        return found


def add(total, choice):
    said = choice.get("delta") or choice
    total["text"] += said.get("content") or said.get("text") or ""
    for call in said.get("tool_calls") or []:
        function = call["function"]
        total["text"] += f"{function.get('name') or ''}{function.get('arguments') or ''}"
    total["ids"] += choice.get("token_ids") or []
    if logprobs := choice.get("logprobs"):
        total["logprobs"] += logprobs.get("token_logprobs") or [e["logprob"] for e in logprobs["content"]]
    total["finish"] = choice["finish_reason"] or total.get("finish")


def plain(value):
    """The answer without values that differ from run to run, such as how much of a prompt was cached."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in ("prompt_tokens_details", "id")}
    return [plain(v) for v in value] if isinstance(value, list) else value


def same(one, other):
    """Equal except for rounding, because two runs may compute a prompt in different chunks."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return one == pytest.approx(other, abs=2e-3)
    return one == other


def ask(cluster, kinds, prompt_tokens):
    return {kind: Asked(cluster, kind, prompt_tokens) for kind in kinds}


def results(asked):
    for one in asked.values():
        one.join(150)
        assert not one.is_alive(), f"{one.kind} does not end"
    assert {kind: str(one.error) for kind, one in asked.items() if one.error is not None} == {}
    return {kind: one.result() for kind, one in asked.items()}


def in_flight(cluster, worker):
    listed = (one for workers in cluster.health()["workers"].values() for one in workers)
    return next(one["in_flight"] for one in listed if one["id"] == worker.worker_id)


def retries(cluster):
    return cluster.metric("baton_router_retries_total")


def compare(found, wanted):
    assert [kind for kind in wanted if not same(found[kind], wanted[kind])] == []


def decode_in_slices(stopped, asked, enough, slice_s=0.02):
    """Let a stopped worker decode for a slice at a time until `enough()`, and leave it stopped.

    Clients and router may be slower than the worker where cores are shared, and would otherwise see the third
    token of the slowest stream when the worker has made the last one of all.
    """
    pause = threading.Event()

    def read_all():
        """Whether nothing more has come for a while from what the worker has sent."""
        count = sum(len(one.events) for one in asked)
        pause.wait(0.2)
        return count == sum(len(one.events) for one in asked)

    for _ in range(1000):
        if enough():
            return
        os.kill(stopped.pid, signal.SIGCONT)
        pause.wait(slice_s)
        os.kill(stopped.pid, signal.SIGSTOP)
        eventually("all that was sent is read", read_all, timeout_s=LEASE_S)
    pytest.fail("the streams have no tokens after 1,000 slices")


def test_requests_of_every_kind_survive_the_loss_of_their_decode_worker(cluster):
    kinds = [*STREAMED, *AGGREGATED]
    wanted = results(ask(cluster, kinds, 60))
    victim = cluster.worker("decode")
    before = retries(cluster)
    sequence_count = len(kinds) + 3  # the choices and those of best_of, each

    def all_have(token_count):
        dead = [one.error for one in asked.values() if one.error is not None]
        assert not dead, dead
        return all(asked[kind].token_count >= token_count for kind in STREAMED)

    # No stream gets ahead: first tokens come from the prefill worker, and all others are held back until each
    # has its first one. From there on all are computed in the same steps.
    os.kill(victim.pid, signal.SIGSTOP)
    asked = ask(cluster, kinds, 60)
    eventually(
        "every sequence is placed, and every stream has its first token",
        lambda: all_have(1) and in_flight(cluster, victim) == sequence_count,
        timeout_s=LEASE_S,
    )
    decode_in_slices(victim, list(asked.values()), lambda: all_have(3))
    os.kill(victim.pid, signal.SIGKILL)
    compare(results(asked), wanted)
    assert {kind: one.attempts for kind, one in asked.items() if one.attempts < 2} == {}
    assert retries(cluster) - before >= sequence_count
    cluster.await_workers(prefill=1, decode=1)
    cluster.assert_idle(timeout_s=LEASE_S + 15.0)
