"""pydantic-ai against Baton: answers as a class, through its default (an output tool) and a JSON schema."""

import os
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Voyage(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


provider = OpenAIProvider(base_url=os.environ["BATON_URL"] + "/v1", api_key="none")
model = OpenAIChatModel(os.environ["MODEL"], provider=provider)
settings = {"temperature": 0.0, "max_tokens": 400}
for output in (Voyage, NativeOutput(Voyage)):
    print(Agent(model, output_type=output, model_settings=settings).run_sync("Three days in Rome.").output)
