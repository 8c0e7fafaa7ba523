"""outlines against Baton, through its class for vLLM: JSON, a choice, a regular expression, a grammar."""

import os
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field


class Stay(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


SUM = """
?start: NUMBER ("+" NUMBER)~1..3
NUMBER: /[1-9][0-9]?/
"""

client = openai.OpenAI(base_url=os.environ["BATON_URL"] + "/v1", api_key="none")
model = outlines.from_vllm(client, os.environ["MODEL"])
print(Stay.model_validate_json(model("Three days in Rome.", Stay, max_tokens=400)))
choice = model("Rain or sun?", Literal["rain", "sun"], max_tokens=20)
assert choice in ("rain", "sun")
print(choice)
for term in (Regex(r"[0-9]{3}-[0-9]{2}"), CFG(SUM)):
    print(model("Numbers, please.", term, max_tokens=50))
