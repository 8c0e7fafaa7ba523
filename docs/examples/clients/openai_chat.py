"""The openai package against Baton: chat, a stream, a class as the answer's form, and a forced tool call."""

import json
import os
from typing import Literal

import openai
from pydantic import BaseModel, Field


class Trip(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": Trip.model_json_schema(),
    },
}

client = openai.OpenAI(base_url=os.environ["BATON_URL"] + "/v1", api_key="none")
model = client.models.list().data[0].id
ask = {
    "model": model,
    "messages": [{"role": "user", "content": "Three days in Rome: the weather?"}],
    "temperature": 0,
}

print(client.chat.completions.create(**ask, max_tokens=30).choices[0].message.content)
chunks = client.chat.completions.create(**ask, max_tokens=30, stream=True)
print(len([chunk.choices[0].delta.content for chunk in chunks]), "pieces")

parsed = client.chat.completions.parse(**ask, max_tokens=400, response_format=Trip)
print(parsed.choices[0].message.parsed)

forced = client.chat.completions.create(**ask, max_tokens=400, tools=[WEATHER], tool_choice="required")
choice = forced.choices[0]
calls = choice.message.tool_calls
assert calls is not None
assert choice.finish_reason == "tool_calls"
print(calls[0].function.name, Trip(**json.loads(calls[0].function.arguments)))
