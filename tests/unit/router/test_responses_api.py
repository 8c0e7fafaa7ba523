"""POST /v1/responses of a real router: events, items, conversations that are kept, errors by field."""

import json

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from baton.core.errors import ClientError
from router.responses.body import ResponsesBody
from router.responses.conversation import NAMES, chat_of
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder

EVENT = TypeAdapter(ResponseStreamEvent)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = make_folder(tmp_path_factory.mktemp("m") / "tiny")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def spell(folder):
    tokenizer = Tokenizer.load(str(folder))
    return lambda text: tokenizer._rust.encode(text, add_special_tokens=False).ids


def events_of(text):
    """Return the events of a stream, each checked by the type that OpenAI's package has for it."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        EVENT.validate_python(body)
        found.append(body)
    assert [body["sequence_number"] for body in found] == list(range(len(found)))
    return found


async def streamed(c, **body):
    async with c.http() as http:
        answer = await http.post("/v1/responses", json={"model": MODEL, "input": "hi", "stream": True} | body)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


async def test_the_events_of_a_text(folder, spell):
    async with cluster(folder, FakeWorker(reply=spell("abc"))) as c:
        found = await streamed(c)
    assert kinds(found)[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds(found)[-4:] == ends
    assert set(kinds(found)[4:-4]) == {"output_text.delta"}
    assert "".join(e["delta"] for e in found[4:-4]) == found[-4]["text"] == "abc"
    response = found[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == "abc"
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 4


async def test_an_answer_that_is_cut_is_incomplete(folder, spell):
    async with cluster(folder, FakeWorker(reply=spell("a"), endless=True)) as c:
        found = await streamed(c, max_output_tokens=3)
    response = found[-1]["response"]
    assert kinds(found)[-1] == response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


async def test_reasoning_text_and_calls_are_items_of_their_own(folder, spell):
    said = '<think>so</think>yes<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    async with cluster(folder, FakeWorker(reply=spell(said)), model=parsers) as c:
        found = await streamed(c, tools=[TOOL])
        whole = await c.openai().responses.create(model=MODEL, input="hi", tools=[TOOL])
    output = found[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert output[2]["name"] == "f"
    assert json.loads(output[2]["arguments"]) == {"a": 1}
    assert [item.type for item in whole.output] == [item["type"] for item in output]
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    added = [event["output_index"] for event in found if event["type"] == "response.output_item.added"]
    done = [event["output_index"] for event in found if event["type"] == "response.output_item.done"]
    assert added == done == [0, 1, 2]
    pieces = [e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == output[2]["arguments"]


async def test_logprobs_are_those_of_a_chat(folder, spell):
    async with cluster(folder, FakeWorker(reply=spell("ab"))) as c:
        found = await streamed(c, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = [e for event in found if event["type"].endswith("text.delta") for e in event["logprobs"]]
    assert "".join(entry["token"] for entry in entries) == "ab"
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


async def test_a_stream_that_breaks_ends_with_a_failed_response(folder, spell):
    worker = FakeWorker(reply=spell("a"), endless=True)
    async with cluster(folder, worker, attempts_max=1) as c, c.http() as http:
        body = {"model": MODEL, "input": "hi", "stream": True, "max_output_tokens": 200}
        async with http.stream("POST", "/v1/responses", json=body) as answer:
            text = ""
            async for piece in answer.aiter_text():
                text += piece
                if text.count(".delta\n") == 2:
                    worker.crash()
        found = events_of(text)
    assert kinds(found)[-1] == "failed"
    assert found[-1]["response"]["error"]["message"]
    assert found[-1]["response"]["status"] == "failed"


async def test_a_conversation_goes_on_from_what_is_kept(folder, spell):
    worker = FakeWorker(reply=spell("b"))
    async with cluster(folder, worker) as c:
        client = c.openai()
        first = await client.responses.create(model=MODEL, input="one", instructions="be")
        second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        plain = [{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}]
        await client.responses.create(model=MODEL, input=plain)
        assert worker.started[1].tokens[: worker.started[1].prompt_token_count] == worker.started[2].tokens[
            : worker.started[2].prompt_token_count
        ]  # fmt: skip
        items = (await client.responses.input_items.list(second.id, order="asc")).data
        assert [item.role for item in items] == ["user", "assistant", "user"]
        page = await client.responses.input_items.list(second.id, order="asc", limit=2, after=items[0].id)
        assert [item.id for item in page.data] == [items[1].id, items[2].id]
        assert (await client.responses.retrieve(second.id)).output_text == "b"
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError, match="it was deleted"):
            await client.responses.create(model=MODEL, input="x", previous_response_id=second.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(first.id)


async def test_what_is_not_to_be_stored_is_not(folder, spell):
    async with cluster(folder, FakeWorker(reply=spell("b"))) as c:
        client = c.openai()
        found = await client.responses.create(model=MODEL, input="one", store=False)
        with pytest.raises(openai.NotFoundError, match="never stored"):
            await client.responses.retrieve(found.id)


WRONG = {
    "input": "",
    "input[0].type": [{"type": "computer_call"}],
    "input[0].content[0]": [{"role": "user", "content": [{"type": "input_image"}]}],
    "input[1].call_id": [{"role": "user", "content": "x"}, {"type": "function_call_output", "output": ""}],
    "input[0].call_id": [{"type": "function_call_output", "call_id": "1", "output": "x"}],
    "input[0].arguments": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}],
    "max_output_tokens": 0,
    "temperature": 3,
    "text.format.type": {"format": {"type": "xml"}},
    "text.format.schema.not": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}},
    "tools[0].type": [{"type": "web_search"}],
    "tools[0].name": [{"type": "function", "name": "a b"}],
    "tool_choice": {"type": "function", "name": "g"},
    "truncation": "some",
    "metadata": {"a": "x" * 600},
    "background": True,
    "conversation": "conv_1",
    "previous_response_id": "resp_0",
}


@pytest.mark.parametrize("field", WRONG)
async def test_a_wrong_field_is_named(folder, field):
    value = WRONG[field]
    async with cluster(folder, FakeWorker()) as c, c.http() as http:
        body = {"model": MODEL, "input": "hi"} | {field.split("[")[0].split(".")[0]: value}
        answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == (404 if field == "previous_response_id" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == field, error


def test_what_an_assistant_said_in_a_row_is_one_message():
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
    ]
    chat = chat_of(ResponsesBody(model="m", input=items), can_be_strict=True)
    user, turn, result, last = chat.body.messages
    assert turn["reasoning_content"] == "hm"
    assert turn["content"] == "b"
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["f", "g"]
    assert result == {"role": "tool", "tool_call_id": "2", "content": "c", "name": "g"}
    assert (user["content"], last["content"]) == ("a", "d")
    assert chat.places[1].calls == ["input[3]", "input[4]"]


def test_strict_is_kept_only_where_it_can_be_enforced():
    body = ResponsesBody(model="m", input="a", tools=[TOOL | {"strict": True}])
    for can_be in (True, False):
        (tool,) = chat_of(body, can_be_strict=can_be).body.tools
        assert tool["function"].get("strict", False) is can_be


def test_errors_have_the_names_of_the_api():
    error = ClientError("Please reduce the messages or max_completion_tokens.", param="messages")
    renamed = NAMES.renamed(error)
    assert (str(renamed), renamed.param) == ("Please reduce the input or max_output_tokens.", "input")
