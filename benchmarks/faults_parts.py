"""The parts of the fault bench: a Redis, a Ray of several nodes, and `baton serve`, all on this machine."""

import asyncio
import contextlib
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from baton.core.errors import SetupError
from benchmarks.ports import free_port
from control_plane.ray_cluster import OBJECT_STORE_BYTES, ray_environment, without_helpers

START_S = 180.0
FIRST_LOOKS = {"RAY_health_check_initial_delay_ms": "5000"}
"""Ray's first health check of a new node comes later than usual, because several nodes that start at once on
one machine may be too busy to answer in time."""
ATTEMPTS = 2
"""Attempts at starting the nodes. Ray gives each node 30 s, whatever its settings, which is too few on a busy
machine."""
STOP_S = 60.0
NODE_CPUS = 8
"""CPUs that Ray assumes per node. The nodes share the machine's own."""
LOG_LINES_MAX = 4000
_READY = "Baton is ready"


class Redis:
    """One `redis-server` on a Unix socket, which keeps nothing across restarts."""

    def __init__(self, folder: Path) -> None:
        """Raises SetupError."""
        program = os.environ.get("REDIS_SERVER") or shutil.which("redis-server")
        if program is None:
            raise SetupError("no redis-server found: install it, or give its path in REDIS_SERVER")
        path = folder / "redis.sock"
        self.url = f"unix://{path}"
        base = ("--port", "0", "--save", "", "--appendonly", "no", "--dir", str(folder))
        self._command = (program, *base, "--unixsocket", str(path))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until it listens. Raises SetupError."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert process.stdout is not None
        said = b""
        while line := await process.stdout.readline():
            said += line
            if b"eady to accept connections" in line:
                return
        raise SetupError(f"redis-server ended at its start: {said.decode(errors='replace')[-500:]}")

    async def kill(self) -> None:
        """Send SIGKILL, if it is running."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


@dataclass
class RayNodes:
    """A head node without resources, and nodes for workers."""

    cluster: Any
    nodes: list[Any] = field(default_factory=list[Any])

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def lose(self, node_id: str) -> int:
        """Send SIGKILL to a node's raylet and all processes that it started, and return their number. Raises
        KeyError for an unknown node."""
        found = [n for n in self.nodes if n.node_id == node_id]
        if not found:
            raise KeyError(node_id)
        (node,) = found
        self.nodes.remove(node)
        lost = list(_family(i.process.pid for i in _processes_of(node)))
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(node, allow_graceful=False)
        return len(lost)


def _processes_of(node: Any) -> Iterator[Any]:
    for listed in node.all_processes.values():
        yield from listed


def _family(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            yield from process.children(recursive=True)
            yield process


@contextmanager
def ray_nodes(count: int) -> Generator[RayNodes]:
    """A Ray cluster for this bench alone, on loopback and protected by a token. Processes that are started
    meanwhile find it in the environment. Raises SetupError."""
    before = dict(os.environ)
    os.environ.update(ray_environment(is_local=True) | FIRST_LOOKS)
    nodes: RayNodes | None = None
    try:
        nodes = _started(count, attempts=ATTEMPTS)
        yield nodes
    finally:
        if nodes is not None:
            nodes.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _started(count: int, *, attempts: int) -> RayNodes:
    """Raises SetupError."""
    ray_cluster: Any = importlib.import_module("ray.cluster_utils").Cluster
    common = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    here = set(psutil.Process().children(recursive=True))
    cluster: Any = None
    try:
        with without_helpers():
            cluster = ray_cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
            nodes = [cluster.add_node(wait=False, num_cpus=NODE_CPUS, **common) for _ in range(count)]
        # wait for all together, because each alone would get 30 s only
        cluster.wait_for_nodes(timeout=START_S)
    except Exception as error:  # Ray raises its own exceptions and plain ones
        if cluster is not None:
            cluster.shutdown()
        for process in set(psutil.Process().children(recursive=True)) - here:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if attempts > 1:
            return _started(count, attempts=attempts - 1)
        raise SetupError(f"Ray does not start here: {error}") from error
    return RayNodes(cluster, nodes)


class Serve:
    """`baton serve` as an operator starts it, with its log."""

    def __init__(self, name: str, model: str, arguments: Sequence[str]) -> None:
        self.name, self.port, self.log = name, free_port(), list[str]()
        self.url = f"http://127.0.0.1:{self.port}"
        head = (sys.executable, "-m", "baton", "serve", "--model", model, "--port", str(self.port))
        self._command = (*head, *arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def control_address(self) -> str:
        """The address that its log shows."""
        line = next(line for line in self.log if "control plane at " in line)
        return line.rsplit("control plane at ", 1)[1].split(",")[0]

    async def start(self) -> None:
        """Start it and wait until it serves. Raises SetupError with the end of its log."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read(self._process))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, self._reader}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._ready.is_set():
            await self.stop()
            raise SetupError(f"{self.name} does not start:", log="\n".join(self.log[-20:]))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            if len(self.log) < LOG_LINES_MAX:
                self.log.append(text)
            if text.startswith(_READY):
                self._ready.set()

    def control_process(self) -> psutil.Process | None:
        """The control plane's current process."""
        for process in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                if "control" in command and "--only" in command:
                    return process
        return None

    async def stop(self) -> None:
        """Send Ctrl-C, and kill the rest. Idempotent."""
        process = self._process
        if process is None:
            return
        family = list(_family([process.pid]))
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        await process.wait()
        if self._reader is not None:
            await self._reader
