"""Other servers, and Baton itself, started on the same cores with the same model. One works at a time.

A peer is found at `--peer NAME=PROGRAM` or on PATH. Each has its own environment, and nothing of it is
imported here. It is started by the command that its own documentation gives for a CPU.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import which

import httpx
import psutil

from baton.core.errors import SetupError
from benchmarks.closed_loop import Dialect, completion_body
from benchmarks.ports import free_port
from loadgen.client import ServerUrl, parse_url

START_S = 420.0
STOP_S = 20.0
PAUSE_WAIT_S = 30.0
PAUSE_LOOK_S = 0.005
MODEL_NAME = "bench"


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    command: tuple[str, ...]
    """`{port}`, `{threads}` and `{cores}` are filled in."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    model_name: str = MODEL_NAME
    dialect: Dialect = "vllm"


def baton_peer(
    model: Path, *, name: str = "baton", settings: Sequence[str] = (), split: bool = False, tensor: int = 1
) -> Peer:
    """Baton. `split` starts one prefill and one decode worker that share the cores, instead of one for both
    phases; `tensor` ranks of the one worker divide them."""
    count = f"1xtp{tensor}" if tensor > 1 else "1"
    workers = ("--prefill", "1", "--decode", "1") if split else ("--aggregated", count)
    threads = "0" if split or tensor > 1 else "{threads}"
    sets = [part for value in (f"engine.threads={threads}", *settings) for part in ("--set", value)]
    return Peer(
        name,
        (
            *(sys.executable, "-m", "baton", "serve", "--model", str(model), "--port", "{port}"),
            *(*workers, "--set", f"model.name={MODEL_NAME}", "--set", "dashboard.port=0", *sets),
        ),
        {"OMP_WAIT_POLICY": "PASSIVE"},
    )


def vllm_peer(program: str, model: Path, *, tensor: int = 1, dtype: str = "bfloat16") -> Peer:
    """vLLM (https://docs.vllm.ai, "CPU"): threads are bound to the cores, and KV space is given. Tensor ranks
    have a core each."""
    options = ("--dtype", dtype, "--max-model-len", "4096", "--served-model-name", MODEL_NAME)
    ranks = ("--tensor-parallel-size", str(tensor)) if tensor > 1 else ()
    cores = "|".join(map(str, range(tensor))) if tensor > 1 else "{cores}"
    return Peer(
        f"vllm tp{tensor}" if tensor > 1 else "vllm",
        (program, "serve", str(model), *options, *ranks, "--port", "{port}", "--no-enable-prefix-caching"),
        {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores},
    )


def llama_cpp_peer(program: str, gguf: Path, *, name: str, slots: int, slot_tokens: int) -> Peer:
    """llama.cpp (tools/server/README.md): one slot per concurrent request."""
    sizes = ("-c", str(slots * slot_tokens), "-np", str(slots), "-b", "2048", "-ub", "512")
    threads = ("-t", "{threads}", "-tb", "{threads}")
    options = ("--port", "{port}", "--alias", MODEL_NAME, "--no-webui", "-fa", "on")
    return Peer(name, (program, "-m", str(gguf), *sizes, *threads, *options))


def transformers_peer(program: str, model: Path, *, dtype: str = "bfloat16") -> Peer:
    """`transformers serve` with continuous batching."""
    options = ("--continuous-batching", "--dtype", dtype, "--device", "cpu")
    return Peer(
        "transformers",
        (program, "serve", str(model), *options, "--port", "{port}"),
        {"OMP_NUM_THREADS": "{threads}"},
        model_name=str(model),
        dialect="transformers",
    )


def find_program(name: str, given: str | None) -> str | None:
    """The path of a peer's program; None if it is not installed. Raises SetupError if a given path does not
    exist."""
    if given is None:
        return which(name)
    found = which(given) or which(name, path=f"{given}:{given}/bin")
    if found is None:
        raise SetupError(f"--peer: no program {name} at {given}")
    return found


@dataclass(frozen=True, slots=True)
class RunningPeer:
    url: ServerUrl
    process: psutil.Process
    log: Path

    async def pause(self) -> None:
        """Stop all its processes where they are, and return when they have stopped. They keep their memory,
        and take no processor time. Raises SetupError if one still runs after PAUSE_WAIT_S."""
        paused: set[psutil.Process] = set()
        ends_s = time.monotonic() + PAUSE_WAIT_S
        # One may start another until it has stopped, and stops only when the kernel next lets it run.
        while (fresh := set(self._tree()) - paused) or any(map(_runs, paused)):
            for process in fresh:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            paused |= fresh
            if time.monotonic() > ends_s:
                raise SetupError(f"{self.process.pid} does not stop {PAUSE_WAIT_S:g} s after SIGSTOP")
            await asyncio.sleep(PAUSE_LOOK_S)

    def resume(self) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def log_tail(self) -> str:
        return _tail(self.log)

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without what `baton.__main__` sets for Baton alone."""
    return {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}


@asynccontextmanager
async def running(peer: Peer, *, cores: Sequence[int], log: Path) -> AsyncGenerator[RunningPeer]:
    """The peer, ready, on these cores only. Raises SetupError with the end of its log if it does not
    start."""
    port = free_port()
    values = {
        "port": str(port),
        "threads": str(len(cores)),
        "cores": ",".join(map(str, cores)),
    }
    command = [_filled(part, values) for part in peer.command]
    env = inherited_environment() | {name: _filled(value, values) for name, value in peer.env.items()}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=env,
            stdout=output,
            stderr=output,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    try:
        await _wait_ready(peer, process, port, log)
        url = replace(parse_url(f"http://127.0.0.1:{port}"), says_done=peer.dialect != "transformers")
        server = RunningPeer(url, psutil.Process(process.pid), log)
        try:
            yield server
        finally:
            server.resume()
    finally:
        await _stop(process)


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


async def _wait_ready(peer: Peer, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    try:
        async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
            while not await _answers(client, peer, port):
                if process.returncode is not None:
                    raise SetupError(f"{peer.name} ended while it started:", log=_tail(log))
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise SetupError(f"{peer.name} is not ready after {START_S:.0f} s:", log=_tail(log)) from None


async def _answers(client: httpx.AsyncClient, peer: Peer, port: int) -> bool:
    body = completion_body(peer.model_name, [200] * 8, 1, peer.dialect)
    try:
        answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Send SIGINT first, because a server ends its own children."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            break
        with contextlib.suppress(ProcessLookupError):  # it died by itself, and that is not known here yet
            os.killpg(process.pid, sign)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            continue
