"""smolagents against Baton: a model that must call a tool, as `ToolCallingAgent` asks it."""

import os

from smolagents import OpenAIServerModel, Tool
from smolagents.models import ChatMessage


class GetWeather(Tool):
    name = "get_weather"
    description = "Weather of a city."
    inputs = {  # noqa: RUF012 - smolagents reads it from the class
        "city": {"type": "string", "description": "The city.", "enum": ["Paris", "Rome", "Oslo"]}
    }
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"18 degrees and rain in {city}"


model = OpenAIServerModel(
    os.environ["MODEL"], os.environ["BATON_URL"] + "/v1", api_key="none", temperature=0, max_tokens=400
)
question = ChatMessage(role="user", content=[{"type": "text", "text": "What is the weather in Rome?"}])
answer = model.generate([question], tools_to_call_from=[GetWeather()])
assert answer.tool_calls, answer
print(answer.tool_calls[0].function)
