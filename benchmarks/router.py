"""Measures what the router itself costs: real requests over HTTP through a real router process to workers
that generate at no cost; see `router_free`.

The figure is CPU time of the router's processes per request, which other work on the machine does not change;
its inverse is requests per second and core. Latency depends on the machine at that moment, so it is shown
with that of the free workers without a router.
"""

import asyncio
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import httpx
import msgspec
import psutil

from baton.core import garbage
from baton.core.errors import SetupError
from baton.core.messages import Role
from benchmarks.ports import free_port
from benchmarks.router_free import FreeWorkerPlan, Ports
from benchmarks.router_load import LoadSeen, StreamClient, closed_loop, open_loop
from engine.model_files.resolve import FILES_WITHOUT_WEIGHTS, resolve_model
from loadgen.open_files import allow_connections

START_S = 120.0
PROMPTS = 64
LONG_PROMPTS = 4
LONG_TOKENS = 32_768
CONTEXT_TOKENS = 131_072
WARM_UP = 60
END_S = 10.0


class RouterTarget(msgspec.Struct, frozen=True):
    name: str
    command: str
    """The command that starts the router, with {urls} for the free HTTP workers' (separated by blanks) and
    {port} for its own; empty for Baton's router."""


class RouterSeen(msgspec.Struct, frozen=True):
    name: str
    cpu_s_per_request: float
    """CPU seconds of all its processes per request, at full load."""
    full: LoadSeen
    half: LoadSeen
    """Latencies at half of the rate that one core can serve."""
    half_rate: float
    direct: LoadSeen
    """Latencies of the free workers at that rate, without a router."""
    long: LoadSeen | None
    """Latencies of prompts of `LONG_TOKENS`, one after the other."""
    long_cpu_s: float

    @property
    def per_core(self) -> float:
        """Requests per second of one core."""
        return 1.0 / self.cpu_s_per_request if self.cpu_s_per_request else 0.0


class RouterLoad(msgspec.Struct, frozen=True):
    prompt_tokens: int = 512
    output_tokens: int = 64
    clients: int = 1000
    requests: int = 8000
    half_s: float = 10.0
    with_long: bool = True


async def measure(
    targets: Sequence[RouterTarget],
    *,
    model: str,
    load: RouterLoad,
    pairs: bool,
    workers: int,
    step_s: float,
    progress: Callable[[str], None],
) -> list[RouterSeen]:
    """Measure one router at a time. Raises SetupError if one does not start."""
    allow_connections(2 * load.clients)  # A router has a connection to a worker for each of a client's.
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        model = _long_context(model, Path(folder))
        return await _measure_all(targets, model, load, (pairs, workers, step_s), progress)


async def _measure_all(
    targets: Sequence[RouterTarget],
    model: str,
    load: RouterLoad,
    shape: tuple[bool, int, float],
    progress: Callable[[str], None],
) -> list[RouterSeen]:
    pairs, workers, step_s = shape
    texts = _Texts(model)
    roles = [Role.PREFILL, Role.DECODE] * workers if pairs else [Role.AGGREGATED] * workers
    plan = FreeWorkerPlan("bench", roles, workers, step_s, tokens=texts.answer_ids, text=texts.answer_text)
    seen: list[RouterSeen] = []
    with garbage.spared():  # a pause of ours would look like the router's
        async with _free_workers(plan) as ports:
            for target in targets:
                progress(f"{target.name}: starting")
                async with _running(target, model, ports) as (url, process):
                    seen.append(await _measure(target.name, url, process, ports, texts, load, progress))
    return seen


async def _measure(
    name: str,
    url: str,
    process: psutil.Process,
    ports: Ports,
    texts: "_Texts",
    load: RouterLoad,
    progress: Callable[[str], None],
) -> RouterSeen:
    prompts = texts.prompts(PROMPTS, load.prompt_tokens)
    client = StreamClient(url, "bench", max_tokens=load.output_tokens)
    with contextlib.closing(client):
        await closed_loop(client, prompts, clients=4, requests=WARM_UP)
        before_s = _cpu_s(process)
        full = await closed_loop(client, prompts, clients=load.clients, requests=load.requests)
        cpu_s = (_cpu_s(process) - before_s) / max(1, full.completed)
        progress(f"{name}: {cpu_s * 1e3:.2f} ms of CPU per request, {full.failed} failed")
        if not full.completed:
            raise SetupError(f"{name} completed none of {load.requests} requests")
        rate = 0.5 / cpu_s
        half = await open_loop(client, prompts, rate=rate, seconds=load.half_s)
        progress(f"{name}: first token in {half.ttft_p50_s * 1e3:.1f} ms at {rate:.0f}/s")
        long, long_s = None, 0.0
        if load.with_long:
            before_s = _cpu_s(process)
            long = await closed_loop(client, texts.prompts(LONG_PROMPTS, LONG_TOKENS), clients=1, requests=40)
            long_s = (_cpu_s(process) - before_s) / max(1, long.completed)
    bare = StreamClient(f"http://127.0.0.1:{ports.http[0]}", "bench", max_tokens=load.output_tokens)
    with contextlib.closing(bare):
        direct = await open_loop(bare, prompts, rate=rate, seconds=load.half_s / 2)
    return RouterSeen(name, cpu_s, full, half, rate, direct, long, long_s)


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of it and its children."""
    total_s = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total_s += times.user + times.system
    return total_s


class _Texts:
    """Prompts and answers in the model's own tokens."""

    def __init__(self, model: str) -> None:
        """Raises SetupError."""
        from router.text.tokenizer import Tokenizer

        self._tokenizer = Tokenizer.load(model)
        special = self._tokenizer.special_ids
        rng = random.Random(1)
        ids = [i for i in range(200, min(4000, self._tokenizer.card.vocab_size)) if i not in special]
        self._words = [w for i in ids if (w := self._tokenizer.decode([i]).strip()).isascii() and w.isalnum()]
        if len(self._words) < 16:
            raise SetupError(f"{model}: its tokenizer has too few words for this bench")
        self.answer_ids = tuple(rng.sample(ids, 64))
        self.answer_text = "word "
        self._rng = rng

    def prompts(self, count: int, tokens: int) -> list[str]:
        """Different prompts of about this many tokens each."""
        sample = " ".join(self._rng.choices(self._words, k=1000))
        per_word = self._count(sample) / 1000
        return [" ".join(self._rng.choices(self._words, k=int(tokens / per_word))) for _ in range(count)]

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode_now(text))


@contextlib.asynccontextmanager
async def _free_workers(plan: FreeWorkerPlan) -> AsyncGenerator[Ports]:
    command = [sys.executable, "-m", "benchmarks.router_free", msgspec.json.encode(plan).decode()]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        yield msgspec.json.decode(line, type=Ports)
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def _running(
    target: RouterTarget, model: str, ports: Ports
) -> AsyncGenerator[tuple[str, psutil.Process]]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *_command(target, model, ports, port),
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        url = f"http://127.0.0.1:{port}"
        try:
            await _until_it_answers(url, len(ports.workers), process, log, target)
            yield url, psutil.Process(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def _command(target: RouterTarget, model: str, ports: Ports, port: int) -> list[str]:
    if target.command:
        urls = " ".join(f"http://127.0.0.1:{one}" for one in ports.http)
        return shlex.split(target.command.replace("{urls}", urls).replace("{port}", str(port)))
    command = [sys.executable, "-m", "baton", "router", "--model", model, "--name", "bench"]
    for one in ports.workers:
        command += ["--worker", f"127.0.0.1:{one}"]
    settings = ["--set", "router.worker_silence_s=30", "--set", "router.queue_requests_max=4096"]
    return [*command, "--port", str(port), *settings]


async def _until_it_answers(
    url: str, workers: int, process: asyncio.subprocess.Process, log: Path, target: RouterTarget
) -> None:
    deadline_s = asyncio.get_running_loop().time() + START_S
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        while asyncio.get_running_loop().time() < deadline_s:
            if process.returncode is not None:
                break
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                body = {"model": "bench", "prompt": "a", "max_tokens": 2}
                if target.command:
                    answer = await client.post(f"{url}/v1/completions", json={**body, "stream": True})
                    if answer.status_code == 200:
                        return
                else:
                    pools = (await client.get(f"{url}/health")).json()["workers"]
                    if sum(map(len, pools.values())) >= workers:
                        return
            await asyncio.sleep(0.2)
    raise SetupError(f"{target.name} does not answer; its log ends with:", log=_end_of(log))


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _long_context(model: str, folder: Path) -> str:
    """The model's tokenizer in `folder`, with a context length that long prompts fit into. Raises
    SetupError."""
    source = resolve_model(model, files=FILES_WITHOUT_WEIGHTS)
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt"):
            shutil.copy(path, folder)
    config = folder / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT_TOKENS})
    )
    return str(folder)
