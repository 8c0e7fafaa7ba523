"""The life of one pod, as a kubelet leads it: init containers, probes, restarts, hooks, its end."""

import asyncio
import os
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.pods.manifests import PodPlan, Release, hosts, port_of
from tests.pods.podman import Done, Folders, PodmanError, call, create_arguments, podman
from tests.pods.policies import rules, service_rules

KILLED = 137
"""Exit status of a process that got SIGKILL."""
BACK_OFF_S = 5
Say = Callable[[str], None]


@dataclass
class Ended:
    """How a pod ended: seconds, and the exit status of each container."""

    took_s: float
    statuses: dict[str, int]

    @property
    def was_killed(self) -> bool:
        return KILLED in self.statuses.values()


@dataclass
class Pod:
    """`label` marks what this run made. `ready_names` tells which pods are ready, for Services."""

    plan: PodPlan
    release: Release
    folders: Folders
    network: str
    label: str
    ready_names: Callable[[], frozenset[str]]
    say: Say
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_leaving: bool = False
    restarts: list[str] = field(default_factory=list[str])
    killed: list[str] = field(default_factory=list[str])
    _ready: dict[str, bool] = field(default_factory=dict[str, bool])
    _started: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list["asyncio.Task[None]"])

    def container(self, name: str) -> str:
        return f"{self.label}-{self.plan.name}-{name}"

    async def start(self) -> None:
        """Create the pod with its network, run what comes first, and start the containers. Raises PodmanError
        if podman refuses one or an init container fails."""
        self.is_leaving, self._ready = False, {}
        await self._create()
        for one in self.plan.spec.get("initContainers", ()):
            if one.get("restartPolicy") == "Always":
                self._supervise(one)
                await self._started[one["name"]].wait()
                continue
            done = await self._run_once(one)
            if done.status:
                raise PodmanError(f"{self.plan.name}: init container {one['name']}: {done.out}{done.err}")
        for one in self.plan.spec["containers"]:
            self._supervise(one)

    async def run_to_end(self) -> Done:
        """A pod that is not restarted, such as a test: its exit status and what it printed."""
        await self._create()
        return await self._run_once(self.plan.spec["containers"][0], timeout_s=600)

    async def delete(self) -> Ended:
        """As `kubectl delete pod` does: hooks, SIGTERM, and SIGKILL when the grace period is over. Sidecars
        among the init containers end after the others."""
        began, self.is_leaving = time.monotonic(), True
        self.is_ready.clear()
        ends = time.monotonic() + self.plan.grace_s
        firsts = self.plan.spec["containers"]
        lasts = [c for c in self.plan.spec.get("initContainers", ()) if c.get("restartPolicy") == "Always"]
        await asyncio.gather(*(self._stop(c, ends) for c in firsts))
        await asyncio.gather(*(self._stop(c, ends) for c in lasts))
        statuses = {c["name"]: await self._exit_status(c) for c in [*firsts, *lasts]}
        took_s = time.monotonic() - began
        await self.remove()
        return Ended(took_s, statuses)

    async def remove(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await podman("pod", "rm", "--force", "--time=0", f"{self.label}-{self.plan.name}", check=False)
        self.folders.forget(self.plan.name)

    async def _create(self) -> None:
        name, plan = f"{self.label}-{self.plan.name}", self.plan
        named = [f"--add-host={host}:{address}" for host, address in hosts(self.release).items()]
        image = plan.spec["containers"][0]["image"]
        await podman("pod", "rm", "--force", "--time=0", name, check=False)
        await podman(
            *("pod", "create", "--name", name, "--label", f"baton={self.label}", "--share=net,uts"),
            *("--network", self.network, "--ip", plan.address, "--infra-name", f"{name}-infra"),
            *("--hostname", plan.spec.get("hostname", plan.name), *named),
            *("--infra-image", image, "--infra-command", "sleep infinity"),
        )
        await podman("start", f"{name}-infra")
        pid = (await podman("inspect", f"{name}-infra", "--format", "{{.State.Pid}}")).out.strip()
        for rule in [*service_rules(self.release, self.ready_names()), *rules(self.release, plan)]:
            await call("nsenter", "-t", pid, "-n", "iptables", "-w", *rule)

    async def _launch(self, container: Mapping[str, Any]) -> str:
        name = self.container(container["name"])
        await podman("rm", "--force", "--time=0", name, check=False)
        made = create_arguments(self.release, self.plan, container, self.folders)
        await podman("create", "--pod", f"{self.label}-{self.plan.name}", "--name", name, *made)
        return name

    async def _run_once(self, container: Mapping[str, Any], *, timeout_s: float = 600) -> Done:
        name = await self._launch(container)
        return await podman("start", "--attach", name, check=False, timeout_s=timeout_s)

    def _supervise(self, container: Mapping[str, Any]) -> None:
        self._ready[container["name"]], self._started[container["name"]] = False, asyncio.Event()
        self._tasks.append(asyncio.create_task(self._kept(container)))

    async def _kept(self, container: Mapping[str, Any]) -> None:
        """Say why a container cannot be kept, since nobody waits for this task."""
        try:
            await self._keep(container)
        except (PodmanError, TimeoutError, OSError, KeyError) as fault:
            self.say(f"{self.plan.name}: {container['name']} cannot run: {fault!r}")

    async def _keep(self, container: Mapping[str, Any]) -> None:
        """Start the container, and again whenever it ends."""
        while not self.is_leaving:
            name = await self._launch(container)
            await podman("start", name)
            pid = int((await podman("inspect", name, "--format", "{{.State.Pid}}")).out)
            async with self._probed(container, name):
                await _process_end(pid)
            if self.is_leaving:
                return
            self._tell(container, ready=False)
            status = await self._exit_status(container)
            tail = (await podman("logs", "--tail=5", name, check=False)).err[-600:]
            self.restarts.append(f"{container['name']} ended with status {status}")
            self.say(f"{self.plan.name}: {self.restarts[-1]}; it starts anew. {tail}")
            if status == KILLED:
                self.killed.append(container["name"])
            await asyncio.sleep(BACK_OFF_S)

    @asynccontextmanager
    async def _probed(self, container: Mapping[str, Any], name: str) -> AsyncGenerator[None]:
        task = asyncio.create_task(self._probe(container, name))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _probe(self, container: Mapping[str, Any], name: str) -> None:
        """Ask the startup probe until it passes, then readiness and liveness at their periods."""
        if start := container.get("startupProbe"):
            failures = 0
            while not await self._passes(container, name, start):
                failures += 1
                if failures >= start.get("failureThreshold", 3):
                    await self._kill(container, name, "startup probe")
                    return
                await asyncio.sleep(start.get("periodSeconds", 10))
        self._started[container["name"]].set()
        probes = [self._readiness(container, name)]
        if live := container.get("livenessProbe"):
            probes.append(self._liveness(container, name, live))
        await asyncio.gather(*probes)

    async def _readiness(self, container: Mapping[str, Any], name: str) -> None:
        probe = container.get("readinessProbe")
        if not probe:
            self._tell(container, ready=True)
            return
        failures = 0
        while True:
            passes = await self._passes(container, name, probe)
            failures = 0 if passes else failures + 1
            if passes or failures >= probe.get("failureThreshold", 3):
                self._tell(container, ready=passes)
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _liveness(self, container: Mapping[str, Any], name: str, probe: Mapping[str, Any]) -> None:
        failures = 0
        while failures < probe.get("failureThreshold", 3):
            await asyncio.sleep(probe.get("periodSeconds", 10))
            failures = 0 if await self._passes(container, name, probe) else failures + 1
        await self._kill(container, name, "liveness probe")

    async def _kill(self, container: Mapping[str, Any], name: str, why: str) -> None:
        if not self.is_leaving:
            self.say(f"{self.plan.name}: {container['name']} fails its {why} and is ended")
            await podman("stop", "--time", str(self.plan.grace_s), name, check=False)

    def _tell(self, container: Mapping[str, Any], *, ready: bool) -> None:
        self._ready[container["name"]] = ready
        if all(self._ready.values()) and not self.is_leaving:
            self.is_ready.set()
        else:
            self.is_ready.clear()

    async def _passes(self, container: Mapping[str, Any], name: str, probe: Mapping[str, Any]) -> bool:
        limit_s = probe.get("timeoutSeconds", 1)
        try:
            if tcp := probe.get("tcpSocket"):
                at = (self.plan.address, port_of(container, tcp["port"]))
                _, writer = await asyncio.wait_for(asyncio.open_connection(*at), limit_s)
                writer.close()
                return True
            if get := probe.get("httpGet"):
                port = port_of(container, get["port"])
                url = f"{get.get('scheme', 'HTTP').lower()}://{self.plan.address}:{port}{get['path']}"
                async with httpx.AsyncClient(verify=_unchecked(), timeout=limit_s) as http:
                    return (await http.get(url)).status_code < 400
            # Podman itself takes part of a second to begin, which a kubelet does not.
            done = await podman("exec", name, *probe["exec"]["command"], check=False, timeout_s=limit_s + 5)
            return done.status == 0
        except (OSError, TimeoutError, httpx.HTTPError):
            return False

    async def _stop(self, container: Mapping[str, Any], ends: float) -> None:
        name = self.container(container["name"])
        if hook := container.get("lifecycle", {}).get("preStop", {}).get("exec"):
            left_s = max(1.0, ends - time.monotonic())
            try:
                done = await podman("exec", name, *hook["command"], check=False, timeout_s=left_s)
                if done.status:
                    self.say(
                        f"{self.plan.name}: preStop ends with {done.status}: {(done.out + done.err)[-300:]}"
                    )
            except TimeoutError:
                self.say(f"{self.plan.name}: preStop takes longer than the grace period")
        left_s = max(1, int(ends - time.monotonic()))
        await podman("stop", "--time", str(left_s), name, check=False, timeout_s=left_s + 60)

    async def _exit_status(self, container: Mapping[str, Any]) -> int:
        name = self.container(container["name"])
        done = await podman("inspect", name, "--format", "{{.State.ExitCode}} {{.State.OOMKilled}}")
        status, out_of_memory = done.out.split()
        return KILLED if out_of_memory == "true" else int(status)


def _unchecked() -> ssl.SSLContext:
    """A kubelet does not check the certificate of what it probes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _process_end(pid: int) -> None:
    """Return when the process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
