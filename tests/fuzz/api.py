"""A fuzzer of the public API: schemathesis on the OpenAPI document of a real router with a fake worker.

    python -m tests.fuzz.api --seconds 3600

No answer is a 5xx or one that the document does not have, and requests that are right in every field are
served.
"""

import argparse
import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import hypothesis
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from router.text.tokenizer import Tokenizer
from tests.certificates import secure_tests
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
CONTEXT = 512
ROUND_CASES = 200
FINDINGS_MAX = 20
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


@contextlib.contextmanager
def router() -> Iterator[str]:
    """Run a router on a loop of its own, in a thread. Yields its URL."""
    urls: list[str] = []
    is_ready, loop = threading.Event(), asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve() -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = make_folder(Path(folder) / "tiny")
            (model / "chat_template.jinja").write_text(TEMPLATE)
            letters = Tokenizer.load(str(model))._rust.encode("abc", add_special_tokens=False).ids
            worker = FakeWorker(reply=letters, vector=(0.6, 0.8))
            options = {"model": {"tool_parser": "hermes"}, "adapter_loading": False}
            async with cluster(model, worker, context=CONTEXT, **options) as running:
                urls.append(running.url)
                is_ready.set()
                await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    if not is_ready.wait(120):
        raise RuntimeError("the router did not start")
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(60)
        loop.close()


# --- requests that are right ----------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant"])},
        optional={"name": TEXTS},
    ).flatmap(
        lambda message: st.builds(
            lambda content: message | {"content": content},
            TEXTS
            | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), min_size=1, max_size=3),
        )
    ),
    min_size=1,
    max_size=3,
)
SCHEMAS = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        {"enum": ["a", 1, None]},
        {"anyOf": [{"type": "number"}, {"const": "x"}]},
        {"$defs": {"n": {"type": "boolean"}}, "type": "array", "items": {"$ref": "#/$defs/n"}},
        True,
    ]
)
COMMON = {
    "max_tokens": st.integers(1, 20),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 100),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 4),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": TEXTS | st.lists(TEXTS, max_size=4),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 10),
    "logit_bias": st.dictionaries(st.integers(0, 200).map(str), st.floats(-100, 100), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 200), max_size=4),
    "ignore_eos": st.booleans(),
    "user": st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
    "stream": st.booleans(),
    "return_token_ids": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "metadata": st.dictionaries(TEXTS, TEXTS, max_size=2),
}
STRUCTURED = st.one_of(
    SCHEMAS.map(lambda schema: {"guided_json": schema}),
    SCHEMAS.map(
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    ),
    st.just({"response_format": {"type": "json_object"}}),
    st.lists(TEXTS, min_size=1, max_size=4).map(lambda choices: {"guided_choice": choices}),
    st.sampled_from(["[a-z]+", "(a|b)*c", r"\d{1,3}"]).map(lambda pattern: {"guided_regex": pattern}),
    st.just({}),
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHATS = st.builds(
    lambda body, structured, more: {"model": MODEL} | body | structured | more,
    st.fixed_dictionaries(
        {"messages": MESSAGES},
        optional=COMMON | {"max_completion_tokens": st.integers(1, 20), "parallel_tool_calls": st.booleans()},
    ),
    STRUCTURED,
    st.sampled_from([{}, {"tools": [TOOL]}, {"logprobs": True, "top_logprobs": 2}]),
)
COMPLETIONS = st.builds(
    lambda body, structured: {"model": MODEL} | body | structured,
    st.fixed_dictionaries(
        {
            "prompt": TEXTS
            | st.lists(TEXTS, min_size=1, max_size=3)
            | st.lists(st.integers(2, 200), min_size=1)
        },
        optional=COMMON | {"logprobs": st.integers(0, 5), "echo": st.booleans()},
    ),
    STRUCTURED,
)
EMBEDDINGS = st.fixed_dictionaries(
    {
        "model": st.just(MODEL),
        "input": TEXTS | st.lists(TEXTS, min_size=1, max_size=5) | st.lists(st.integers(2, 200), min_size=1),
    },
    optional={"encoding_format": st.sampled_from(["float", "base64"]), "user": TEXTS},
)
RIGHT = {"/v1/chat/completions": CHATS, "/v1/completions": COMPLETIONS, "/v1/embeddings": EMBEDDINGS}


def check_right(client: httpx.Client, path: str, body: dict) -> None:
    """Fail unless the request is answered as it asks."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, f"{path} {body}: {answer.status_code} {answer.text}"
    if body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), f"{path} {body}: {answer.text}"
        assert "error" not in answer.text.split('"model"')[0]
        return
    found = answer.json()
    assert "error" not in found
    if path == "/v1/embeddings":
        count = (
            len(body["input"]) if isinstance(body["input"], list) and isinstance(body["input"][0], str) else 1
        )
        assert [one["index"] for one in found["data"]] == list(range(count))
        return
    prompt = body.get("prompt", "")
    count = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
    assert len(found["choices"]) == count * body.get("n", 1)
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


# --- running --------------------------------------------------------------------------------------


def settings(cases: int, *, is_random: bool) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=cases,
        derandomize=not is_random,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink]
        if is_random
        else [hypothesis.Phase.generate],
    )


def checks(url: str, *, cases: int, is_random: bool, seed: int = 0) -> Iterator[tuple[str, Exception | None]]:
    """Run one round of each endpoint. Yields what was tried and the failure that was found."""
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
    schema.config.update(base_url=url)

    def failure_in(strategy: st.SearchStrategy, check: Callable) -> Exception | None:
        test = hypothesis.given(strategy)(lambda value: check(value))
        return failure_of(hypothesis.seed(seed)(settings(cases, is_random=is_random)(test)))

    def check_case(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=60)

    for found in schema.get_all_operations():
        operation = found.ok()
        modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.method == "post" else [])]
        for mode in modes:
            strategy = operation.as_strategy(generation_mode=mode)
            if (
                mode is GenerationMode.NEGATIVE
                and not operation.body
                and not any(operation.iter_parameters())
            ):
                continue  # there is nothing that could be wrong
            yield f"{mode.value} {operation.label}", failure_in(strategy, check_case)
    with httpx.Client(base_url=url, timeout=60) as client:
        for path, bodies in RIGHT.items():
            yield f"right {path}", failure_in(bodies, partial(check_right, client, path))


def failure_of(run) -> Exception | None:
    try:
        run()
    except hypothesis.errors.Unsatisfiable:
        return None  # an operation whose every request is right has no wrong ones
    except (Failure, FailureGroup, AssertionError, httpx.HTTPError) as error:
        return error
    return None


def main() -> None:
    secure_tests()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    began_s, rounds, findings = time.monotonic(), 0, 0
    with router() as url:
        while time.monotonic() - began_s < options.seconds and findings < FINDINGS_MAX:
            for what, failure in checks(url, cases=ROUND_CASES, is_random=True, seed=seed + rounds):
                if failure is not None:
                    findings += 1
                    told = failure.exceptions if isinstance(failure, FailureGroup) else [failure]
                    for one in told:
                        print(f"finding (seed {seed + rounds}): {what}: {one!s:.3000}", flush=True)
                if time.monotonic() - began_s > options.seconds:
                    break
            rounds += 1
            print(f"{time.monotonic() - began_s:.0f} s: {rounds} rounds, {findings} findings", flush=True)
    raise SystemExit(1 if findings else 0)


if __name__ == "__main__":
    main()
