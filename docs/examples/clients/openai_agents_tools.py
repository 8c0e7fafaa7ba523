"""The OpenAI Agents SDK against Baton: an agent that must call a tool, and reads its result."""

import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    ToolCallItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """Get the weather of a city."""
    return f"18 degrees and rain in {city}"


client = AsyncOpenAI(base_url=os.environ["BATON_URL"] + "/v1", api_key="none")
agent = Agent(
    name="Weather",
    model=OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=client),
    tools=[get_weather],
    model_settings=ModelSettings(tool_choice="required", temperature=0, max_tokens=400),
)
result = Runner.run_sync(agent, "What is the weather in Rome?")
assert any(isinstance(item, ToolCallItem) for item in result.new_items)
print([type(item).__name__ for item in result.new_items], result.final_output)
