"""POST /v1/messages of a real router: blocks, events, counting, errors in Anthropic's shape."""

import json

import anthropic
import pytest

from router.messages.body import MessagesBody
from router.messages.conversation import chat_of
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import BOUND_S, MODEL, FakeWorker, cluster, make_folder
from tests.unit.router.test_responses_api import TEMPLATE

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = make_folder(tmp_path_factory.mktemp("m") / "tiny")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def spell(folder):
    tokenizer = Tokenizer.load(str(folder))
    return lambda text: tokenizer._rust.encode(text, add_special_tokens=False).ids


def client_of(c):
    options = {"api_key": "none", "max_retries": 0, "timeout": BOUND_S}
    return anthropic.AsyncAnthropic(base_url=c.url, **options)


async def test_a_message_and_its_stream_say_the_same(folder, spell):
    async with cluster(folder, FakeWorker(reply=spell("abc"))) as c, client_of(c) as client:
        ask = {"model": MODEL, "max_tokens": 9, "messages": HI, "system": [{"type": "text", "text": "be"}]}
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            kinds = [event.type async for event in stream if event.type != "text"]
            last = await stream.get_final_message()
        counted = await client.messages.count_tokens(
            model=MODEL, messages=HI, system=[{"type": "text", "text": "be"}]
        )
    assert whole.content[0].text == last.content[0].text == "abc"
    assert whole.stop_reason == last.stop_reason == "end_turn"
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens == 3


async def test_thinking_and_tools_are_blocks(folder, spell):
    said = '<think>so</think>yes<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    async with cluster(folder, FakeWorker(reply=spell(said)), model=parsers) as c, client_of(c) as client:
        ask = {"model": MODEL, "max_tokens": 90, "messages": HI, "tools": [TOOL]}
        found = await client.messages.create(**ask, thinking={"type": "enabled", "budget_tokens": 1024})
        async with client.messages.stream(**ask, thinking={"type": "adaptive"}) as stream:
            streamed = await stream.get_final_message()
        without = await client.messages.create(**ask)
    for message in (found, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[0].thinking == "so"
        assert message.content[2].input == {"a": 1}
        assert message.stop_reason == "tool_use"
    assert [block.type for block in without.content] == ["text", "tool_use"]


async def test_a_stop_sequence_and_a_limit_are_told(folder, spell):
    async with cluster(folder, FakeWorker(reply=spell("abc"))) as c, client_of(c) as client:
        ask = {"model": MODEL, "messages": HI}
        stopped = await client.messages.create(**ask, max_tokens=9, stop_sequences=["b"])
        cut = await client.messages.create(**ask, max_tokens=1)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "b")
    assert stopped.content[0].text == "a"
    assert cut.stop_reason == "max_tokens"


async def test_a_stream_that_breaks_ends_with_an_error_event(folder, spell):
    worker = FakeWorker(reply=spell("a"), endless=True)
    async with cluster(folder, worker, attempts_max=1) as c, c.http() as http:
        body = {"model": MODEL, "max_tokens": 200, "messages": HI, "stream": True}
        async with http.stream("POST", "/v1/messages", json=body) as answer:
            text, is_up = "", True
            async for piece in answer.aiter_text():
                text += piece
                if is_up and "content_block_delta" in text:
                    worker.crash()
                    is_up = False
    name, data = text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] in ("api_error", "overloaded_error")
    assert "message_stop" not in text


WRONG = {
    "max_tokens": 0,
    "messages": [],
    "messages[0].role": [{"role": "nobody", "content": "x"}],
    "messages[0].content[0]": [{"role": "user", "content": [{"type": "image"}]}],
    "messages[0].content[1].tool_use_id": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "x"},
                {"type": "tool_result", "tool_use_id": "7", "content": "y"},
            ],
        }
    ],
    "messages[0].content[0].tool_use_id": [{"role": "user", "content": [{"type": "tool_result"}]}],
    "messages[0].content[0].input": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 1}]}
    ],
    "system[0]": [{"type": "image"}],
    "temperature": 9,
    "stop_sequences": [""],
    "tools[0].name": [{"name": "a b", "input_schema": {}}],
    "tools[0].input_schema": [{"name": "f", "input_schema": 1}],
    "tools[0].type": [{"type": "bash_20250124", "name": "bash"}],
    "tool_choice.type": {"type": "maybe"},
    "thinking.type": {"type": "deep"},
    "output_config.format": {"format": {"type": "xml"}},
    "container": "c",
}


@pytest.mark.parametrize("field", WRONG)
async def test_a_wrong_field_is_named_in_anthropics_shape(folder, field):
    async with cluster(folder, FakeWorker()) as c, c.http() as http:
        body = {"model": MODEL, "max_tokens": 9, "messages": HI}
        body[field.split("[")[0].split(".")[0]] = WRONG[field]
        answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert field in found["error"]["message"]


async def test_every_error_of_these_paths_has_anthropics_shape(folder, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text('{"tenants": {}, "keys": []}')
    async with cluster(folder, FakeWorker()) as c, c.http() as http:
        unknown = {"model": "nobody", "max_tokens": 9, "messages": HI}
        for answer, status, kind in (
            (await http.post("/v1/messages", json=unknown), 404, "not_found_error"),
            (await http.post("/v1/messages", content=b"{"), 400, "invalid_request_error"),
            (await http.get("/v1/messages/nothing"), 404, "not_found_error"),
            (
                await http.post("/v1/messages/count_tokens", json={"model": MODEL}),
                400,
                "invalid_request_error",
            ),
        ):
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), answer.text
    async with cluster(folder, FakeWorker(), keys=str(keys)) as c, client_of(c) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model=MODEL, max_tokens=9, messages=HI)


def test_results_of_tools_come_before_the_text_beside_them():
    content = [
        {"type": "text", "text": "thanks"},
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "21"}]},
    ]
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": content}]
    chat = chat_of(MessagesBody(model="m", max_tokens=1, messages=messages), reads_effort=False)
    assert [message["role"] for message in chat.body.messages] == ["assistant", "tool", "user"]
    assert chat.body.messages[1]["content"] == "21"
    assert chat.body.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'


def test_an_assistants_message_at_the_end_is_continued():
    messages = [*HI, {"role": "assistant", "content": "I"}]
    chat = chat_of(MessagesBody(model="m", max_tokens=1, messages=messages), reads_effort=False)
    assert chat.body.continue_final_message
