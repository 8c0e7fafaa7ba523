"""DSPy against Baton: a typed signature, answered through a JSON schema."""

import os
from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider


class PlanTrip(dspy.Signature):
    """Read where a journey goes and how long it takes."""

    text: str = dspy.InputField()
    city: Literal["Paris", "Rome", "Oslo"] = dspy.OutputField()
    is_long: bool = dspy.OutputField()


url = os.environ["BATON_URL"] + "/v1"
# DSPy sends a schema only where it knows that the model takes one, and its list has no model of yours.
register_provider(
    ProviderDefinition.chat(
        AccessPolicy(provider="baton", base_url=url),
        compat=OpenAIChatCompat(max_tokens_field="max_tokens"),
    ),
    supports=ModelSupport(function_calling=True, response_schema=True),
)
model = dspy.LM(
    "baton/" + os.environ["MODEL"],
    api_base=url,
    api_key="none",
    temperature=0,
    max_tokens=400,
    cache=False,
)
dspy.configure(lm=model, adapter=dspy.JSONAdapter())
found = dspy.Predict(PlanTrip)(text="Three days in Rome.")
assert found.city in ("Paris", "Rome", "Oslo")
assert isinstance(found.is_long, bool)
print(found)
