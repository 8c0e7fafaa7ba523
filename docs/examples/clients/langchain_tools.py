"""LangChain against Baton: tools that are bound to a model, and answers as a class in each of its ways."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

City = Literal["Paris", "Rome", "Oslo"]


class Tour(BaseModel):
    """A journey to one city."""

    city: City
    days: int = Field(ge=1, le=9)


@tool
def get_weather(city: City) -> str:
    """Get the weather of a city."""
    return f"18 degrees and rain in {city}"


model = ChatOpenAI(
    base_url=os.environ["BATON_URL"] + "/v1",
    api_key="none",
    model=os.environ["MODEL"],
    temperature=0,
    max_tokens=400,
)
question = HumanMessage("What is the weather in Rome?")
called = model.bind_tools([get_weather], tool_choice="any").invoke([question])
call = called.tool_calls[0]
print(call)
result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
print(model.bind_tools([get_weather]).invoke([question, called, result]).content)
for method in ("function_calling", "json_schema"):
    trip = model.with_structured_output(Tour, method=method).invoke("Three days in Rome.")
    assert isinstance(trip, Tour)
    print(method, trip)
