"""Modes of instructor, pydantic-ai and smolagents that constrain nothing: it is the model that has to obey.

Each is asked for in prose, so a small model may fail; run it against several servers of one model to see
which failures are the model's. A call ends in an answer, or in an error of the client's about what the model
wrote. Nothing else may end it: an error of the server's is raised.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import instructor
import openai
from instructor.core.exceptions import InstructorError
from pydantic import BaseModel, Field
from pydantic_ai import Agent, PromptedOutput, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import CodeAgent, OpenAIServerModel
from smolagents.memory import ActionStep

URL, MODEL = os.environ["BATON_URL"] + "/v1", os.environ["MODEL"]
QUESTION = "Three days in Rome."
SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200}


class Holiday(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def instructor_mode(mode: instructor.Mode, form: Any) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=mode)
    messages: Any = [{"role": "user", "content": QUESTION}]
    found = client.chat.completions.create(
        model=MODEL, response_model=form, messages=messages, max_retries=1, **SETTINGS
    )
    return list(found) if form is not Holiday else found


def pydantic_ai_prompted() -> Holiday:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    agent = Agent(model, output_type=PromptedOutput(Holiday), model_settings=SETTINGS)
    return agent.run_sync(QUESTION).output


def smolagents_code() -> str:
    model = OpenAIServerModel(MODEL, URL, api_key="none", **SETTINGS)
    agent = CodeAgent(tools=[], model=model, max_steps=1, verbosity_level=0)
    agent.run("Compute 6 * 7 in Python and return it with final_answer.")
    step = next(step for step in agent.memory.steps if isinstance(step, ActionStep))
    return f"no code block: {step.model_output[:80]!r}" if step.error else f"ran {step.code_action!r}"


CALLS: dict[str, Callable[[], Any]] = {
    "instructor MD_JSON": lambda: instructor_mode(instructor.Mode.MD_JSON, Holiday),
    "instructor PARALLEL_TOOLS": lambda: instructor_mode(instructor.Mode.PARALLEL_TOOLS, Iterable[Holiday]),
    "pydantic-ai PromptedOutput": pydantic_ai_prompted,
    "smolagents CodeAgent": smolagents_code,
}

for name, call in CALLS.items():
    try:
        print(f"{name}: {call()!r}")
    except (InstructorError, UnexpectedModelBehavior) as error:
        attempts = [attempt.exception for attempt in getattr(error, "failed_attempts", None) or ()]
        if found := [one for one in (error.__cause__, *attempts) if isinstance(one, openai.APIError)]:
            raise found[0] from error
        why = " ".join(str((attempts or [error])[-1]).split())
        print(f"{name}: the model did not obey: {why[:100]}")
