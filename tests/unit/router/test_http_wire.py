"""The whole router process over real gRPC: workers found through a directory or given by hand."""

import asyncio
import contextlib

import httpx
import pytest

from baton.config import Config
from baton.core.messages import LoadReport, Member, MembershipView, Role
from baton.wire.server import start_server
from router.process import run_router
from router.tokenizer import Tokenizer
from tests.unit.router.http_fakes import BOUND_S, MODEL, FakeWorker, make_folder

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / MODEL)


@pytest.fixture(scope="module")
def reply(folder):
    return Tokenizer.load(str(folder))._rust.encode("Paris, naturally.", add_special_tokens=False).ids


class WireWorker(FakeWorker):
    async def serve_router(self, _, link):
        self.link = link
        link.send(self.hello)
        link.send(LoadReport(self.hello.role, False, 100_000, 0, 0, 0, 0.01))
        try:
            async for message in link:
                self.on_message(message)
        finally:
            self.forget_all()

    def tell(self, message):
        if self.link is not None:
            self.link.send(message)


class ListDirectory:
    def __init__(self, members):
        self._members = tuple(members)

    async def watch(self, _):
        yield MembershipView("life", 1, self._members)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def served(*workers):
    servers, addresses = [], []
    for worker in workers:
        server, port = await start_server("127.0.0.1", 0, worker=worker)
        servers.append(server)
        addresses.append(f"127.0.0.1:{port}")
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(0)


@contextlib.asynccontextmanager
async def routing(folder, **found):
    """A router started as a command would start it; its clients' entrance."""
    config = Config(
        model={"path": str(folder)},
        router={"port": 0, "worker_silence_s": 60, "fallback_to_other_pool": False},
    )
    url = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    running = asyncio.create_task(run_router(config, on_ready=url.set_result, stop=stop, **found))
    try:
        async with asyncio.timeout(BOUND_S), httpx.AsyncClient(base_url=await url, timeout=BOUND_S) as http:
            yield http
    finally:
        stop.set()
        async with asyncio.timeout(BOUND_S):
            await running


async def test_workers_given_by_hand(folder, reply):
    async with (
        served(WireWorker(reply=reply)) as addresses,
        routing(folder, workers=addresses) as http,
    ):
        answer = await http.post("/v1/chat/completions", json=BODY)
        assert answer.json()["choices"][0]["message"]["content"] == "Paris, naturally."
        assert (await http.get("/health")).json()["directory"] == "none"


async def test_workers_found_through_a_directory_outlive_it(folder, reply):
    pair = WireWorker("p", Role.PREFILL, reply), WireWorker("d", Role.DECODE, reply)
    async with served(*pair) as addresses:
        members = [
            Member(w.hello.worker_id, w.hello.role, address, MODEL, "f" * 32)
            for w, address in zip(pair, addresses, strict=True)
        ]
        directory, port = await start_server("127.0.0.1", 0, directory=ListDirectory(members))
        async with routing(folder, control_address=f"127.0.0.1:{port}") as http:
            for _ in range(2):
                answer = await http.post("/v1/chat/completions", json=BODY)
                assert answer.json()["choices"][0]["message"]["content"] == "Paris, naturally."
                await directory.stop(0)
            assert len((await http.get("/health")).json()["workers"]["prefill"]) == 1
        assert [len(w.started) for w in pair] == [2, 2]
