"""A worker whose stages are on hosts of their own: Ray nodes in network namespaces, mutual TLS everywhere.

`python -m tests.integration.stage_hosts FOLDER MODEL FAULT [OPTION…]` enters namespaces of its own and prints
what it saw as a line of JSON. The fault "none" hands prompts over, between workers of two roles. Host `a` has
the control plane, the router and no worker; each other has room for one stage.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from baton.wire.client import worker_status
from baton.wire.transport import secure
from benchmarks.chaos.links import HostLinks
from benchmarks.chaos.namespaces import Host, check_namespaces, enter, is_inside
from benchmarks.chaos.processes import Supervised, end_all, first_line
from control_plane.ray_cluster import JOINED_ENVIRONMENT, OBJECT_STORE_BYTES, RAY_ENVIRONMENT
from tests.certificates import make_folder, tls_environment, tls_of
from worker.stage_actor import FOLLOWER

FIRST, PLACES = "a", ("b", "c", "d")
RAY_PORT, CONTROL_PORT, ROUTER_PORT = 6380, 7000, 8000
START_S, WAIT_S = 180.0, 120.0
CLIENT_ADDRESS = "10.77.0.9"
PROMPTS = [[3 + (7 * n + k) % 90 for k in range(20 + 60 * n)] for n in range(3)]
STREAMED = 900
"""Tokens of a stream that a fault meets."""
SETTINGS = {
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
WORKER = "ray::WorkerActor"
ONE_WORKER = ["follower", "leader"]


class StageHosts:
    def __init__(self, folder: Path, model: str, arguments: list[str]) -> None:
        self._logs, self._model, self._arguments = folder, model, arguments
        names = (FIRST, *PLACES)
        self.hosts = {name: Host(name, f"10.77.0.{number}") for number, name in enumerate(names, 1)}
        self.links = HostLinks(self.hosts, CLIENT_ADDRESS)
        self._ray_token = secrets.token_hex(32)
        tls = tls_of(make_folder(folder / "certificates"))
        self._tls = tls_environment(tls)
        secure(tls)
        self.url = f"http://{self.hosts[FIRST].address}:{ROUTER_PORT}"
        self.supervised = self._processes()

    def _environment(self) -> Mapping[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "RAY_"))}
        ray = {**RAY_ENVIRONMENT, **JOINED_ENVIRONMENT, "RAY_health_check_initial_delay_ms": "5000"}
        ray |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._ray_token, "RAY_TMPDIR": "/run"}
        code = str(Path(__file__).parents[2])
        return {
            **plain,
            **ray,
            **self._tls,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": "/run/tmp",
            "PYTHONPATH": code,
        }

    def _make(self, name: str, host: str, *argv: str) -> Supervised:
        return Supervised(name, self.hosts[host], argv, self._environment(), self._logs)

    def _processes(self) -> dict[str, Supervised]:
        first = self.hosts[FIRST].address
        sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
        baton = (sys.executable, "-m", "baton")
        control = ("control", "--model", self._model, "--port", str(CONTROL_PORT), *self._arguments)
        control += ("--ray-address", f"{first}:{RAY_PORT}", "--set", f"cluster.control_host={first}", *sets)
        router = ("router", "--model", self._model, "--control", f"{first}:{CONTROL_PORT}")
        router += ("--host", first, "--port", str(ROUTER_PORT), *sets)
        made = {name: self._make(name, name, *self._ray(name)) for name in self.hosts}
        return made | {
            "control": self._make("control", FIRST, *baton, *control),
            "router": self._make("router", FIRST, *baton, *router),
        }

    def _ray(self, host: str) -> tuple[str, ...]:
        here, first = self.hosts[host].address, self.hosts[FIRST].address
        role = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false")
        if host != FIRST:
            role = (f"--address={first}:{RAY_PORT}",)
        return (
            *(str(Path(sys.executable).with_name("ray")), "start", *role, f"--node-ip-address={here}"),
            *(f"--num-cpus={int(host != FIRST)}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
            *("--disable-usage-stats", "--include-log-monitor=false", "--block"),
        )

    async def start(self) -> None:
        for host in self.hosts.values():
            await host.start()
        await self.links.start()
        for names in ((FIRST,), PLACES):
            for name in names:
                self.supervised[name].start()
            for name in names:
                await first_line(self.supervised[name], "Ray runtime started", timeout_s=START_S)
        self.supervised["control"].start()
        self.supervised["router"].start()
        await first_line(self.supervised["control"], "Baton is ready", timeout_s=START_S)
        await first_line(self.supervised["router"], "ready ", timeout_s=START_S)

    async def lose(self, name: str) -> None:
        """A host is gone with all that runs on it, as at a power failure: nothing is said to anybody."""
        self.supervised[name].hold()
        await self.hosts[name].kill()

    async def cut(self, name: str) -> None:
        """Nothing that leaves or reaches a host arrives."""
        for other in self.hosts:
            if other != name:
                await self.links.break_(name, other, ("blackhole",))
                await self.links.break_(other, name, ("blackhole",))

    def ranks(self) -> dict[str, list[str]]:
        """Host -> what it has of workers."""
        found: dict[str, list[str]] = {}
        for name, host in self.hosts.items():
            for process in host.processes() if host.is_up else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    words = " ".join(process.cmdline())
                    is_ours = WORKER in words or FOLLOWER in words
                    if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                        found.setdefault(name, []).append("leader" if WORKER in words else "follower")
        return found

    async def await_placed(
        self, *, without: str = "", kinds: Sequence[str] = ONE_WORKER
    ) -> dict[str, list[str]]:
        """Wait until there are these leaders and followers, and nothing is on the host `without`."""
        end_s = time.monotonic() + WAIT_S
        while True:
            found = self.ranks()
            there = sorted(kind for those in found.values() for kind in those)
            if there == list(kinds) and without not in found:
                return found
            if time.monotonic() > end_s:
                raise TimeoutError(f"ranks: {found}")
            await asyncio.sleep(0.2)

    async def stop(self) -> dict[str, list[str]]:
        """End the cluster in order, and return what is left of workers."""
        await self.links.mend_all()
        await self.supervised["router"].stop()
        await self.supervised["control"].stop(signal.SIGINT)
        end_s = time.monotonic() + 20
        while (left := self.ranks()) and time.monotonic() < end_s:  # noqa: ASYNC110 - Ray takes its time
            await asyncio.sleep(0.2)
        return left

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


async def hand_over(hosts: StageHosts, report: dict[str, Any]) -> None:
    await hosts.start()
    report["placed"] = await hosts.await_placed(kinds=[*ONE_WORKER, "leader"])
    async with httpx.AsyncClient(timeout=240) as client:
        report["tokens"] = [await complete(client, hosts.url, prompt, 24) for prompt in PROMPTS]
        report["accounts"] = await accounts(client, hosts.url)
    report["left"] = await hosts.stop()


async def lose(hosts: StageHosts, report: dict[str, Any], fault: str) -> None:
    prompts = PROMPTS
    await hosts.start()
    report["placed"] = before = await hosts.await_placed()
    async with httpx.AsyncClient(timeout=240) as client:
        report["tokens"] = [await complete(client, hosts.url, prompt, 24) for prompt in prompts]
        begun = [asyncio.Event() for _ in prompts]
        streams = [
            asyncio.create_task(complete(client, hosts.url, prompt, STREAMED, event))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        victim = next(name for name, kinds in before.items() if fault.split()[1] in kinds)
        report["streams_under_way"] = sum(not stream.done() for stream in streams)
        await (hosts.lose if fault.startswith("lose") else hosts.cut)(victim)
        report["streamed"] = await asyncio.gather(*streams)
        without = victim if fault.startswith("lose") else ""
        if not without:
            await hosts.links.mend_all()
        report["placed_again"] = await hosts.await_placed(without=without)
    report["left"] = await hosts.stop()


async def drill(folder: Path, model: str, fault: str, arguments: list[str]) -> dict[str, Any]:
    hosts, report = StageHosts(folder, model, arguments), dict[str, Any](prompts=PROMPTS)
    try:
        await (hand_over(hosts, report) if fault == "none" else lose(hosts, report, fault))
        return report
    except BaseException:
        for process in hosts.supervised.values():
            print(process.name, process.tail(), file=sys.stderr)
        raise
    finally:
        await hosts.kill()


def main() -> int:
    folder, model, fault, *arguments = sys.argv[1:]
    if not is_inside():
        check_namespaces()
        return enter([sys.executable, "-m", "tests.integration.stage_hosts", *sys.argv[1:]])
    print(json.dumps(asyncio.run(drill(Path(folder), model, fault, arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
