"""Every way out of a request settles it once, with the tokens that were computed for it, in every place that
counts budgets."""

import asyncio
import contextlib
import json

import httpx
import pytest

from baton.core.budgets import WINDOW_S, Ask
from baton.core.messages import FailureReason, SequenceFailed
from router.http import generation
from router.tenants.key_files import write_file
from router.tenants.keys import KeyBook, KeyRecord, Tenant, digest_of, new_key
from tests.contract.redis_servers import RedisServer
from tests.unit.router.http_fakes import BOUND_S, MODEL, FakeWorker, called, cluster, make_folder, soon

PER_MINUTE = 60_000
AHEAD = 30_000
"""Tokens that are taken before. The budget is not whole meanwhile, so that every charge and refund shows."""
ASK = {"model": MODEL, "prompt": "hi there", "max_tokens": 40}
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


class Counted:
    """Budgets that note what is taken and settled."""

    def __init__(self, budgets):
        self._budgets = budgets
        self.taken, self.settled = [], []
        self._changed = asyncio.Condition()

    async def take(self, ask):
        grant = await self._budgets.take(ask)
        if grant.is_granted:
            self.taken.append(ask)
        return grant

    async def settle(self, settle):
        await self._budgets.settle(settle)
        async with self._changed:
            self.settled.append(settle)
            self._changed.notify_all()

    async def until_settled(self):
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(lambda: len(self.settled) >= len(self.taken))

    async def close(self):
        await self._budgets.close()


class World:
    def __init__(self, c, http, budgets, whole_at):
        self.c, self.http, self.budgets, self.whole_at = c, http, budgets, whole_at

    @property
    def worker(self):
        return self.c.worker

    @property
    def prompt_tokens(self):
        return self.worker.started[0].prompt_token_count

    async def post(self, path="completions", **body):
        base = ASK if path == "completions" else {"model": MODEL}
        return await self.http.post(f"/v1/{path}", json=base | body)

    async def leave_when(self, condition, path="completions", **body):
        asking = asyncio.create_task(self.post(path, **body))
        await self.worker.until(condition)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@contextlib.asynccontextmanager
async def world(folder, tmp_path, store, *workers, **router):
    key, path = new_key(), tmp_path / "keys.json"
    tenant = Tenant(tokens_per_minute=PER_MINUTE)
    write_file(path, KeyBook({"acme": tenant}, (KeyRecord(digest_of(key), "acme"),)))
    async with contextlib.AsyncExitStack() as stack:
        if store == "redis":
            router["budgets_url"] = stack.enter_context(RedisServer(tmp_path)).url
        c = await stack.enter_async_context(cluster(folder, *workers, keys=str(path), **router))
        access = c.router.models.first.access
        raw = access.budgets

        async def whole_at():
            """Return the instant at which the tenant's budget of tokens is whole."""
            if store == "redis":
                redis = raw._shared
                (found,) = await redis._client.run(("HGET", redis._keys("acme")[0], "t"))
                return float(found)
            return raw._ledger._accounts["acme"].tokens_whole_s

        await raw.take(Ask("acme", "ahead", 600.0, AHEAD, tokens_per_minute=PER_MINUTE))
        access.budgets = Counted(raw)
        headers = {"authorization": f"Bearer {key}"}
        http = await stack.enter_async_context(c.http(headers=headers))
        before = await whole_at()
        found = World(c, http, access.budgets, whole_at)
        yield found
        await c.nothing_in_flight()
        await found.budgets.until_settled()
        assert [s.lease for s in found.budgets.settled] == [a.lease for a in found.budgets.taken]
        found.used = round((await whole_at() - before) * PER_MINUTE / WINDOW_S)
        assert found.used == sum(a.tokens for a in found.budgets.taken) - sum(
            s.refund_tokens for s in found.budgets.settled
        )


@pytest.fixture(params=["memory", "redis"])
def store(request):
    return request.param


COMPLETED = [
    ("completions", {}),
    ("completions", {"stream": True}),
    ("completions", {"n": 3}),
    ("completions", {"n": 2, "best_of": 4, "stream": False}),
    ("completions", {"prompt": ["hi", "there"], "n": 2}),
    ("completions", BEAMS),
    ("completions", BEAMS | {"prompt": ["hi", "there"]}),
    ("embeddings", {"input": ["hi", "there", "all"]}),
    ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
]


@pytest.mark.parametrize(("path", "body"), COMPLETED)
async def test_an_answer_is_charged_as_its_usage_says(folder, tmp_path, store, path, body):
    async with world(folder, tmp_path, store, FakeWorker(reply=[9], endless=True)) as w:
        more = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
        answer = await w.post(path, **body, **more)
        assert answer.status_code == 200
        last = answer.text.strip().split("\n\n")[-2].removeprefix("data: ") if more else answer.text
        usage = json.loads(last)["usage"]
    assert w.used == usage["total_tokens"] > 0


REFUSED = [
    ({"queue_requests_max": 0}, 503),
    ({"queue_wait_s": 0.05}, 503),
    ({"request_timeout_s": 0.3}, 504),
]


@pytest.mark.parametrize(("path", "body"), [*COMPLETED[:3], COMPLETED[5], COMPLETED[7]])
@pytest.mark.parametrize(("config", "status"), REFUSED)
async def test_a_request_without_a_place_pays_nothing(folder, tmp_path, store, config, status, path, body):
    async with world(folder, tmp_path, store, **config) as w:
        assert (await w.post(path, **body)).status_code == status
        assert len(w.budgets.taken) == 1
    assert w.used == 0


async def test_a_request_that_a_worker_calls_bad_pays_nothing(folder, tmp_path, store):
    worker = FakeWorker(reply=[9])
    worker.refuses = "no"
    async with world(folder, tmp_path, store, worker) as w:
        for body in ({}, {"n": 3}, BEAMS):
            assert (await w.post(**body)).status_code == 400
        assert (await w.post("embeddings", input=["hi"])).status_code == 400
        assert len(w.budgets.taken) == 4
    assert w.used == 0


async def test_an_input_that_is_bad_after_all_pays_nothing(folder, tmp_path, store):
    async with world(folder, tmp_path, store, FakeWorker()) as w:
        answer = await w.post("embeddings", input=[[1, 2, 3], [1] * 300])
        assert answer.status_code == 400
    assert w.used == 0


async def test_more_than_is_left_takes_nothing(folder, tmp_path, store):
    async with world(folder, tmp_path, store, FakeWorker()) as w:
        answer = await w.post("embeddings", input=[[1] * 200] * 160)
        assert answer.status_code == 429
        assert w.budgets.taken == []
    assert w.used == 0


async def test_who_leaves_while_queued_pays_nothing(folder, tmp_path, store, monkeypatch):
    async with world(folder, tmp_path, store) as w:
        submitted = called(monkeypatch, w.c.driver, "submit")
        asking = asyncio.create_task(w.post())
        await soon(submitted)
        assert w.c.driver.status().queued == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert w.used == 0


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}, BEAMS])
async def test_who_leaves_while_the_prompt_is_computed_pays_for_it(folder, tmp_path, store, body):
    worker = FakeWorker(reply=[9])
    worker.gate.clear()
    async with world(folder, tmp_path, store, worker) as w:
        await w.leave_when(lambda: worker.started, **body)
        await w.c.nothing_in_flight()
    assert w.used == w.prompt_tokens


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 2}])
async def test_who_leaves_midway_pays_for_what_was_generated(folder, tmp_path, store, body):
    worker = FakeWorker(reply=[9], endless=True, pauses_at=5)
    async with world(folder, tmp_path, store, worker) as w:
        n = body.get("n", 1)
        stream = w.http.stream("POST", "/v1/completions", json=ASK | {"stream": True} | body)
        async with stream as answer:
            tokens = 0
            async for line in answer.aiter_lines():
                tokens += line.count('"text":"') - line.count('"text":""')
                if await generated(w.c) == 5 * n:
                    break
        await w.c.nothing_in_flight()
    assert w.used == w.prompt_tokens + 5 * n


async def generated(c):
    await asyncio.sleep(0)
    return sum(len(flow.generated) for flow in c.driver._core._flows.values())


@pytest.mark.parametrize("after", [1, 4, 7])
async def test_who_leaves_a_beam_search_pays_for_its_steps(folder, tmp_path, store, after):
    class Stops(FakeWorker):
        def on_message(self, message):
            super().on_message(message)
            if len(self.started) == 1 + 3 * (after - 1) + 1:
                self.gate.clear()

    worker = Stops(reply=[9], endless=True)
    async with world(folder, tmp_path, store, worker) as w:
        await w.leave_when(lambda: len(worker.started) == 1 + 3 * after, **BEAMS)
        await w.c.nothing_in_flight()
    assert w.used == w.prompt_tokens + 1 + 3 * (after - 1)


async def test_who_leaves_an_embedding_pays_for_the_inputs_that_workers_had(folder, tmp_path, store):
    worker = FakeWorker()
    async with world(folder, tmp_path, store, worker) as w:
        inputs = [[1, 2, 3]] * 100
        worker.gate.clear()
        await w.leave_when(lambda: len(worker.started) == 64, "embeddings", input=inputs)
        await w.c.nothing_in_flight()
    assert w.used == 64 * 3


async def test_who_leaves_when_all_is_computed_pays_for_all(folder, tmp_path, store, monkeypatch):
    """The answer is written to a client that is gone."""

    async def broken(*_):
        raise ConnectionResetError("the client is gone")

    for module, path, body in (
        ("router.http.generation", "completions", BEAMS),
        ("router.http.embeddings", "embeddings", {"input": [[1, 2, 3]] * 5}),
    ):
        folder_of = tmp_path / path
        folder_of.mkdir()
        async with world(folder, folder_of, store, FakeWorker(reply=[9], endless=True)) as w:
            with monkeypatch.context() as patched:
                patched.setattr(f"{module}.respond", broken)
                with contextlib.suppress(httpx.HTTPError):
                    await w.post(path, **body)
                await w.budgets.until_settled()
        assert w.used >= (15 if path == "embeddings" else w.prompt_tokens + 3 * 7)


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("body", [{}, {"stream": True}])
async def test_a_request_that_fails_pays_for_the_tokens_that_came(folder, tmp_path, store, body, tokens):
    class Fails(FakeWorker):
        def token(self, start, index):
            if index == tokens:
                (key,) = self.running
                self.tell(SequenceFailed(*key, FailureReason.INTERNAL, "broken"))
                raise asyncio.CancelledError
            return 9

    async with world(folder, tmp_path, store, Fails(), attempts_max=1) as w:
        answer = await w.post(**body)
        assert answer.status_code == (200 if body and tokens else 503)
        w.worker.running.clear()
    assert w.used == (w.prompt_tokens + tokens if tokens else 0)


@pytest.mark.parametrize(("body", "used"), [({}, 1), ({"n": 2}, 1), (BEAMS, 1)])
async def test_a_prompt_that_was_computed_until_the_deadline_is_charged(folder, tmp_path, store, body, used):
    worker = FakeWorker(reply=[9])
    worker.gate.clear()
    async with world(folder, tmp_path, store, worker, request_timeout_s=0.5) as w:
        assert (await w.post(**body)).status_code == 504
    assert w.used == used * w.prompt_tokens


async def test_a_defect_settles_too(folder, tmp_path, store, monkeypatch):
    def defect(*_):
        raise RuntimeError("a defect")

    async with world(folder, tmp_path, store, FakeWorker(reply=[9], endless=True)) as w:
        monkeypatch.setattr(generation.GenerationRequest, "_outcome", defect)
        with contextlib.suppress(httpx.HTTPError):
            assert (await w.post()).status_code in (200, 500)
        monkeypatch.undo()
    assert w.used == w.prompt_tokens + 40


@pytest.mark.parametrize("body", [{"n": 3}, {"prompt": ["hi", "there"]}, {"n": 3, "stream": True}])
async def test_a_request_that_is_refused_in_part_pays_nothing(folder, tmp_path, store, body):
    async with world(folder, tmp_path, store, queue_requests_max=1) as w:
        assert (await w.post(**body)).status_code == 503
        assert len(w.budgets.taken) == 1
    assert w.used == 0
