"""The processes of a variant: started on their cores, warmed up, and ended with all that they started."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from baton.core.errors import SetupError
from benchmarks.goodput_variants import Process, ServerVariant, fill, python_program
from benchmarks.peers import inherited_environment
from benchmarks.ports import free_port
from loadgen.client import ServerUrl, parse_url

START_S = 600.0
STOP_S = 40.0
ASK_S = 60.0
WARM_UP = ((16, 4), (512, 8), (2048, 4))
"""(prompt words, output tokens) of the warm-up requests, several at once."""
WARM_UP_AT_ONCE = 3


_Started = tuple[Process, asyncio.subprocess.Process, Path]


@dataclass(slots=True)
class _Ports:
    """Free ports by name, chosen at the first use."""

    by_name: dict[str, int] = field(default_factory=dict[str, int])

    def __getitem__(self, name: str) -> int:
        if name not in self.by_name:
            self.by_name[name] = free_port()
        return self.by_name[name]


@asynccontextmanager
async def running(
    variant: ServerVariant, *, model: Path, cores: Sequence[int], logs: Path
) -> AsyncGenerator[ServerUrl]:
    """The variant, ready and warm. Raises SetupError with the end of a log if a process does not start."""
    ports = _Ports()
    started: list[_Started] = []

    async def start(process: Process) -> None:
        log = logs / f"{variant.name}-{process.name}.log"
        started.append((process, await _start(process, ports, model, cores, log), log))

    async def ready(client: httpx.AsyncClient, process: Process) -> None:
        if process.ready:
            url = f"http://127.0.0.1:{ports[process.name]}{process.ready}"
            await _until(lambda: _is_ready(client, url), started)

    server = parse_url(f"http://127.0.0.1:{ports[variant.front_name]}")
    behind = [p for p in variant.processes if p.name != variant.front_name]
    front = next(p for p in variant.processes if p.name == variant.front_name)
    try:
        try:
            async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
                for process in behind:
                    await start(process)
                for process in behind:
                    await ready(client, process)
                await start(front)
                await ready(client, front)
                await _until(lambda: _answers(client, server, variant.model_name), started)
                await _warm_up(client, server, variant.model_name)
        except TimeoutError:
            late = f"{variant.name} is not ready after {START_S:.0f} s"
            raise SetupError(f"{late}:", log=_tails(started)) from None
        yield server
    finally:
        await asyncio.gather(*(_stop(running) for _, running, _ in reversed(started)))


async def _start(
    process: Process, ports: _Ports, model: Path, cores: Sequence[int], log: Path
) -> asyncio.subprocess.Process:
    try:
        own = [cores[i] for i in process.cores] or list(cores)
    except IndexError:
        raise SetupError(
            f"process {process.name} needs core {max(process.cores)}, but --cores has {len(cores)}"
        ) from None

    def value(kind: str, name: str) -> str:
        match kind:
            case "port":
                return str(ports[name or process.name])
            case "model":
                return str(model)
            case "cores":
                return ",".join(map(str, own))
            case "threads":
                return str(len(own))
            case "python":
                return python_program()
            case _:
                raise SetupError(f"process {process.name}: unknown placeholder {{{kind}}}")

    command = [fill(part, value) for part in process.command]
    env = inherited_environment() | {k: fill(text, value) for k, text in process.env.items()}
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            env=env,
            stdout=output,
            stderr=output,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, own),
        )


async def _until(ask: Callable[[], Awaitable[bool]], started: Sequence[_Started]) -> None:
    while not await ask():
        for process, child, log in started:
            if child.returncode is not None:
                raise SetupError(f"{process.name} ended at its start:", log=_tail(log))
        await asyncio.sleep(0.5)


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url, timeout=5)).status_code == 200
    except httpx.HTTPError:
        return False


async def _answers(
    client: httpx.AsyncClient,
    server: ServerUrl,
    model: str,
    *,
    words: int = 8,
    tokens: int = 1,
    number: int = 0,
) -> bool:
    prompt = " ".join(f"w{200 + (number * 977 + i * 31) % 7000}" for i in range(words))
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    try:
        answer = await client.post(f"{server.origin}/v1/completions", json=body, timeout=ASK_S)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


async def _warm_up(client: httpx.AsyncClient, server: ServerUrl, model: str) -> None:
    for words, tokens in WARM_UP:
        asked = [
            _answers(client, server, model, words=words, tokens=tokens, number=words + i)
            for i in range(WARM_UP_AT_ONCE)
        ]
        if not all(await asyncio.gather(*asked)):
            raise SetupError(f"{server.origin} failed a warm-up request of {words} tokens")


async def settle(server: ServerUrl, model: str, *, within_s: float) -> None:
    """Wait until a small request is answered at once, so that nothing of the earlier run remains."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    async with httpx.AsyncClient() as client:
        while loop.time() < end_s:
            asked_s = loop.time()
            if await _answers(client, server, model) and loop.time() - asked_s < 0.5:
                return


async def _stop(child: asyncio.subprocess.Process) -> None:
    """Send SIGINT to the process, which ends its children, and kill the rest of its group."""
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            pass
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])


def _tails(started: Sequence[_Started]) -> str:
    return "\n".join(f"{process.name}:\n{_tail(log)}" for process, _, log in started)
