"""guidance against Baton, through its class for vLLM servers: a choice, a regular expression and JSON."""

import os
from typing import Literal

import guidance
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, Field


class Journey(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def asked(text: str) -> VLLMModel:
    lm = VLLMModel(os.environ["MODEL"], base_url=os.environ["BATON_URL"] + "/v1", api_key="none", echo=False)
    with guidance.user():
        lm += text
    return lm


lm = asked("Rain or sun?")
with guidance.assistant():
    lm += guidance.select(["rain", "sun"], name="weather")
assert lm["weather"] in ("rain", "sun")
print(lm["weather"])

lm = asked("A date, please.")
with guidance.assistant():
    lm += "On " + guidance.regex("[0-3][0-9]-[01][0-9]", name="date")
print(lm["date"])

lm = asked("Three days in Rome.")
with guidance.assistant():
    lm += guidance.json("trip", schema=Journey)
print(Journey.model_validate_json(lm["trip"]))
