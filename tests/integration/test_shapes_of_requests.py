"""Every kind of request at tensor 2 and at pipeline 2: the answers are those of one rank.

One cluster serves the same files as three models, one of each shape. `models.yaml` gives two of the shapes,
and the environment gives the third.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.adapters import make_adapter
from tests.integration.cluster import Cluster
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

WIDE = ("tensor", "stages")
PROMPT = [5, 77, 300, 41, 9, 260, 33, 120, 499, 64, 18, 222, 7, 350, 71, 90, 15, 16, 401, 28]
REPEATED = [40, 41, 42, 43, 44] * 12
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SEEDED = {"temperature": 1.0, "seed": 11}
LONG = {"max_tokens": 32, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": LONG,
    "seed": {**LONG, **SEEDED},
    "logprobs": {**LONG, "logprobs": 3},
    "prompt logprobs": {"max_tokens": 4, "ignore_eos": True, "prompt_logprobs": 2},
    "choices": {**LONG, **SEEDED, "n": 3},
    "beams": {"max_tokens": 6, "n": 3, "use_beam_search": True},
    "penalties": {**LONG, **SEEDED, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    "json schema": {"max_tokens": 120, **SEEDED, "guided_json": SCHEMA},
    "regular expression": {"max_tokens": 40, **SEEDED, "guided_regex": "[a-f ]{20,30}"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("m") / "llama", "llama", seed=3, num_hidden_layers=3)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    served = {"model": {"path": str(folder)}, "cluster": {"aggregated_workers": 1}}
    models = {
        "one": {**served, "engine": {"shape": "1"}},
        "tensor": served,
        "stages": {**served, "cluster": {"aggregated_workers": "1xpp2"}},
    }
    path = tmp_path_factory.mktemp("config") / "models.yaml"
    path.write_text(yaml.safe_dump({"models": models}))
    settings: dict[str, Any] = {
        "model__dtype": "float32",
        "engine__kv_bytes": 8 * 2**20,
        "engine__threads": 1,
        "engine__block_tokens": 16,
        "engine__step_tokens_max": 64,
        "engine__speculation": "ngram",
        "engine__rank_timeout_s": 60.0,
        # A worker's first grammar loads the tokenizer, on cores that are busy here.
        "engine__prepare_s": 100,
        "router__queue_wait_s": 240,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "BATON_ENGINE__SHAPE", "tp2")
        with Cluster(None, models=path, **settings) as cluster:
            yield cluster


def asked(cluster: Cluster, model: str, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    answer = cluster.complete(prompt, return_token_ids=True, model=model, **fields)
    return answer["choices"]


def about(value: Any) -> Any:
    """The same with numbers that are compared with a tolerance."""
    if isinstance(value, float):
        return pytest.approx(value, abs=2e-4)
    if isinstance(value, dict):
        return {key: about(one) for key, one in value.items()}
    return [about(one) for one in value] if isinstance(value, list) else value


def test_shapes_come_from_the_file_and_from_the_environment(cluster: Cluster) -> None:
    ranks = sorted(worker.accounts["rank_count"] for worker in cluster.workers())
    assert ranks == [1, 2, 2]


@pytest.mark.parametrize("model", WIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_of_any_kind_gives_what_one_rank_gives(cluster: Cluster, kind: str, model: str) -> None:
    expected = asked(cluster, "one", PROMPT, **KINDS[kind])
    assert asked(cluster, model, PROMPT, **KINDS[kind]) == about(expected)
    if kind == "json schema" and expected[0]["finish_reason"] == "stop":
        assert set(json.loads(expected[0]["text"])) == {"name", "age"}
    if kind == "choices":
        assert len({tuple(choice["token_ids"]) for choice in expected}) == 3


@pytest.mark.parametrize("model", WIDE)
def test_stop_strings_are_found_at_the_same_place(cluster: Cluster, model: str) -> None:
    text = asked(cluster, "one", PROMPT, **LONG)[0]["text"]
    fields = {**LONG, "stop": [text[len(text) // 2 :][:3]]}
    expected = asked(cluster, "one", PROMPT, **fields)
    assert expected[0]["finish_reason"] == "stop"
    assert asked(cluster, model, PROMPT, **fields) == expected


@pytest.mark.parametrize("model", WIDE)
def test_drafts_are_accepted_and_change_no_token(cluster: Cluster, model: str) -> None:
    def accepted() -> float:
        workers = (worker for worker in cluster.workers() if worker.worker_id.startswith(model))
        return sum(worker.accounts["accepted_count"] for worker in workers)

    # The text repeats one token, and is long enough for a trial of drafts: a worker for which they are dear
    # tries them again after 64 steps without, then 128 and so on up to 1,024.
    fields = {"max_tokens": 160, "ignore_eos": True, "logit_bias": {"40": 100}}
    expected = asked(cluster, "one", REPEATED, **fields)
    before = accepted()
    for _ in range(12):
        assert asked(cluster, model, REPEATED, **fields) == expected
        if accepted() > before:
            break
    assert accepted() > before


def test_an_adapter_loaded_at_run_time_gives_the_same_tokens(
    cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    own = make_adapter(folder, tmp_path / "own", seed=5)
    found = {}
    for model in ("one", *WIDE):
        body = {"lora_name": f"own-{model}", "lora_path": str(own), "model": model}
        answer = cluster.http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        found[model] = asked(cluster, f"own-{model}", PROMPT, **LONG)[0]["token_ids"]
    assert found["tensor"] == found["stages"] == found["one"]
    assert found["one"] != asked(cluster, "one", PROMPT, **LONG)[0]["token_ids"]


def test_nothing_is_held_afterwards(cluster: Cluster) -> None:
    cluster.assert_idle(timeout_s=30)
