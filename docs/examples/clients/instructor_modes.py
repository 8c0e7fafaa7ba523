"""instructor against Baton: a class as the answer's form, in its default mode and the others."""

import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Visit(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


client = openai.OpenAI(base_url=os.environ["BATON_URL"] + "/v1", api_key="none")
modes = (None, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
for mode in modes:
    wrapped = instructor.from_openai(client) if mode is None else instructor.from_openai(client, mode=mode)
    trip = wrapped.chat.completions.create(
        model=os.environ["MODEL"],
        response_model=Visit,
        messages=[{"role": "user", "content": "Three days in Rome."}],
        temperature=0,
        max_tokens=400,
        max_retries=1,
    )
    print(wrapped.mode, trip)
