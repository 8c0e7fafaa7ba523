"""Request options served by real workers: compared with transformers where it has the same option, across the
hand-over from prefill to decode, across the loss of the decode worker in mid-stream (which repeats, loses
and changes nothing), and as a trace."""

import copy
import json
import os
import random
import re
import secrets
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import grpc
import pytest
import torch
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.cluster import Cluster, eventually
from tests.models import make_model
from tests.unit.router.test_http_tools import make_adapter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = [5, 77, 300, 41, 9, 260, 33, 120, 499, 64, 18, 222, 7, 350, 71, 90, 15, 16, 401, 28]


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


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span with the process that it came from."""

    def __init__(self):
        self._lock = Lock()
        self.spans = []

    def Export(self, request, context):
        with self._lock:
            for resource in request.resource_spans:
                facts = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(facts["service.instance.id"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id):
        """name -> (process, span) of one trace."""
        with self._lock:
            return {
                span.name: (process, span) for process, span in self.spans if span.trace_id.hex() == trace_id
            }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny", seed=7)


@pytest.fixture(scope="module")
def model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def collector():
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer
    server.stop(0).wait(10)


@pytest.fixture(scope="module")
def cluster(path, collector):
    settings = {
        "model__dtype": "float32",
        "engine__block_tokens": 16,
        "telemetry__otlp_endpoint": f"http://127.0.0.1:{collector.port}",
    }
    with Cluster(path, **settings) as running:
        yield running
        running.assert_idle()


@torch.inference_mode()
def logprobs_of(model, tokens):
    """[len(tokens), vocab]: log probabilities of the token after each."""
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
    """The hand-over is included: the first token's logprobs come from the prefill worker, the others from
    decode."""
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
    # This model's template knows no tools, so they are text of the conversation.
    called = cluster.http.post(
        "/v1/chat/completions", json=body | {"tools": tools, "tool_choice": "required"}
    )
    assert called.status_code == 200, called.text
    choice = called.json()["choices"][0]
    if choice["finish_reason"] == "tool_calls":
        [call] = choice["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"on", "kind"}


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


def prompt_of(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


def collect(events):
    """Token ids, logprobs and text of a streamed completion, and its finish reason."""
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


def test_a_request_is_one_trace_through_all_processes(cluster, collector):
    name = f"text_completion {cluster.model}"
    wanted = {name, "prefill", "kv.transfer", "decode"}
    trace_id, client = secrets.token_hex(16), secrets.token_hex(8)
    body = {"model": cluster.model, "prompt": list(range(5, 300)), "max_tokens": 8, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace_id}-{client}-01"}
    assert cluster.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    trace = eventually(
        "a whole trace",
        lambda: (found := collector.trace(trace_id)) and wanted <= found.keys() and found,
        timeout_s=30,
    )
    request = trace[name][1]
    assert request.parent_span_id.hex() == client
    assert trace["prefill"][1].parent_span_id == trace["decode"][1].parent_span_id == request.span_id
    assert trace["kv.transfer"][1].parent_span_id == trace["decode"][1].span_id
    processes = {trace[one][0].split(".")[0] for one in (name, "prefill", "decode")}
    assert len(processes) == 3
    moved = {a.key: a.value.int_value for a in trace["kv.transfer"][1].attributes}
    assert moved["bytes"] > 0
