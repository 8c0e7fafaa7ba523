"""What a request can ask for, served by real workers: beside transformers where it has the same."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.cluster import Cluster
from tests.models import make_model
from tests.unit.router.test_http_tools import make_adapter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = [5, 77, 300, 41, 9, 260, 33, 120, 499, 64, 18, 222, 7, 350, 71, 90, 15, 16, 401, 28]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny", seed=7)


@pytest.fixture(scope="module")
def model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def cluster(path):
    with Cluster(path, model__dtype="float32", engine__block_tokens=16, engine__prepare_s=60) as running:
        yield running
        running.assert_idle()


@torch.inference_mode()
def logprobs_of(model, tokens):
    """[len(tokens), vocab]: of the token after each."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)


@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (4, 0.5)])
def test_beam_search_finds_transformers_hypotheses(cluster, model, width, penalty):
    answer = cluster.complete(
        PROMPT, n=width, max_tokens=12, use_beam_search=True, length_penalty=penalty, return_token_ids=True
    )
    theirs = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), num_beams=width,
        num_return_sequences=width, do_sample=False, max_new_tokens=12, length_penalty=penalty,
        early_stopping=False, eos_token_id=1, pad_token_id=511,
    )  # fmt: skip
    expected = [[t for t in row if t != 511] for row in theirs[:, len(PROMPT) :].tolist()]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected


def test_logprobs_of_prompt_and_answer_are_the_models(cluster, model):
    """Across the hand-over: the first token's come from the prefill worker, the others from decode."""
    answer = cluster.complete(
        PROMPT, max_tokens=8, logprobs=3, echo=True, ignore_eos=True, return_token_ids=True
    )
    choice = answer["choices"][0]
    tokens = PROMPT + choice["token_ids"]
    table = logprobs_of(model, tokens)
    expected = [table[i, token].item() for i, token in enumerate(tokens[1:])]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    best = table[len(PROMPT) - 1].max().item()
    assert max(choice["logprobs"]["top_logprobs"][len(PROMPT)].values()) == pytest.approx(best, abs=1e-4)


def test_embeddings_are_the_last_hidden_state_of_length_one(cluster, model):
    prompts = [PROMPT, PROMPT[:3]]
    body = {"model": cluster.model, "input": prompts, "encoding_format": "float"}
    answer = cluster.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    for found, prompt in zip(answer.json()["data"], prompts, strict=True):
        with torch.inference_mode():
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=0).tolist()
        assert found["embedding"] == pytest.approx(expected, abs=1e-4)


def test_structured_output_is_what_was_asked_for(cluster):
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["on", "kind"],
        "additionalProperties": False,
    }
    body = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 200,
        "seed": 1,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    answer = cluster.http.post("/v1/chat/completions", json=body | {"response_format": form})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        assert set(json.loads(choice["message"]["content"])) == {"on", "kind"}
    text = cluster.complete("x", guided_regex="[ab]{3}-[0-9]+!", max_tokens=40, temperature=1, seed=5)
    assert re.fullmatch("[ab]{3}-[0-9]+!?", text["choices"][0]["text"])
    refused = cluster.http.post(
        "/v1/chat/completions", json=body | {"tools": tools, "tool_choice": "required"}
    )
    assert refused.status_code == 400  # this model's template knows no tools


def test_a_grammar_that_only_the_compiler_finds_wrong_is_a_400(cluster):
    body = {"model": cluster.model, "prompt": "x", "guided_grammar": "root ::= nothing"}
    answer = cluster.http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert "nothing" in answer.json()["error"]["message"]


def test_an_adapter_loaded_at_run_time_changes_the_tokens_as_its_matrices_say(cluster, model, tmp_path):
    folder = make_adapter(tmp_path / "own")
    body = {"lora_name": "own", "lora_path": str(folder)}
    assert cluster.http.post("/v1/load_lora_adapter", json=body).status_code == 200
    wanted = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    base = cluster.complete(PROMPT, **wanted)["choices"][0]["token_ids"]
    adapted = cluster.complete(PROMPT, **wanted | {"model": "own"})["choices"][0]["token_ids"]
    matrices = {k.rsplit(".", 2)[1]: v for k, v in load_file(folder / "adapter_model.safetensors").items()}
    merged = copy.deepcopy(model)
    with torch.no_grad():
        merged.model.layers[0].self_attn.q_proj.weight += 4 / 2 * matrices["lora_B"] @ matrices["lora_A"]
    merged.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    expected = merged.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    assert adapted == expected
    assert adapted != base
