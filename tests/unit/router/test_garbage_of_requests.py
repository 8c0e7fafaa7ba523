"""A request leaves nothing to the collector of circular garbage, whose search stops all streams: what a
request made is freed when it ends, however it ends."""

import asyncio
import contextlib

import pytest

from baton.core.messages import Role
from tests.circular_garbage import nothing_left
from tests.unit.router.http_fakes import MODEL, FakeWorker, make_folder
from tests.unit.router.http_fakes import cluster as http_cluster
from tests.unit.router.test_http_tools import TEMPLATE, TIME, USER

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUNDS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_folder(tmp_path_factory.mktemp("model") / "tiny")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


REQUESTS = {
    "chat": (CHAT, {"messages": USER}, 200),
    "chat stream": (CHAT, {"messages": USER, "stream": True}, 200),
    "tools": (CHAT, {"messages": USER, "tools": [TIME]}, 200),
    "tools stream": (CHAT, {"messages": USER, "tools": [TIME], "stream": True}, 200),
    "completion": (COMPLETIONS, {"prompt": "hello"}, 200),
    "completion stream": (COMPLETIONS, {"prompt": "hello", "stream": True}, 200),
    "several": (COMPLETIONS, {"prompt": ["hello", "world"], "n": 2, "stream": True}, 200),
    "logprobs": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 2, "stream": True}, 200),
    "stop": (COMPLETIONS, {"prompt": "hello", "stop": ["c"], "stream": True}, 200),
    "beams": (COMPLETIONS, {"prompt": "hello", "use_beam_search": True, "n": 2}, 200),
    "messages": ("/v1/messages", {"messages": USER}, 200),
    "messages stream": ("/v1/messages", {"messages": USER, "stream": True}, 200),
    "responses": ("/v1/responses", {"input": "hello", "max_tokens": None, "max_output_tokens": 6}, 200),
    "responses stream": (
        "/v1/responses",
        {"input": "hello", "stream": True, "max_tokens": None, "max_output_tokens": 6},
        200,
    ),
    "embeddings": ("/v1/embeddings", {"input": "hello", "max_tokens": None}, 200),
    "refused": (COMPLETIONS, {"prompt": "hello", "temperature": -1}, 400),
    "too long": (COMPLETIONS, {"prompt": "hello", "max_tokens": 100_000}, 400),
    "unknown model": (COMPLETIONS, {"prompt": "hello", "model": "other"}, 404),
}


ANSWERED = [kind for kind, (_, _, status) in REQUESTS.items() if status == 200]


def request_of(kind):
    """Return its path, body and status."""
    path, fields, status = REQUESTS[kind]
    body = {"model": MODEL, "max_tokens": 6} | fields
    return path, {name: value for name, value in body.items() if value is not None}, status


async def check_rounds(c, once):
    """Check that what was done once before, for what is made once, leaves nothing when it is done again."""
    await once()
    await c.nothing_in_flight()
    with nothing_left("router."):
        for _ in range(ROUNDS):
            await once()
        await c.nothing_in_flight()


@pytest.mark.parametrize("kind", REQUESTS)
async def test_a_request_leaves_nothing_to_the_collector(folder, kind):
    path, body, status = request_of(kind)
    worker = FakeWorker(reply=list(range(20, 26)))
    async with http_cluster(folder, worker, context=1024) as c, c.http() as http:

        async def ask():
            answer = await http.post(path, json=body)
            assert answer.status_code == status, answer.text

        await check_rounds(c, ask)


@pytest.mark.parametrize("kind", ANSWERED)
async def test_a_request_that_no_worker_takes_leaves_nothing_to_the_collector(folder, kind):
    path, body, _ = request_of(kind)
    worker = FakeWorker()
    worker.refuses = "not here"
    async with http_cluster(folder, worker, context=1024) as c, c.http() as http:

        async def ask():
            answer = await http.post(path, json=body)
            assert answer.status_code == 400
            assert "not here" in answer.text

        await check_rounds(c, ask)


@pytest.mark.parametrize("kind", ANSWERED)
async def test_a_client_that_leaves_early_leaves_nothing_to_the_collector(folder, kind):
    path, body, _ = request_of(kind)
    worker = FakeWorker(reply=list(range(20, 26)))
    worker.gate.clear()
    async with http_cluster(folder, worker, context=1024) as c, c.http() as http:

        async def leave():
            before = len(worker.started)
            asking = asyncio.create_task(http.post(path, json=body))
            await worker.until(lambda: len(worker.started) > before)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await c.nothing_in_flight()

        await check_rounds(c, leave)


async def test_a_client_that_leaves_leaves_nothing_to_the_collector(folder):
    worker = FakeWorker(reply=list(range(20, 40)), endless=True)
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 900, "stream": True}
    async with http_cluster(folder, worker, context=1024) as c, c.http() as http:

        async def leave():
            async with http.stream("POST", COMPLETIONS, json=body) as answer:
                async for _ in answer.aiter_lines():
                    break

        await check_rounds(c, leave)


async def test_an_answer_in_two_phases_leaves_nothing_to_the_collector(folder):
    reply = list(range(20, 26))
    prefill, decode = FakeWorker("p", Role.PREFILL, reply), FakeWorker("d", Role.DECODE, reply)
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 6, "stream": True}
    async with http_cluster(folder, prefill, decode, context=1024) as c, c.http() as http:

        async def ask():
            assert (await http.post(COMPLETIONS, json=body)).status_code == 200

        await check_rounds(c, ask)
