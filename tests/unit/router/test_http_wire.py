"""The whole router process over real gRPC, with workers found through a directory or given by hand."""

import asyncio
import contextlib

import httpx
import pytest

from baton.config import ClusterConfig, Config
from baton.core.messages import LoadReport, Member, MembershipView, Role
from baton.wire.server import start_server
from control_plane.plane import ControlPlane
from router.process import run_router
from router.text.tokenizer import Tokenizer
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
async def routing(folder, *, settings=None, **found):
    """Start a router as a command would, and yield the address for its clients."""
    config = Config(
        model={"path": str(folder)},
        router={
            "port": 0,
            "worker_silence_s": 60,
            "fallback_to_other_pool": False,
            "any_role": False,
            **(settings or {}),
        },
    )
    url = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_router(config, on_ready=lambda urls: url.set_result(urls[0]), stop=stop, **found)
    )
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


async def until_health(http, holds):
    async with asyncio.timeout(BOUND_S):
        while not holds(health := (await http.get("/health")).json()):
            pass  # The answer takes some time.
    return health


class QuietWorker(WireWorker):
    """A worker that takes sequences and sends neither answers nor reports."""

    def on_message(self, _):
        pass


async def test_routers_find_each_other_in_the_directory_and_count_each_others_work(folder, reply):
    worker = QuietWorker("w", Role.AGGREGATED, reply)
    async with served(worker) as [address]:
        member = Member(worker.hello.worker_id, Role.AGGREGATED, address, MODEL, "f" * 32)
        plane = ControlPlane(ClusterConfig(), life="l", replicas=None, spawn=asyncio.create_task)
        plane.renew(member)
        directory, port = await start_server("127.0.0.1", 0, directory=plane)
        control = f"127.0.0.1:{port}"
        async with routing(folder, control_address=control) as first:
            async with routing(folder, control_address=control) as second:
                for http in (first, second):
                    await until_health(http, lambda h: h["peers"] == 1 and h["workers"]["aggregated"])
                assert len(plane.book.view.routers) == 2
                asking = asyncio.create_task(second.post("/v1/chat/completions", json=BODY))
                health = await until_health(
                    first, lambda h: h["workers"]["aggregated"][0]["in_flight_elsewhere"]
                )
                assert health["workers"]["aggregated"][0]["in_flight"] == 0
                asking.cancel()
                await until_health(first, lambda h: not h["workers"]["aggregated"][0]["in_flight_elsewhere"])
            await until_health(first, lambda h: h["peers"] == 0)
            assert len(plane.book.view.routers) == 1
        plane.close()
        await directory.stop(0)


async def test_routers_that_are_given_to_each_other_need_no_directory(folder, reply, unused_tcp_port_factory):
    ports = unused_tcp_port_factory(), unused_tcp_port_factory()
    peers = [f"127.0.0.1:{port}" for port in ports]  # The router itself is among them.
    async with contextlib.AsyncExitStack() as stack:
        addresses = await stack.enter_async_context(served(WireWorker(reply=reply)))
        for port in ports:
            settings = {"peers": peers, "peer_port": port}
            http = await stack.enter_async_context(routing(folder, settings=settings, workers=addresses))
        await until_health(http, lambda h: h["peers"] == 1)
