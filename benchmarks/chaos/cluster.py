"""The cluster of the drill: three hosts with their processes, started as an operator would start them
(docs/operations.md, "On several machines")."""

import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.core.errors import SetupError
from baton.core.tokens import Scope, TokenBook, TokenRecord, digest_of, write_book
from baton.files.token_places import new_token
from benchmarks.chaos.clock import Clocks
from benchmarks.chaos.links import HostLinks
from benchmarks.chaos.namespaces import Host, command
from benchmarks.chaos.processes import Supervised, end_all, first_line
from benchmarks.chaos.schedule import CONTROL, DASHBOARD, FIRST, HOSTS, REDIS, ROUTERS, STORES
from control_plane.ray_cluster import JOINED_ENVIRONMENT, OBJECT_STORE_BYTES, RAY_ENVIRONMENT

CLIENT_ADDRESS = "10.77.0.9"
RAY_PORT, CONTROL_PORT, REDIS_PORT, ROUTER_PORT, DASHBOARD_PORT = 6380, 7000, 6379, 8000, 8070
START_S = 180.0
SOCKET = "/run/store.sock"
LEAVE_S, LOOK_S = 20.0, 0.5
CODE = Path(__file__).parents[2]
"""The folder of this Baton."""
RAY_CHECKS = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}
"""Hosts that share two cores answer late, and must not be taken for lost because of that."""
CACHES = ("torchinductor_",)
"""Folders of libraries that are kept from one process to the next."""
HOST_CPUS = 4
"""CPUs that Ray assumes per host, so that the workers of a lost host find room on the others."""
STORE_BYTES, SSD_BYTES, DISK_BYTES = 32 * 2**20, 64 * 2**20, 96 * 2**20

SETTINGS = {
    "model.dtype": "float32",
    "engine.threads": "1",
    "engine.kv_bytes": str(32 * 2**20),
    "engine.self_timing_s": "0.1",
    "store.socket": SOCKET,
    "store.host_bytes": str(STORE_BYTES),
    "transfer.checksums": "true",
    "router.any_role": "false",
    "router.migrate_after_s": "1",
    "router.queue_wait_s": "60",
    "router.request_timeout_s": "120",
    "cluster.drain_timeout_s": "15",
    "cluster.start_timeout_s": "180",
    "cluster.worker_host": "0.0.0.0",
    "dashboard.enabled": "true",
}
"""Settings for exact greedy tokens, workers that share cores, hand-over of every request, and waits that end
within a drill."""


@dataclass(frozen=True, slots=True)
class DrillClusterPlan:
    model: str
    prefill: int
    decode: int
    settings: tuple[str, ...]
    """SECTION.FIELD=VALUE settings of all processes."""


class ChaosCluster:
    def __init__(self, plan: DrillClusterPlan, folder: Path) -> None:
        """Raises SetupError."""
        self._plan, self.folder = plan, folder
        self.hosts = {name: Host(name, f"10.77.0.{number}") for number, name in enumerate(HOSTS, 1)}
        self.links = HostLinks(self.hosts, CLIENT_ADDRESS)
        self.clocks = Clocks(folder, list(HOSTS))
        first = self.hosts[FIRST].address
        self.control_address = f"{first}:{CONTROL_PORT}"
        self.redis_url = f"redis://{first}:{REDIS_PORT}"
        self.routers = {
            name: f"http://{self.hosts[host].address}:{ROUTER_PORT}" for name, host in ROUTERS.items()
        }
        self.dashboard_url = f"http://{first}:{DASHBOARD_PORT}"
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._ray_token = secrets.token_hex(32)
        self.token_file = self._make_tokens()
        self.supervised = {one.name: one for one in self._processes()}

    def _make_tokens(self) -> Path:
        """Orders that change a worker on another host need an operator's token."""
        token, book, mine = new_token(), self.folder / "tokens.txt", self.folder / "operator.token"
        book.write_text(write_book(TokenBook([TokenRecord("drill", Scope.OPERATE, digest_of(token))])))
        mine.write_text(token)
        mine.chmod(0o600)
        return mine

    @property
    def access(self) -> dict[str, str]:
        return {"access.tokens": str(self.folder / "tokens.txt"), "access.token": str(self.token_file)}

    def settings(self) -> dict[str, str]:
        given = {name: value for name, _, value in (one.partition("=") for one in self._plan.settings)}
        return {**SETTINGS, **self.access, "store.directory": self.redis_url, **given}

    def _environment(self, host: str) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "RAY_"))}
        ray = {**RAY_ENVIRONMENT, **JOINED_ENVIRONMENT, **RAY_CHECKS}
        ray |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._ray_token, "RAY_TMPDIR": "/run"}
        # Processes of a host begin in its root folder, and would find another Baton or none.
        path = os.pathsep.join(filter(None, (str(CODE), os.environ.get("PYTHONPATH", ""))))
        ours = {"PYTHONUNBUFFERED": "1", "TMPDIR": "/run/tmp", "PYTHONPATH": path}
        return {**plain, **ray, **ours, **self.clocks.environment(host)}

    def _processes(self) -> list[Supervised]:
        first = self.hosts[FIRST].address
        found = [self._make(REDIS, FIRST, self._redis()), self._make(f"ray {FIRST}", FIRST, self._ray(FIRST))]
        found += [self._make(f"ray {host}", host, self._ray(host)) for host in HOSTS[1:]]
        pools = ("--prefill", str(self._plan.prefill), "--decode", str(self._plan.decode))
        control = ("--port", str(CONTROL_PORT), "--ray-address", f"{first}:{RAY_PORT}", *pools)
        places = (
            ("cluster.control_host", first),
            ("dashboard.host", first),
            ("dashboard.port", DASHBOARD_PORT),
        )
        model = ("--model", self._plan.model)
        found.append(self._make("cluster", FIRST, self._baton("control", *model, *control, sets=places)))
        for name, host in STORES.items():
            argv = ("store", "run", "--dir", str(self.disk(name)), "--ssd-bytes", str(SSD_BYTES))
            found.append(self._make(name, host, self._baton(*argv, "--control", self.control_address)))
        for name, host in ROUTERS.items():
            where = ("--host", self.hosts[host].address, "--port", str(ROUTER_PORT))
            argv = ("router", *model, "--control", self.control_address, *where)
            found.append(self._make(name, host, self._baton(*argv)))
        return found

    def _make(self, name: str, host: str, argv: Sequence[str]) -> Supervised:
        return Supervised(name, self.hosts[host], tuple(argv), self._environment(host), self._logs)

    def _baton(self, *argv: str, sets: Sequence[tuple[str, object]] = ()) -> tuple[str, ...]:
        settings = {**self.settings(), **dict(sets)}
        return (
            sys.executable,
            "-m",
            "baton",
            *argv,
            *(p for k, v in settings.items() for p in ("--set", f"{k}={v}")),
        )

    def _redis(self) -> tuple[str, ...]:
        beside = shutil.which("redis-server", path=str(Path(sys.executable).parent))
        program = os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or beside
        if program is None:
            raise SetupError("no redis-server found: install it, or give its path in REDIS_SERVER")
        where = ("--bind", self.hosts[FIRST].address, "--port", str(REDIS_PORT), "--protected-mode", "no")
        return (program, *where, "--save", "", "--appendonly", "no", "--dir", "/run")

    def _ray(self, host: str) -> tuple[str, ...]:
        here, first = self.hosts[host].address, self.hosts[FIRST].address
        program = str(Path(sys.executable).with_name("ray"))
        role = ("--head", f"--port={RAY_PORT}") if host == FIRST else (f"--address={first}:{RAY_PORT}",)
        common = (f"--node-ip-address={here}", f"--num-cpus={HOST_CPUS}")
        memory = f"--object-store-memory={OBJECT_STORE_BYTES}"
        rest = ("--disable-usage-stats", "--include-log-monitor=false", "--block")
        if host == FIRST:
            return (program, "start", *role, "--include-dashboard=false", *common, memory, *rest)
        return (program, "start", *role, *common, memory, *rest)

    def disk(self, store: str) -> Path:
        """The file system of a store node's SSD files. It outlives its host."""
        return self.folder / f"disk-{store}"

    # --- life ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start hosts and processes, and wait until workers serve. Raises SetupError."""
        for store in STORES:
            self.disk(store).mkdir()
            await command("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(self.disk(store)))
        for host in self.hosts.values():
            await self._start_host(host)
        await self.links.start()
        for names in ((REDIS, f"ray {FIRST}"), tuple(f"ray {host}" for host in HOSTS[1:])):
            for name in names:
                self.supervised[name].start()
            for name in names:
                said = "eady to accept connections" if name == REDIS else "Ray runtime started"
                await first_line(self.supervised[name], said, timeout_s=START_S)
        for process in self.supervised.values():
            process.start()
        await first_line(self.supervised["cluster"], "Baton is ready", timeout_s=START_S)
        for name in (*STORES, *ROUTERS):
            await first_line(self.supervised[name], "ready ", timeout_s=START_S)

    async def _start_host(self, host: Host) -> None:
        """Ray's folder is kept among the logs, because the workers' logs are in it."""
        kept = self._logs / f"ray-{host.name}"
        kept.mkdir(exist_ok=True)
        await host.start()
        await host.command("sh", "-c", f"mkdir -p /run/ray && mount --bind {shlex.quote(str(kept))} /run/ray")

    async def stop(self) -> list[str]:
        """Stop everything in order, and return what did not end by itself or was left behind."""
        await self.links.mend_all()
        left: list[str] = []
        for names in (tuple(ROUTERS), ("cluster",), tuple(STORES), (REDIS,)):
            ended = await asyncio.gather(*(self.supervised[n].stop(_signal_of(n)) for n in names))
            left += [f"{n} did not end" for n, did in zip(names, ended, strict=True) if not did]
        left += await self._left_at_last()
        for host in HOSTS:
            await self.supervised[f"ray {host}"].stop(timeout_s=10)
        await self.kill()
        return left

    async def _left_at_last(self) -> list[str]:
        """What is left after LEAVE_S: Ray ends the workers of other hosts in its own time."""
        ends_s = time.monotonic() + LEAVE_S
        while (left := self._left_behind()) and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return left

    def _left_behind(self) -> list[str]:
        """Processes of ours and files of ours that are still there. Ray is another's."""
        found: list[str] = []
        for name, host in self.hosts.items():
            for process in host.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    words = " ".join(process.cmdline())
                    if process.status() != psutil.STATUS_ZOMBIE and (
                        " -m baton" in words or "WorkerActor" in words
                    ):
                        found.append(f"process {process.pid} on {name}: {words[:120]}")
            root = Path(f"/proc/{host.init_pid}/root")
            files = (file.name for file in (root / "run/tmp").iterdir())
            found += [f"{name}: /run/tmp/{file}" for file in files if not file.startswith(CACHES)]
            shared = (file.name for file in (root / "dev/shm").iterdir())
            found += [f"{name}: /dev/shm/{file}" for file in shared if not file.startswith(("plasma", "ray"))]
        return found

    async def kill(self) -> None:
        """End all hosts at once. Idempotent."""
        await end_all(self.hosts.values(), self.supervised.values())

    # --- processes that faults are applied to ------------------------------------------------------

    def process(self, target: str) -> psutil.Process | None:
        """The running process of a name of the schedule; None: it is away at the moment."""
        if target == CONTROL:
            return self._child("control", "--only")
        if target == DASHBOARD:
            return self._child("dashboard", "--control")
        return self.supervised[target].process()

    def _child(self, *words: str) -> psutil.Process | None:
        parent = self.supervised["cluster"].process()
        if parent is None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in parent.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    argv = child.cmdline()
                    if argv[1:3] == ["-m", "baton"] and argv[3] == words[0] and words[1] in argv:
                        return child
        return None

    def workers(self) -> list[psutil.Process]:
        """All worker processes, in the order of their start."""
        found: list[tuple[float, int, psutil.Process]] = []
        for host in self.hosts.values():
            for process in host.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if " ".join(process.cmdline()).startswith("ray::WorkerActor"):
                        found.append((process.create_time(), process.pid, process))
        return [process for _, _, process in sorted(found, key=lambda one: one[:2])]

    def describe(self, process: psutil.Process) -> str:
        """What a process is, for people."""
        host = next((name for name, host in self.hosts.items() if process in host.processes()), "a lost host")
        return f"process {process.pid} on {host}"

    async def redis_command(self, *words: str) -> str:
        """Raises SetupError."""
        program = str(Path(self._redis()[0]).with_name("redis-cli"))
        return await command(program, "-h", self.hosts[FIRST].address, "-p", str(REDIS_PORT), *words)

    def logs(self) -> dict[str, str]:
        """The logs of our processes. Those of the workers are in Ray's folder; Ray's own are left out."""
        ours = (file for file in self._logs.glob("*.log") if not file.name.startswith("ray-"))
        files = [*ours, *self._logs.glob("ray-*/session_*/logs/worker-*")]
        return {str(file.relative_to(self._logs)): file.read_text(errors="replace") for file in sorted(files)}

    async def lose(self, name: str) -> None:
        """Kill a host with all that runs on it, and start it again, empty."""
        mine = [process for process in self.supervised.values() if process.host.name == name]
        for process in mine:
            process.hold()
        await self.hosts[name].kill()
        await asyncio.sleep(1.0)
        await self._start_host(self.hosts[name])
        await self.links.restore(name)
        for process in mine:
            process.start()


def _signal_of(name: str) -> signal.Signals:
    return signal.SIGINT if name == "cluster" else signal.SIGTERM
