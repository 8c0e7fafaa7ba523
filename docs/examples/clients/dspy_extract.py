"""DSPy against Baton: a typed signature, answered through a JSON schema."""

import os
from typing import Literal

import dspy


class PlanTrip(dspy.Signature):
    """Read where a journey goes and how long it takes."""

    text: str = dspy.InputField()
    city: Literal["Paris", "Rome", "Oslo"] = dspy.OutputField()
    is_long: bool = dspy.OutputField()


class AnyModel(dspy.LM):
    """A model of your own: litellm's list of names, which tells DSPy what models can do, has it not."""

    @property
    def supports_response_schema(self) -> bool:
        return True


model = AnyModel(
    "openai/" + os.environ["MODEL"],
    api_base=os.environ["BATON_URL"] + "/v1",
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
