"""Hosts that are Ray nodes, in network namespaces, with mutual TLS everywhere: what drills of several hosts
share.

Host `a` has the control plane, the router and no worker. Several clusters may run on the same nodes, one
after the other, since the nodes take longest to start.
"""

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from baton.core.errors import SetupError
from baton.wire.client import worker_status
from baton.wire.transport import secure
from benchmarks.chaos.links import BLACKHOLE, HostLinks
from benchmarks.chaos.namespaces import Host, check_namespaces, enter, is_inside
from benchmarks.chaos.processes import Supervised, end_all, first_line
from control_plane.ray_cluster import JOINED_ENVIRONMENT, OBJECT_STORE_BYTES, RAY_ENVIRONMENT
from tests.certificates import make_folder, tls_environment, tls_of
from worker.stage_actor import FOLLOWER

ROOT = Path(__file__).parents[2]
FIRST = "a"
RAY_PORT, CONTROL_PORT, ROUTER_PORT = 6380, 7000, 8000
START_S, WAIT_S = 180.0, 120.0
CLIENT_ADDRESS = "10.77.0.9"
SETTINGS: dict[str, object] = {
    "model.dtype": "float32",
    "engine.block_tokens": 16,
    "engine.threads": 1,
    "engine.kv_bytes": 32 * 2**20,
    "engine.self_timing_s": 0.1,
    "router.any_role": "false",
    "router.migrate_after_s": 1,
    "router.queue_wait_s": 120,
    "router.request_timeout_s": 240,
    "cluster.start_timeout_s": 180,
    "cluster.worker_host": "0.0.0.0",
    "dashboard.enabled": "false",
}
KINDS = {"ray::WorkerActor": "leader", FOLLOWER: "follower", "ray::ExpertRankActor": "expert rank"}
"""Signs in command lines, and the kinds of processes that they are of."""
ALIVE = 0
"""State of a node in `GcsNodeInfo`."""
Found = TypeVar("Found")
CONTROL = f"10.77.0.1:{CONTROL_PORT}"


class RayHosts:
    def __init__(self, folder: Path, model: str, places: Iterable[str], *, cpus: int = 1) -> None:
        """places: hosts beside the first, each of which has room for `cpus` threads of workers."""
        self._logs, self._model, self._cpus = folder, model, cpus
        self.places = tuple(places)
        names = (FIRST, *self.places)
        self.hosts = {name: Host(name, f"10.77.0.{number}") for number, name in enumerate(names, 1)}
        self.links = HostLinks(self.hosts, CLIENT_ADDRESS)
        self._ray_auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ.update(self._ray_auth)  # before Ray is imported, which reads it
        self._ray_address = f"{self.hosts[FIRST].address}:{RAY_PORT}"
        tls = tls_of(make_folder(folder / "certificates"))
        self._tls = tls_environment(tls)
        secure(tls)
        self.url = f"http://{self.hosts[FIRST].address}:{ROUTER_PORT}"
        self.supervised = {name: self._make(name, name, *self._ray(name)) for name in self.hosts}
        self._cluster_count, self._made_s = 0, time.monotonic()

    def _environment(self) -> Mapping[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "RAY_"))}
        ray = {**RAY_ENVIRONMENT, **JOINED_ENVIRONMENT, "RAY_health_check_initial_delay_ms": "5000"}
        ray |= {**self._ray_auth, "RAY_TMPDIR": "/run"}
        ours = {"PYTHONUNBUFFERED": "1", "TMPDIR": "/run/tmp", "PYTHONPATH": str(ROOT)}
        return {**plain, **ray, **self._tls, **ours}

    def _make(self, name: str, host: str, *argv: str) -> Supervised:
        return Supervised(name, self.hosts[host], argv, self._environment(), self._logs)

    def _ray(self, host: str) -> tuple[str, ...]:
        here = self.hosts[host].address
        role = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false")
        if host != FIRST:
            role = (f"--address={self._ray_address}",)
        cpus = 0 if host == FIRST else self._cpus
        return (
            *(str(Path(sys.executable).with_name("ray")), "start", *role, f"--node-ip-address={here}"),
            *(f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
            *("--disable-usage-stats", "--include-log-monitor=false", "--block"),
        )

    async def start(self) -> None:
        """Start the hosts and their Ray."""
        for host in self.hosts.values():
            await host.start()
        await self.links.start()
        for names in ((FIRST,), self.places):
            for name in names:
                self.supervised[name].start()
            for name in names:
                await first_line(self.supervised[name], "Ray runtime started", timeout_s=START_S)

    async def start_cluster(self, *arguments: str, **settings: object) -> None:
        """Start a control plane and a router as soon as every host is a Ray node. Raises TimeoutError.

        arguments: of `baton control`.
        """
        end_s = time.monotonic() + START_S
        while not await asyncio.to_thread(self._are_nodes):
            if time.monotonic() > end_s:
                raise TimeoutError(f"not every host is a Ray node within {START_S:g} s")
            await self.pause(0.2)
        self._cluster_count += 1
        first = self.hosts[FIRST].address
        sets = [f"{key.replace('__', '.')}={value}" for key, value in {**SETTINGS, **settings}.items()]
        words = [word for one in sets for word in ("--set", one)]
        baton = (sys.executable, "-m", "baton")
        control = ("control", "--model", self._model, "--port", str(CONTROL_PORT), *arguments)
        control += ("--ray-address", self._ray_address, "--set", f"cluster.control_host={first}", *words)
        router = ("router", "--model", self._model, "--control", CONTROL)
        router += ("--host", first, "--port", str(ROUTER_PORT), *words)
        for name, argv in (("control", control), ("router", router)):
            self.supervised[name] = self._make(f"{name} {self._cluster_count}", FIRST, *baton, *argv)
            self.supervised[name].start()
        await first_line(self.supervised["control"], "Baton is ready", timeout_s=START_S)
        await first_line(self.supervised["router"], "ready ", timeout_s=START_S)

    def _are_nodes(self) -> bool:
        """Return whether Ray knows every host that is up as one node. A host that was cut off for seconds is
        no node until its Ray has started again."""
        gcs = importlib.import_module("ray._raylet").GcsClient(address=self._ray_address)
        listed = gcs.get_all_node_info(timeout=5)
        alive = [node.node_manager_address for node in listed.values() if node.state == ALIVE]
        return sorted(alive) == sorted(host.address for host in self.hosts.values() if host.is_up)

    async def stop_cluster(self) -> dict[str, list[str]]:
        """End the cluster in order, and return what is left of it."""
        await self.links.mend_all()
        await self.supervised["router"].stop()
        await self.supervised["control"].stop(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await self.until("nothing is left", lambda: not self.kinds(), timeout_s=20)
        return self.kinds()

    async def lose(self, name: str) -> None:
        """A host is gone with all that runs on it, as at a power failure: nothing is said to anybody."""
        self.supervised[name].hold()
        await self.hosts[name].kill()

    async def cut(self, name: str) -> None:
        """Nothing that leaves or reaches a host arrives."""
        for other in self.hosts:
            if other != name:
                await self.links.break_(name, other, BLACKHOLE)
                await self.links.break_(other, name, BLACKHOLE)

    def processes(self) -> list[tuple[str, str, psutil.Process]]:
        """Host, kind and process of all that belongs to workers."""
        found: list[tuple[str, str, psutil.Process]] = []
        for name, host in self.hosts.items():
            for process in host.processes() if host.is_up else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    words = " ".join(process.cmdline())
                    kinds = [kind for sign, kind in KINDS.items() if sign in words]
                    if kinds and process.status() != psutil.STATUS_ZOMBIE:
                        found.append((name, kinds[0], process))
        return found

    def kinds(self) -> dict[str, list[str]]:
        """Host -> the kinds of what it has of workers, sorted."""
        found: dict[str, list[str]] = {}
        for name, kind, _ in self.processes():
            found.setdefault(name, []).append(kind)
        return {name: sorted(kinds) for name, kinds in found.items()}

    async def await_placed(self, kinds: Iterable[str], *, without: str = "") -> dict[str, list[str]]:
        """Wait until there are processes of these kinds, and nothing is on the host `without`."""
        wanted = sorted(kinds)

        def placed() -> dict[str, list[str]] | None:
            found = self.kinds()
            there = sorted(kind for those in found.values() for kind in those)
            return found if there == wanted and without not in found else None

        return await self.until(f"{wanted} are there", placed)

    async def until(self, what: str, look: Callable[[], Found | None], *, timeout_s: float = WAIT_S) -> Found:
        """Wait until `look` returns what is true. Raises TimeoutError."""
        end_s = time.monotonic() + timeout_s
        while not (found := look()):
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}; there are {self.kinds()}")
            await asyncio.sleep(0.2)
        return found

    async def pause(self, for_s: float) -> None:
        """A cluster of processes can only be looked at now and then."""
        await asyncio.sleep(for_s)

    def note(self, what: str) -> None:
        """Say on stderr what is over, and when."""
        print(f"{time.monotonic() - self._made_s:.0f} s: {what}", file=sys.stderr, flush=True)

    async def kill(self) -> None:
        await end_all(self.hosts.values(), self.supervised.values())


async def accounts(client: httpx.AsyncClient, url: str) -> dict[str, dict[str, float]]:
    """The accounts of the worker of each role."""
    listed = (await client.get(f"{url}/health")).json()["workers"]
    return {
        role: dict((await worker_status(worker["address"])).accounts)
        for role, workers in listed.items()
        for worker in workers
    }


async def complete(
    client: httpx.AsyncClient,
    url: str,
    prompt: list[int],
    max_tokens: int,
    begun: asyncio.Event | None = None,
) -> list[int]:
    """The tokens of a stream, whatever happens while it runs. `begun` is set at the first."""
    tokens: list[int] = []
    body: dict[str, Any] = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "temperature": 0,
    }
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if begun is not None:
                    begun.set()
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
    return tokens


class Streams:
    """Streams that run while something happens."""

    def __init__(
        self, client: httpx.AsyncClient, url: str, prompts: Iterable[list[int]], max_tokens: int
    ) -> None:
        made = [(prompt, asyncio.Event()) for prompt in prompts]
        self._begun = [begun for _, begun in made]
        self._tasks = [
            asyncio.create_task(complete(client, url, prompt, max_tokens, begun)) for prompt, begun in made
        ]

    @property
    def under_way(self) -> int:
        return sum(not task.done() for task in self._tasks)

    async def begin(self) -> None:
        """Wait for the first token of each."""
        await asyncio.gather(*(begun.wait() for begun in self._begun))

    async def tokens(self) -> list[list[int]]:
        return await asyncio.gather(*self._tasks)


def why_not() -> str:
    """Why hosts cannot be made here; empty: they can."""
    try:
        check_namespaces()
    except SetupError as error:
        return str(error)
    return ""


def run_drill(module: str, folder: Path, *words: str, timeout_s: float) -> dict[str, Any]:
    """Run a drill in a process of its own, and return what it saw."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]} {done.stderr[-9000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def drill_main(
    module: str, drill: Callable[[RayHosts, dict[str, Any]], Any], make: Callable[..., RayHosts]
) -> int:
    """The main function of a drill's module: it enters namespaces of its own, and prints a line of JSON."""
    if not is_inside():
        check_namespaces()
        return enter([sys.executable, "-m", module, *sys.argv[1:]])
    folder, *words = sys.argv[1:]
    print(json.dumps(asyncio.run(_drilled(make(Path(folder), *words), drill))))
    return 0


async def _drilled(hosts: RayHosts, drill: Callable[[RayHosts, dict[str, Any]], Any]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    try:
        await hosts.start()
        hosts.note("hosts are there")
        await drill(hosts, report)
        return report
    except BaseException:
        print(json.dumps(report), file=sys.stderr)
        for process in hosts.supervised.values():
            print(process.name, process.tail(), file=sys.stderr)
        raise
    finally:
        await hosts.kill()
