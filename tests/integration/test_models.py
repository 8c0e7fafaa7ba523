"""Two models of different shapes and tokenizers in one cluster: each is served as if it were alone."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.core.messages import Role
from baton.core.operate import Outcome, ReplicaState, RollOut, Scale, Version
from tests.integration.cluster import ROOT, Cluster, eventually
from tests.integration.operating import Operator
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

PAIR, AGGREGATED = "org/pair", "whole"
TEXTS = (
    "Once upon a time",
    "How many phases does a spider have?",
    "The runner in front holds the baton " * 8,
)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        PAIR: make_model(root / "a", "llama", seed=3),
        AGGREGATED: make_model(
            root / "b",
            "qwen3",
            seed=4,
            vocab=330,
            hidden_size=48,
            num_attention_heads=3,
            num_key_value_heads=3,
        ),
    }


@pytest.fixture(scope="module")
def cluster(folders, tmp_path_factory):
    models = {
        PAIR: {
            "model": {"path": str(folders[PAIR])},
            "cluster": {"prefill_workers": 1, "decode_workers": 1},
            "engine": {"block_tokens": 16},
        },
        AGGREGATED: {"model": {"path": str(folders[AGGREGATED])}, "cluster": {"aggregated_workers": 1}},
    }
    path = tmp_path_factory.mktemp("config") / "models.yaml"
    path.write_text(yaml.safe_dump({"models": models}))
    settings = {
        "engine__kv_bytes": 32 * 2**20,
        "engine__threads": 1,
        "model__dtype": "float32",
        "router__queue_wait_s": 2,
    }
    with Cluster(None, models=path, prefill=0, decode=0, **settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(folders):
    """The results of transformers for the texts: prompt length, tokens, text."""

    def of(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found = []
        for text in TEXTS:
            ids = torch.tensor([tokenizer.encode(text)])
            with torch.no_grad():
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
                    pad_token_id=0,
                )  # fmt: skip
            found.append((ids.shape[1], out[0, ids.shape[1] :].tolist()))
        return found

    return {name: of(folder) for name, folder in folders.items()}


def served(cluster, model, text):
    answer = cluster.complete(
        text, model=model, max_tokens=NEW_TOKENS, ignore_eos=True, return_token_ids=True
    )
    assert answer["model"] == model
    return answer["usage"]["prompt_tokens"], answer["choices"][0]["token_ids"]


def workers_of(cluster, model):
    listed = [w for role in cluster.health()["workers"].values() for w in role]
    return [w for w in listed if w["model"] == model]


def test_greedy_tokens_are_transformers_for_both(cluster, expected):
    for _ in range(2):  # the second time from the caches
        for index, text in enumerate(TEXTS):
            for model in (PAIR, AGGREGATED):
                assert served(cluster, model, text) == expected[model][index], (model, text)
    assert expected[PAIR][1][0] != expected[AGGREGATED][1][0], "their tokenizers differ"
    cluster.assert_idle()


def test_one_endpoint_lists_both_and_knows_no_third(cluster):
    assert [m["id"] for m in cluster.http.get("/v1/models").json()["data"]] == [PAIR, AGGREGATED]
    unknown = cluster.http.post("/v1/completions", json={"model": "third", "prompt": "x"})
    error = unknown.json()["error"]
    assert (unknown.status_code, error["code"]) == (404, "model_not_found")
    assert PAIR in error["message"]
    assert AGGREGATED in error["message"]
    ready = cluster.http.get("/health/ready")
    assert ready.status_code == 200
    assert {name: one["status"] for name, one in ready.json()["models"].items()} == {
        PAIR: "ok",
        AGGREGATED: "ok",
    }
    assert cluster.metric("baton_requests_total", model=AGGREGATED, outcome="completed") > 0
    assert cluster.metric("baton_router_known_workers", model=PAIR, role="prefill") == 1


def test_nothing_computed_for_one_is_used_for_the_other(cluster):
    """Both models get the same token ids. Fingerprints, and so block hashes, keep them apart."""
    prompt = [5 + i % 200 for i in range(256)]
    cached = {}
    for model in (PAIR, AGGREGATED, PAIR, AGGREGATED):
        usage = cluster.complete(prompt, model=model, max_tokens=2)["usage"]
        cached.setdefault(model, []).append(usage["prompt_tokens_details"]["cached_tokens"])
    assert {model: [first == 0, second > 0] for model, (first, second) in cached.items()} == {
        PAIR: [True, True],
        AGGREGATED: [True, True],
    }
    blocks = {w["block_tokens"] for w in workers_of(cluster, PAIR)}
    assert (blocks, {w["block_tokens"] for w in workers_of(cluster, AGGREGATED)}) == ({16}, {32})


def baton(cluster, *words):
    command = [sys.executable, "-m", "baton", *words, "--control", Operator(cluster).address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_orders_say_which_model(cluster):
    unnamed = baton(cluster, "scale", "aggregated", "2")
    assert unnamed.returncode == 1
    assert PAIR in unnamed.stdout
    assert AGGREGATED in unnamed.stdout
    assert baton(cluster, "scale", "aggregated", "2", "--model", AGGREGATED).returncode == 0
    eventually("another worker", lambda: len(workers_of(cluster, AGGREGATED)) == 2, timeout_s=60)
    assert len(workers_of(cluster, PAIR)) == 2, "the other model's stayed"
    drained = baton(cluster, "drain", "aggregated-1", "--no-replace", "--model", AGGREGATED)
    assert drained.returncode == 0, drained.stdout + drained.stderr
    eventually("it is gone", lambda: len(workers_of(cluster, AGGREGATED)) == 1, timeout_s=60)
    told = json.loads(baton(cluster, "status", "--json", "--model", AGGREGATED).stdout)
    assert [pool["model"] for pool in told["pools"]] == [AGGREGATED]
    assert {replica["model"] for replica in told["replicas"]} == {AGGREGATED}
    nobody = baton(cluster, "switch-role", "prefill-9", "decode", "--model", PAIR)
    assert nobody.returncode != 0
    assert "org-pair-prefill-0" in nobody.stdout + nobody.stderr


def test_a_version_is_rolled_out_for_one_model_alone(cluster, expected):
    operator = Operator(cluster)
    before = {r.worker_id for r in operator.state().replicas if r.model == PAIR}
    operator.order(RollOut(Version("2", ("engine.waiting_sequences_max=99",)), AGGREGATED), timeout_s=200)
    replicas = operator.state().replicas
    assert {(r.model, r.version) for r in replicas} == {(PAIR, "1"), (AGGREGATED, "2")}
    assert {r.worker_id for r in replicas if r.model == PAIR} == before
    eventually("it serves", lambda: workers_of(cluster, AGGREGATED), timeout_s=30)
    assert served(cluster, AGGREGATED, TEXTS[0]) == expected[AGGREGATED][0]


def test_one_models_only_worker_is_killed_and_the_other_goes_on(cluster, expected):
    (victim,) = (w for w in cluster.workers() if w.worker_id.startswith("whole-"))
    os.kill(victim.pid, signal.SIGKILL)
    eventually("it is missed", lambda: not cluster.health()["models"][AGGREGATED]["ready"], timeout_s=20)
    ready = cluster.http.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    assert cluster.http.get("/health/ready", params={"model": AGGREGATED}).status_code == 503
    assert served(cluster, PAIR, TEXTS[0]) == expected[PAIR][0]
    with httpx.Client(base_url=cluster.url, timeout=60) as http:
        asked = http.post("/v1/completions", json={"model": AGGREGATED, "prompt": "x", "max_tokens": 1})
    # It may be back by the time a request would have been refused.
    assert asked.status_code in (200, 503), asked.text
    assert cluster.metric("baton_requests_total", model=PAIR, outcome="refused") == 0
    assert cluster.metric("baton_requests_total", model=PAIR, outcome="failed") == 0
    eventually("it is back", lambda: workers_of(cluster, AGGREGATED), timeout_s=60)
    assert served(cluster, AGGREGATED, TEXTS[0]) == expected[AGGREGATED][0]
    running = [r.state for r in Operator(cluster).state().replicas]
    assert running == [ReplicaState.RUNNING] * 3
    cluster.assert_idle()


def test_scaled_to_nothing_a_model_refuses_for_itself_alone(cluster, expected):
    operator = Operator(cluster)
    ended = operator.order(Scale(Role.AGGREGATED, 0, AGGREGATED))
    assert ended.outcome is Outcome.DONE
    refused = cluster.http.post("/v1/completions", json={"model": AGGREGATED, "prompt": "x", "max_tokens": 1})
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert served(cluster, PAIR, TEXTS[0]) == expected[PAIR][0]
    operator.order(Scale(Role.AGGREGATED, 1, AGGREGATED))
    eventually("it is back", lambda: workers_of(cluster, AGGREGATED), timeout_s=60)
    assert served(cluster, AGGREGATED, TEXTS[0]) == expected[AGGREGATED][0]
