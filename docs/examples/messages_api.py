"""Anthropic's Messages API by the `anthropic` package: answers, events, tools, counting.

python docs/examples/messages_api.py http://127.0.0.1:8000 MODEL
"""

import sys

import anthropic

URL, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}


def answers() -> None:
    found = client.messages.create(
        model=MODEL, max_tokens=24, system="Be short.", messages=HELLO, extra_body=GREEDY
    )
    assert found.content[0].type == "text"
    assert found.content[0].text
    assert found.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(model=MODEL, system="Be short.", messages=HELLO)
    assert counted.input_tokens == found.usage.input_tokens + found.usage.cache_read_input_tokens


def events() -> None:
    ask = {"model": MODEL, "max_tokens": 24, "messages": HELLO, "extra_body": GREEDY}
    whole = client.messages.create(**ask)
    kinds = [event.type for event in client.messages.create(**ask, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert "content_block_start" in kinds
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        assert text == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens


def stops() -> None:
    ask = {"model": MODEL, "max_tokens": 24, "messages": HELLO, "extra_body": GREEDY}
    text = client.messages.create(**ask).content[0].text
    stop = text[3:6]
    found = client.messages.create(**ask, stop_sequences=[stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text[: text.index(stop)]


def tools() -> None:
    question = {"role": "user", "content": "What is the weather in Paris?"}
    ask = {
        "model": MODEL,
        "max_tokens": 80,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    found = client.messages.create(**ask, messages=[question])
    assert found.stop_reason == "tool_use"
    (use,) = [block for block in found.content if block.type == "tool_use"]
    assert isinstance(use.input["city"], str)
    with client.messages.stream(**ask, messages=[question]) as stream:
        assert stream.get_final_message().content[-1].type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny, 21 degrees."}
    conversation = [question, {"role": "assistant", "content": found.content}]
    conversation.append({"role": "user", "content": [result, {"type": "text", "text": "Thanks."}]})
    options = {"model": MODEL, "max_tokens": 16, "tools": [TOOL], "tool_choice": {"type": "none"}}
    assert client.messages.create(**options, messages=conversation).content


def continues() -> None:
    """An assistant's message at the end is continued."""
    begun = [*HELLO, {"role": "assistant", "content": "Hello, my name is"}]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=begun).content


def errors() -> None:
    wrong = {
        "max_tokens": -1,
        "messages[0].role": [{"role": "nobody", "content": "x"}],
        "tools[0].name": [{"name": "a b", "input_schema": {}}],
        "tool_choice.type": {"type": "maybe"},
    }
    for field, value in wrong.items():
        ask = {"model": MODEL, "max_tokens": 8, "messages": HELLO}
        ask[field.split("[")[0].split(".")[0]] = value
        try:
            client.messages.create(**ask)
        except anthropic.BadRequestError as error:
            assert error.body["error"]["type"] == "invalid_request_error"
            assert field in error.body["error"]["message"], (field, error)
        else:
            raise AssertionError(f"{field} was accepted")
    try:
        client.messages.create(model="nobody", max_tokens=8, messages=HELLO)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"


assert MODEL in [model.id for model in client.models.list()]
answers()
events()
stops()
tools()
continues()
errors()
print("messages: all as Anthropic's API has them")
