"""Measures the time to first token of a repeated prompt by where its KV comes from, compared with the first
time.

All processes are started one by one, as on a cluster of two hosts: a store node, a prefill and a decode
worker and a router on the first, a store node, one worker and a router on the second, and one directory for
both. Processes are killed in between, so that exactly one tier holds the prompt and no faster one.
"""

import asyncio
import os
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import msgspec
import orjson

from baton.core.errors import SetupError
from baton.wire.server import start_server
from benchmarks.parts import BatonProcess
from benchmarks.ports import free_port
from kv_store.directory.memory import MemoryDirectory
from loadgen.client import ServerUrl, parse_url, request_bytes, send
from loadgen.records import RequestOutcome, RequestRecord

REQUEST_S = 600.0
OUTPUT_TOKENS = 2
SETTLE_S = 30.0
"""Time for blocks to be written through, and for a restarted process to be known."""
WRITTEN_S = 10.0
AIMS = {"pool": 0.10, "host memory": 0.15, "host memory, workers restarted": 0.15, "SSD": 0.35, "peer": 0.35}


class ReuseResult(msgspec.Struct, frozen=True):
    """Medians over the prompts, in seconds."""

    source: str
    ttft_s: float
    cached_share: float
    """Share of the prompt's tokens, as the server reports it."""
    to_cold: float
    """TTFT divided by that of the first time."""
    aim: float | None
    """Upper limit for `to_cold`, if there is one."""


class _Host:
    """A store node, its workers and a router that knows these workers only."""

    def __init__(self, name: str, bench: "_ReuseBench", roles: Sequence[str], cores: Sequence[int]) -> None:
        self._bench = bench
        folder = bench.folder / name
        folder.mkdir()
        self.ssd = folder / "ssd"
        socket_path = folder / "store.sock"
        store = [f"store.socket={socket_path}", f"store.ssd_dir={self.ssd}"]
        control = ["--control", bench.directory_address]
        self.node = bench.part(f"{name}-store", ["store", "run", *control], store)
        self.ports = {role: free_port() for role in roles}
        self.workers = [
            bench.part(
                f"{name}-{role}",
                ["worker", "--model", bench.model, "--role", role, "--port", str(port)],
                [f"store.socket={socket_path}", "engine.threads=1", "model.name=bench"],
                cores=[cores[i % len(cores)]] if cores else (),
            )
            for i, (role, port) in enumerate(self.ports.items())
        ]
        self.router_port = free_port()
        named = [argument for port in self.ports.values() for argument in ("--worker", f"127.0.0.1:{port}")]
        self.router = bench.part(
            f"{name}-router",
            ["router", "--model", bench.model, "--name", "bench", "--port", str(self.router_port), *named],
        )

    @property
    def server(self) -> ServerUrl:
        return parse_url(f"http://127.0.0.1:{self.router_port}")

    async def start(self) -> None:
        await self.node.start()
        await asyncio.gather(*(worker.start() for worker in self.workers))
        await self.router.start()
        await self.wait_ready()

    async def restart(self, *, with_node: bool) -> None:
        """Restart with SIGKILL, as after a crash."""
        await asyncio.gather(*(worker.kill() for worker in self.workers))
        if with_node:
            await self.node.kill()
            _drop_page_cache(self.ssd)
            await self.node.start()
        await asyncio.gather(*(worker.start() for worker in self.workers))
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Wait until the router reaches all workers and the workers their store node."""
        async with httpx.AsyncClient() as client, asyncio.timeout(SETTLE_S):
            while not await self._is_ready(client):  # noqa: ASYNC110  # other processes set no event here
                await asyncio.sleep(0.2)

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        try:
            answer = await client.get(f"{self.server.origin}/health")
        except httpx.HTTPError:
            return False
        listed = answer.json()["workers"] if answer.status_code == 200 else {}
        return sum(map(len, listed.values())) == len(self.workers)

    async def stop(self) -> None:
        for part in (self.router, *self.workers, self.node):
            await part.kill()


class _ReuseBench:
    """Two hosts and their directory."""

    def __init__(
        self,
        folder: Path,
        model: str,
        *,
        prompt_tokens: int,
        vocabulary: tuple[int, int],
        settings: Sequence[str],
        cores: Sequence[int],
        directory_address: str,
        progress: Callable[[str], None],
    ) -> None:
        self.folder, self.model = folder, model
        self._prompt_tokens, self._vocabulary, self._settings = prompt_tokens, vocabulary, settings
        self.progress = progress
        self.directory_address = directory_address
        self.near = _Host("near", self, ("prefill", "decode"), cores)
        self.far = _Host("far", self, ("aggregated",), cores)

    def part(
        self,
        name: str,
        argv: Sequence[str],
        settings: Sequence[str] = (),
        *,
        cores: Sequence[int] = (),
    ) -> BatonProcess:
        sets = [argument for setting in (*self._settings, *settings) for argument in ("--set", setting)]
        return BatonProcess(name, [*argv, *sets], folder=self.folder, cores=cores)

    async def ask(self, host: _Host, seed: int) -> RequestRecord:
        """Send one request. Raises SetupError if it fails."""
        loop = asyncio.get_running_loop()
        rng = random.Random(f"reuse/{seed}")
        body = {
            "model": "bench",
            "prompt": [rng.randrange(*self._vocabulary) for _ in range(self._prompt_tokens)],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        message = request_bytes(host.server, "/v1/completions", orjson.dumps(body))
        record = RequestRecord(seed, planned_s=loop.time())
        await send(host.server, message, record, timeout_s=REQUEST_S)
        if record.outcome is not RequestOutcome.COMPLETED:
            raise SetupError(f"request {seed} failed: {record.error} {record.detail}")
        return record

    async def measure(self, source: str, host: _Host, seeds: Sequence[int], cold_s: float) -> ReuseResult:
        records = [await self.ask(host, seed) for seed in seeds]
        ttft_s = statistics.median(record.ttft_s or 0.0 for record in records)
        cached = statistics.median((record.cached_tokens or 0) for record in records)
        result = ReuseResult(
            source, ttft_s, cached / self._prompt_tokens, ttft_s / (cold_s or ttft_s), AIMS.get(source)
        )
        self.progress(f"{source}: {ttft_s * 1e3:.0f} ms, {result.cached_share:.1%} cached")
        return result


async def run(
    folder: Path,
    model: str,
    *,
    prompt_tokens: int,
    prompts: int,
    vocabulary: tuple[int, int],
    settings: Sequence[str] = (),
    cores: Sequence[int] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[ReuseResult]:
    """Run the bench in `folder`, which must be empty, for logs, sockets and SSD files. Token ids are drawn
    from `vocabulary`. Raises SetupError if a process does not start or a request fails."""
    async with AsyncExitStack() as stack:
        directory = MemoryDirectory(entries_max=1_000_000)
        stack.push_async_callback(directory.close)
        server, port = await start_server("127.0.0.1", 0, store_directory=directory)
        stack.push_async_callback(server.stop, None)
        bench = _ReuseBench(
            folder,
            model,
            prompt_tokens=prompt_tokens,
            vocabulary=vocabulary,
            settings=settings,
            cores=cores,
            directory_address=f"127.0.0.1:{port}",
            progress=progress,
        )
        for host in (bench.near, bench.far):
            stack.push_async_callback(host.stop)
            progress(f"starting {host.node.name.removesuffix('-store')} host")
            await host.start()
        return await _measure_all(bench, range(prompts))


async def _measure_all(bench: _ReuseBench, seeds: Sequence[int]) -> list[ReuseResult]:
    near, far = bench.near, bench.far
    await bench.ask(near, -1)  # the first request of a process includes one-time costs
    cold = await bench.measure("cold", near, seeds, 0.0)
    results = [cold, await bench.measure("pool", near, seeds, cold.ttft_s)]
    await _settle(bench)
    for source, with_node in (("host memory, workers restarted", False), ("SSD", True)):
        await near.restart(with_node=with_node)
        await bench.ask(near, -2 - len(results))
        results.append(await bench.measure(source, near, seeds, cold.ttft_s))
        await _settle(bench)
    await bench.ask(far, -9)
    results.append(await bench.measure("peer", far, seeds, cold.ttft_s))
    return results


async def _settle(bench: _ReuseBench) -> None:
    """Wait until new blocks are written through, also to SSD, and a killed node's lease has ended."""
    await asyncio.sleep(WRITTEN_S)


def _drop_page_cache(folder: Path) -> None:
    """Drop the whole page cache if permitted, else that of these files."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
