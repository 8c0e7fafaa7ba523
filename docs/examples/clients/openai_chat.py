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
    "max_tokens": 100,
}

print(client.chat.completions.create(**ask).choices[0].message.content)
pieces = [
    chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)
]
print(len(pieces), "pieces")
print(client.chat.completions.parse(**ask, response_format=Trip).choices[0].message.parsed)

choice = client.chat.completions.create(**ask, tools=[WEATHER], tool_choice="required").choices[0]
calls = choice.message.tool_calls
assert calls is not None
print(calls[0].function.name, Trip(**json.loads(calls[0].function.arguments)))
