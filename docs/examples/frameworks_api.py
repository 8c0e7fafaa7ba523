"""The Responses and Messages APIs as frameworks call them: litellm, LangChain, OpenAI's Agents SDK.

Each part runs if its package is installed (litellm, langchain-openai, openai-agents).

python docs/examples/frameworks_api.py http://127.0.0.1:8000 MODEL
"""

import asyncio
import importlib.util
import sys

URL, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
HELLO = "Say hello."


def with_litellm() -> str:
    import litellm

    openai = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
    found = litellm.responses(**openai, input=HELLO, max_output_tokens=16)
    assert found.output[0].content[0].text
    kinds = [
        event.type for event in litellm.responses(**openai, input=HELLO, max_output_tokens=16, stream=True)
    ]
    assert kinds[0] == "response.created", kinds
    anthropic = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
    messages = [{"role": "user", "content": HELLO}]
    answer = litellm.completion(**anthropic, messages=messages, max_tokens=16)
    assert answer.choices[0].message.content
    chunks = list(litellm.completion(**anthropic, messages=messages, max_tokens=16, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return "responses and messages, streamed and not"


def with_langchain_openai() -> str:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="none",
        use_responses_api=True,
        max_tokens=16,
        max_retries=0,
    )
    found = model.invoke(HELLO)
    assert found.text
    assert found.usage_metadata["output_tokens"] <= 16
    assert "".join(chunk.text for chunk in model.stream(HELLO))
    kept = model.bind(previous_response_id=found.response_metadata["id"]).invoke("And again.")
    assert kept.text
    return "responses, streamed and not, previous_response_id"


def with_agents() -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    agents.set_default_openai_client(client)
    agent = agents.Agent(
        name="greeter",
        instructions="Be short.",
        model=MODEL,
        model_settings=agents.ModelSettings(max_tokens=400, temperature=0),
    )

    async def run() -> None:
        found = await agents.Runner.run(agent, HELLO)
        assert found.final_output
        streamed = agents.Runner.run_streamed(agent, HELLO)
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds

    asyncio.run(run())
    return "the default model (responses), streamed and not"


PARTS = {"litellm": with_litellm, "langchain_openai": with_langchain_openai, "agents": with_agents}
for package, part in PARTS.items():
    if importlib.util.find_spec(package) is not None:
        print(f"{package}: {part()}")
