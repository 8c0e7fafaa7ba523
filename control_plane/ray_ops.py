"""Everything Ray: the cluster it runs or joins, and worker processes as its actors.

Ray starts, places and buries processes. Requests and KV never pass through it.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.ids import WorkerId
from baton.core.messages import Role

log = logging.getLogger(__name__)

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by default: whatever else runs on the machine would come first
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A lost node is noticed in 1.5 s instead of 15.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # Our processes fork children after gRPC has threads; its fork handlers only get in the way.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
JOINED_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled"}
"""Of a Ray cluster that somebody else started: whether it wants tokens is for them to say."""

LOCAL_ENVIRONMENT = {
    # Who reaches a port of Ray's runs what they like as us. Ray takes no address of loopback for an answer,
    # and listens on all interfaces, unless it is told that this machine has no cluster.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",  # for the other users of this machine; as a variable, Ray writes no file
}
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MB; nothing of ours goes through it

WORKER_ENVIRONMENT = {
    # libgomp's threads spin between parallel regions, which costs a neighbour ten times the latency.
    "OMP_WAIT_POLICY": "PASSIVE",
    # 2 MB pages double the bandwidth of one-sided reads; torch asks for them if told to.
    "THP_MEM_ALLOC_ENABLE": "1",
    # The EFA provider drags in a second libnl, and the process dies with SIGSEGV when it exits.
    "UCX_MODULES": "^efa",
}

SHUTDOWN_S = 10.0
"""For Ray's own orderly end; whatever is left then is killed."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """All a worker process needs to know; it is pickled to the host where the process runs."""

    worker_id: WorkerId
    role: Role
    control_address: str
    config: dict[str, Any]
    """`Config.model_dump()`."""
    cores: tuple[int, ...] = ()
    """To run on; empty: any."""


def ray_environment(*, is_local: bool) -> dict[str, str]:
    """To be set before Ray is imported; what the operator set stays. `is_local`: Ray is started here, for
    this cluster alone, and gets a token that nobody else knows."""
    ours = {**RAY_ENVIRONMENT, **(LOCAL_ENVIRONMENT if is_local else JOINED_ENVIRONMENT)}
    if is_local and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        ours["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def worker_environment(threads: int) -> dict[str, str]:
    """Variables that must be set before torch is imported; what the operator set stays."""
    ours = {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)} if threads else WORKER_ENVIRONMENT
    return {name: os.environ.get(name, value) for name, value in ours.items()}


KILL_S = 2.0
"""From SIGKILL to the end of the process, usually milliseconds."""


@dataclass(slots=True)
class _Replica:
    handle: Any
    watcher: asyncio.Task[None] | None = None
    process: psutil.Process | None = None
    """On our own host. Knows when the process was created, so never signals a later owner of the pid."""


OnExit = Callable[[WorkerId, BaseException | str], None]


class RayReplicas:
    """Worker processes as Ray actors, one process each.

    `actor_class(spec)` has async methods `identity() -> (host, pid)`, `serve() -> reason`, which runs
    for the life of the worker, and `drain()`. `on_exit(worker_id, reason)` is called once per start,
    when the process has ended or could not be started.
    """

    def __init__(self, actor_class: type, *, config: Config, on_exit: OnExit) -> None:
        self._actor_class, self._config, self._on_exit = actor_class, config, on_exit
        self._ray: Any = None
        self._replicas: dict[WorkerId, _Replica] = {}
        self._is_lost = False

    async def open(self) -> None:
        """Start Ray here, or join the cluster at `ray_address`. Raises SetupError."""
        os.environ.update(ray_environment(is_local=self.is_local))
        self._ray = await asyncio.to_thread(importlib.import_module, "ray")
        self._quieten()
        try:
            await asyncio.to_thread(self._init)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = self._config.cluster.ray_address or "on this machine"
            raise SetupError(f"Ray does not start {where}: {_first_line(error)}") from error

    def _init(self) -> None:
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "configure_logging": False,
        }
        if address := self._config.cluster.ray_address:
            self._ray.init(address=address, **common)
            return
        self._ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            # Idle interpreters that nobody asked for cost memory and start-up time.
            _system_config={"prestart_worker_first_driver": False, "num_workers_soft_limit": 0},
            **common,
        )

    def _quieten(self) -> None:
        """Ray prints a paragraph on standard output for each process that dies; we log a line."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        module = importlib.import_module("ray._private.worker")
        if hasattr(module, "print_to_stdstream"):
            setattr(module, "print_to_stdstream", _log_ray_lines)  # noqa: B010 - private, by name

    @property
    def is_local(self) -> bool:
        """This process started Ray, and nobody else uses it."""
        return not self._config.cluster.ray_address

    def lost(self) -> None:
        """Ray is dead: it is not called any more, since its calls would wait for it for minutes."""
        self._is_lost = True

    def start(self, spec: WorkerSpec, *, threads: int) -> None:
        """Does not wait. How it went is told by the directory, or by `on_exit`."""
        options: dict[str, Any] = {
            "name": spec.worker_id,
            "num_cpus": 0 if self.is_local else max(1, threads),
            "num_gpus": self._gpu_share(),
            "max_restarts": 0,  # when, and how often, is the reconciler's decision
            "max_task_retries": 0,
            "max_concurrency": 16,
            "runtime_env": {"env_vars": worker_environment(threads)},
        }
        handle = self._ray.remote(self._actor_class).options(**options).remote(spec)
        replica = self._replicas[spec.worker_id] = _Replica(handle)
        replica.watcher = asyncio.create_task(self._watch(spec.worker_id, replica), name=spec.worker_id)

    def _gpu_share(self) -> float:
        """Of one worker. "cuda:N" names a device of the machine, which Ray must not renumber; with
        fewer devices than workers, workers share; with none, the worker says so better than Ray."""
        if self._config.model.device != "cuda":
            return 0.0
        if not self.is_local:
            return 1.0
        cluster = self._config.cluster
        count = cluster.prefill_workers + cluster.decode_workers + cluster.both_workers
        device_count = float(self._ray.cluster_resources().get("GPU", 0.0))
        return gpu_share(device_count, count)

    async def drain(self, worker_id: WorkerId) -> None:
        """Ask it to finish what it holds and end; whether it does is told by `on_exit`."""
        if replica := self._replicas.get(worker_id):
            replica.handle.drain.remote()

    async def kill(self, worker_id: WorkerId) -> None:
        """At once, even if it is stopped by a signal: Ray alone would report such a process as dead
        and leave it there."""
        replica = self._replicas.get(worker_id)
        if replica is None:
            return
        _sigkill(replica.process)
        self._kill_actor(replica)

    def _kill_actor(self, replica: _Replica) -> None:
        if self._is_lost:
            return
        try:
            self._ray.kill(replica.handle, no_restart=True)
        except Exception as error:  # Ray's own trouble must not keep a replica from being started anew
            log.warning("Ray does not kill an actor: %s", _first_line(error))

    async def close(self) -> None:
        """Kill what is left and, if it was ours, stop Ray. Idempotent."""
        for worker_id in list(self._replicas):
            await self.kill(worker_id)
        watchers = [r.watcher for r in self._replicas.values() if r.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        if self._ray is not None and not self._is_lost and self._ray.is_initialized():
            await _in_daemon(self._ray.shutdown, timeout_s=SHUTDOWN_S)

    async def _watch(self, worker_id: WorkerId, replica: _Replica) -> None:
        serving = replica.handle.serve.remote()
        reason: BaseException | str
        try:
            host, pid = await replica.handle.identity.remote()
            if host == socket.gethostname():
                replica.process = psutil.Process(pid)
            reason = await serving
        except asyncio.CancelledError:
            raise
        except Exception as error:
            reason = _cause(error)
        _sigkill(replica.process)  # Ray may call it dead while it still exists
        self._kill_actor(replica)
        await asyncio.to_thread(_wait_gone, replica.process)
        self._replicas.pop(worker_id, None)
        self._on_exit(worker_id, reason)


async def _in_daemon(call: Callable[[], object], *, timeout_s: float) -> None:
    """In a thread that does not keep the process alive: a call that hangs is left behind after
    `timeout_s`, and whoever asked goes on."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            call()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="ray-shutdown", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            await done.wait()
    except TimeoutError:
        log.error("Ray does not shut down within %g s, going on without", timeout_s)


def gpu_share(device_count: float, worker_count: int) -> float:
    """In Ray's resolution of 1/10000, rounded down so that all fit."""
    if device_count >= worker_count:
        return 1.0
    per_device = -(-worker_count // max(1, int(device_count)))
    return int(10_000 / per_device) / 10_000 if device_count else 0.0


def _cause(error: Exception) -> BaseException | str:
    """What the actor's own code raised, which Ray wraps together with the actor's traceback; or in
    words, that the process is gone."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return cause
    if "died" in type(error).__name__.lower() or "ActorDied" in type(error).__name__:
        return "its process died"
    return error


def _sigkill(process: psutil.Process | None) -> None:
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _wait_gone(process: psutil.Process | None) -> None:
    if process is None:
        return
    try:
        process.wait(KILL_S)
    except psutil.NoSuchProcess:
        pass  # the state we wanted
    except psutil.TimeoutExpired:
        log.error("process %d does not end after SIGKILL", process.pid)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _log_ray_lines(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
    for line in data.get("lines", ()):
        log.debug("ray: %s", line)
