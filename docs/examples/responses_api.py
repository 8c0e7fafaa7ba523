"""OpenAI's Responses API by the `openai` package: answers, events, tools, structured output, conversations.

python docs/examples/responses_api.py http://127.0.0.1:8000 MODEL
"""

import sys

import openai
from openai.types.responses import Response
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


def answers() -> Response:
    found = client.responses.create(
        model=MODEL, input="Say hello.", instructions="Be short.", max_output_tokens=24, temperature=0
    )
    assert found.output_text
    assert found.usage.output_tokens <= 24
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    return found


def events() -> None:
    """The events of a stream arrive in OpenAI's order, and add up to the whole answer."""
    ask = {"model": MODEL, "input": "Count to five.", "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**ask)
    found = list(client.responses.create(**ask, stream=True))
    kinds = [event.type for event in found]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in found if event.type == "response.output_text.delta")
    assert text == found[-1].response.output_text == whole.output_text
    if found[-1].type == "response.completed":  # The helper of the package knows no other end.
        with client.responses.stream(**ask) as stream:
            assert stream.until_done().get_final_response().output_text == text


def tools() -> None:
    ask = {
        "model": MODEL,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_output_tokens": 80,
        "temperature": 0,
    }
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    found = client.responses.create(**ask, input=question)
    (call,) = [item for item in found.output if item.type == "function_call"][:1]
    assert call.name == "weather"
    assert '"city"' in call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}
    options = {"model": MODEL, "tools": [TOOL], "tool_choice": "none", "max_output_tokens": 24}
    stateless = client.responses.create(**options, input=[*question, *found.output, result])
    kept = client.responses.create(**options, input=[result], previous_response_id=found.id)
    assert stateless.usage.input_tokens == kept.usage.input_tokens
    streamed = list(client.responses.create(**ask, input=question, stream=True))
    pieces = [e.delta for e in streamed if e.type == "response.function_call_arguments.delta"]
    done = next(e for e in streamed if e.type == "response.function_call_arguments.done")
    assert done.arguments.startswith("".join(pieces)[: len(done.arguments)])


def structured() -> None:
    found = client.responses.parse(
        model=MODEL, input="Name a city.", text_format=City, max_output_tokens=200, temperature=0
    )
    assert isinstance(found.output_parsed, City)


def conversations(first: Response) -> None:
    second = client.responses.create(
        model=MODEL, input="And again.", previous_response_id=first.id, max_output_tokens=8
    )
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    client.responses.delete(second.id)
    try:
        client.responses.create(model=MODEL, input="x", previous_response_id=second.id)
    except openai.NotFoundError as error:
        assert "deleted" in str(error)
    else:
        raise AssertionError("a deleted response is still there")


def errors() -> None:
    wrong = {
        "max_output_tokens": -1,
        "temperature": 9,
        "input[0].role": [{"role": "nobody", "content": "x"}],
        "tools[0].name": [{"type": "function", "name": "a b", "parameters": {}}],
        "include[0]": ["nothing"],
    }
    for field, value in wrong.items():
        ask = {"model": MODEL, "input": "x"} | {field.split("[")[0]: value}
        try:
            client.responses.create(**ask)
        except openai.BadRequestError as error:
            assert error.param == field, (field, error)
        else:
            raise AssertionError(f"{field} was accepted")


first = answers()
events()
tools()
structured()
conversations(first)
errors()
print("responses: all as OpenAI's API has them")
