"""No body holds up the event loop: large ones are read in threads, and what they may hold is bounded."""

import json
import threading

import msgspec
import orjson
import pytest

from baton.core.errors import ClientError
from router.http import prepare, served_models
from router.http.generation import ChatRequest, CompletionRequest
from router.http.request import ON_LOOP_BODY_BYTES, off_loop
from router.openai import response_format
from router.openai.call import RequestLimits
from router.openai.requests import parse_chat, parse_completion
from router.text import conversation
from router.text.conversation import MESSAGES_MAX
from router.text.json_bounds import NODES_MAX, JsonBudget
from router.text.model_card import ModelCard
from router.text.tokenizer import ON_LOOP_CHARACTERS, Tokenizer
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder

LIMITS = RequestLimits(ModelCard(context_tokens=4096, vocab_size=1000, eos_token_ids=(1,)), 16, 256)
HI = [{"role": "user", "content": "hi"}]
MANY = [[]] * (8 * 2**20 // 4)


def chat(**fields):
    return orjson.dumps({"model": MODEL, "messages": HI} | fields)


def call(arguments="{}"):
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


def assistant(*calls):
    return {"role": "assistant", "tool_calls": list(calls)}


TOOL = {"type": "function", "function": {"name": "f"}}
TEXT = {"type": "text", "text": "a"}
NAMES = {str(i): 0 for i in range(NODES_MAX)}

TOO_LARGE = {
    "2,300 messages of 128 calls": (
        chat(messages=[assistant(*[{"function": {"name": "f"}}] * 128)] * 2300), "messages"),
    "8,193 calls": (chat(messages=[assistant(*[call()] * 127)] * 65), "messages[64].tool_calls"),
    "8,193 parts": (chat(messages=[{"role": "user", "content": [TEXT] * 4097}] * 2), "messages[1].content"),
    "8 MiB of arguments": (
        chat(messages=[assistant(call(json.dumps({"a": MANY})))]),
        "messages[0].tool_calls[0].function.arguments"),
    "arguments together": (
        chat(messages=[assistant(*[call(json.dumps({"a": [[]] * 40_000}))] * 4)]),
        "messages[0].tool_calls[3].function.arguments"),
    "a schema as text": (chat(guided_json=json.dumps(MANY)), "guided_json"),
    "a schema": (chat(response_format={"type": "json_schema", "json_schema": {"schema": {"enum": MANY}}}),
        "response_format"),
    "tools": (chat(tools=[TOOL] * NODES_MAX), "tools"),
    "stops": (chat(stop=["ab"] * NODES_MAX), "stop"),
    "biases": (chat(logit_bias=NAMES), "logit_bias"),
    "options": (chat(chat_template_kwargs={f"a{i}": 0 for i in range(999)}), "chat_template_kwargs"),
    "documents": (chat(documents=[{"a": "b"}] * NODES_MAX), "documents"),
    "an unknown field": (chat(x=MANY), "x"),
    "deep": (b'{"model":"m","x":' + b"[" * 2**20 + b"]" * 2**20 + b"}", "x"),
    "repeated names": (b'{"model":"m","x":{' + b",".join([b'"a":0'] * NODES_MAX) + b"}}", "x"),
    "floats": (b'{"model":"m","x":[' + b",".join([b"1.5"] * (2 * 2**20)) + b"]}", "x"),
}  # fmt: skip


@pytest.fixture
def decoded(monkeypatch):
    """Nodes of every text that is decoded. A decoder holds the interpreter's lock until it is done."""
    sizes = []

    def decode(text, **options):
        budget = JsonBudget()
        budget._count(text if isinstance(text, bytes) else text.encode())
        sizes.append(budget._nodes)
        return real(text, **options)

    real = msgspec.json.decode
    monkeypatch.setattr(msgspec.json, "decode", decode)
    return sizes


@pytest.mark.parametrize(("body", "field"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_too_much_is_refused_and_the_field_named(body, field, decoded):
    with pytest.raises(ClientError) as error:
        parse_chat(body, LIMITS)
    assert error.value.param == field
    assert max(decoded, default=0) <= NODES_MAX


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [assistant(*[call('{"a": [1, "b"]}')] * 8)] * (MESSAGES_MAX // 8)},
        {"messages": HI * MESSAGES_MAX},
        {"messages": [{"role": "user", "content": [TEXT] * MESSAGES_MAX}]},
        {"messages": [{"role": "user", "content": 'a "quoted", [text] {' * 200_000}]},
        {"metadata": {"a": [[]] * 100_000}},
    ],
    ids=["calls", "messages", "parts", "text", "unknown"],
)
def test_as_much_as_documented_is_allowed(fields, decoded):
    parse_chat(chat(**fields), LIMITS)
    assert max(decoded) <= NODES_MAX


def test_a_million_token_ids_are_allowed():
    card = ModelCard(context_tokens=2**20, vocab_size=1000, eos_token_ids=(1,))
    body = b'{"model":"m","max_tokens":1,"prompt":[' + b",".join([b"7"] * (2**20 - 1)) + b"]}"
    found = parse_completion(body, RequestLimits(card, 16, 256))
    assert len(found.prompts[0]) == 2**20 - 1


# --- where the work is done -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_folder(tmp_path_factory.mktemp("model") / "tiny")
    (made / "chat_template.jinja").write_text("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    return made


@pytest.fixture
def where_run(monkeypatch):
    """Names of functions, and where they ran."""
    names = []

    def watch(owner, name, *, is_static=False):
        real = getattr(owner, name)

        def recorded(*args, **options):
            where = "loop" if threading.current_thread() is threading.main_thread() else "thread"
            names.append((name, where))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, staticmethod(recorded) if is_static else recorded)

    watch(ChatRequest, "parse", is_static=True)
    watch(CompletionRequest, "parse", is_static=True)
    watch(Tokenizer, "text_ids")
    watch(prepare, "tool_grammar")
    watch(served_models.Models, "asked_for")
    return names


LARGE = "a" * ON_LOOP_BODY_BYTES


async def test_a_large_body_is_read_in_a_thread(folder, where_run):
    async with cluster(folder, FakeWorker(reply=[7]), context=100_000) as c, c.http() as http:
        large = {"model": MODEL, "messages": HI, "metadata": {"a": LARGE}, "max_tokens": 2}
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        answer = await http.post(
            "/v1/chat/completions", json=large | {"tools": tools, "tool_choice": "required"}
        )
        assert answer.status_code == 200
        assert set(where_run) == {("parse", "thread"), ("text_ids", "thread"), ("tool_grammar", "thread")}
        where_run.clear()
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": LARGE, "max_tokens": 2})
        assert answer.status_code == 200
        assert {("parse", "thread"), ("text_ids", "thread")} <= set(where_run)
        assert not {("parse", "loop"), ("text_ids", "loop")} & set(where_run)


async def test_a_small_body_is_read_on_the_loop(folder, where_run):
    async with cluster(folder, FakeWorker(reply=[7])) as c, c.http() as http:
        small = {"model": MODEL, "messages": HI, "max_tokens": 2}
        assert (await http.post("/v1/chat/completions", json=small)).status_code == 200
        assert ("parse", "loop") in where_run


async def test_many_short_inputs_are_not_tokenised_on_the_loop(folder, where_run):
    async with cluster(folder, FakeWorker(vector=(1.0, 0.0))) as c, c.http() as http:
        inputs = ["ab " * 20] * 2048
        assert sum(map(len, inputs)) > ON_LOOP_CHARACTERS
        answer = await http.post("/v1/embeddings", json={"model": MODEL, "input": inputs})
        assert answer.status_code == 200
        assert len(answer.json()["data"]) == 2048
        assert where_run.count(("text_ids", "thread")) == 2048
        assert ("text_ids", "loop") not in where_run


async def test_the_model_of_a_large_body_is_read_in_a_thread(folder, where_run):
    async with cluster(folder, FakeWorker(reply=[7])) as c:
        models = c.router.models
        body = chat(metadata={"a": LARGE})
        await off_loop(models.first, len(body), 1e12, lambda: models.asked_for(body))
        assert where_run == [("asked_for", "thread")]


async def test_a_refusal_is_heard_by_the_client(folder):
    body, field = TOO_LARGE["2,300 messages of 128 calls"]
    async with cluster(folder, FakeWorker(reply=[7])) as c, c.http() as http:
        answer = await http.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


def test_both_readers_of_json_in_strings_are_bounded():
    for decode in (
        lambda text: response_format._decoded(text, "x"),
        lambda text: conversation._decoded(text, "x", JsonBudget()),
    ):
        with pytest.raises(ClientError, match="too large"):
            decode(json.dumps(MANY))
