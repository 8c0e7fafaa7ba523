"""Worker processes as Ray actors.

Ray starts, places and ends processes. Requests and KV never pass through it.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from baton.config import ClusterConfig, Config
from baton.config.served_models import each_model, worker_shapes
from baton.core.ids import WorkerId
from baton.core.messages import Role
from control_plane.cores import gpus_of_worker
from control_plane.ray_cluster import RayCluster, first_line, namespace_of
from control_plane.stage_groups import StageGroups, StageNeeds

log = logging.getLogger(__name__)

WORKER_ENVIRONMENT = {
    # libgomp's threads spin between parallel regions, which costs a neighbour ten times the latency.
    "OMP_WAIT_POLICY": "PASSIVE",
    # 2 MB pages double the bandwidth of one-sided reads; torch asks for them if told to.
    "THP_MEM_ALLOC_ENABLE": "1",
    # The EFA provider drags in a second libnl, and the process dies with SIGSEGV when it exits.
    "UCX_MODULES": "^efa",
}


class WorkerSpec(msgspec.Struct, frozen=True):
    """All that a worker process needs to know. It is pickled to the host where the process runs."""

    worker_id: WorkerId
    role: Role
    control_address: str
    config: dict[str, Any]
    """The result of `Config.model_dump()`."""
    cores: tuple[int, ...] = ()
    """Cores to run on; empty: any."""
    version: str = ""
    model: str = ""
    """Model of the pool that it belongs to."""
    rank_count: int = 1
    """Ranks of the worker, as `engine.shape` of its configuration says. `cores` are those of all of them."""
    stage_count: int = 1
    """Stages that these ranks are divided into. On a Ray cluster each may be on another host."""


class WorkerIdentity(msgspec.Struct, frozen=True):
    """The identity that a worker process reports."""

    host: str
    pid: int
    model: str
    role: Role
    """Its present role."""
    version: str
    age_s: float = 0.0
    """Seconds since it was created."""


def worker_environment(threads: int) -> dict[str, str]:
    """Return variables that must be set before torch is imported; those that the operator set stay."""
    ours = {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)} if threads else WORKER_ENVIRONMENT
    return {name: os.environ.get(name, value) for name, value in ours.items()}


NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives to every node."""

IDENTIFY_S = 5.0
"""Time for a worker of an earlier control plane to report its identity. A frozen one does not."""

KILL_S = 2.0
"""Longest time from SIGKILL to the end of the process, which usually takes milliseconds."""


def _nothing() -> None:
    pass


@dataclass(slots=True)
class _RayActor:
    handle: Any
    watcher: asyncio.Task[None] | None = None
    process: psutil.Process | None = None
    """Process of a worker on our own host. psutil knows when it was created, so a later owner of the pid is
    never signalled."""
    release: Callable[[], None] = _nothing
    """Gives back what was reserved for the worker's stages."""


OnExit = Callable[[WorkerId, BaseException | str], None]


class RayReplicas:
    """Worker processes as detached Ray actors, one process each. They outlive this process, and the next
    control plane adopts them.

    `actor_class(spec)` has the async methods `identity() -> WorkerIdentity`, `serve() -> reason`, which runs
    for the life of the worker, and `drain()`. `on_exit(worker_id, reason)` is called once per worker, when
    the process has ended or could not be started.
    """

    def __init__(
        self, actor_class: type, *, config: Config, home: RayCluster, is_local: bool, on_exit: OnExit
    ) -> None:
        """`is_local`: all of Ray runs on this machine, for this cluster alone."""
        self._actor_class, self._on_exit = actor_class, on_exit
        self._configs = each_model(config)
        self._rank_counts = [
            shape.rank_count for one in self._configs.values() for _, shape in worker_shapes(one)
        ]
        self._home, self.is_local = home, is_local
        self._groups = StageGroups(home)
        self._replicas: dict[WorkerId, _RayActor] = {}

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Workers that run, start or have not ended yet."""
        return tuple(self._replicas)

    def start(self, spec: WorkerSpec, *, threads: int, avoid: Sequence[str] = ()) -> None:
        """Start a worker without waiting. The directory or `on_exit` reports the result. `threads` are those
        of one rank. The ranks of one stage are on one node. On a Ray cluster other stages are on others if no
        node has room for all. All ranks are placed, or none is. `avoid` lists nodes."""
        options: dict[str, Any] = {
            "name": spec.worker_id,
            "namespace": namespace_of(spec.control_address),
            "lifetime": "detached",
            "num_cpus": 0 if self.is_local else max(1, threads) * spec.rank_count,
            "num_gpus": self._gpus(self._configs[spec.model], spec.rank_count),
            "max_restarts": 0,  # the reconciler decides on restarts
            "max_task_retries": 0,
            # Calls of killed control planes keep waiting for the worker's end.
            "max_concurrency": 1000,
            "runtime_env": {"env_vars": worker_environment(threads)},
        }
        options |= self._placement(self._configs[spec.model].cluster, spec.role, avoid)
        release = _nothing
        if spec.stage_count > 1 and not self.is_local:
            options |= self._stages(spec, options)
            release = self._release(spec.control_address, spec.worker_id)
        handle = self._home.ray.remote(self._actor_class).options(**options).remote(spec)
        self._follow(spec.worker_id, handle, release)

    def _stages(self, spec: WorkerSpec, options: dict[str, Any]) -> dict[str, Any]:
        """Reserve a place for each stage. `options` are those of one actor with all ranks."""
        place = StageNeeds(
            cpus=options["num_cpus"] / spec.stage_count,
            gpus=options["num_gpus"] / spec.stage_count,
            resources=options["resources"],
            labels=options.pop("label_selector", {}),
        )
        namespace = namespace_of(spec.control_address)
        return self._groups.reserve(namespace, spec.worker_id, [place] * spec.stage_count)

    def _release(self, control_address: str, worker_id: WorkerId) -> Callable[[], None]:
        return lambda: self._groups.release(namespace_of(control_address), worker_id)

    def _follow(self, worker_id: WorkerId, handle: Any, release: Callable[[], None]) -> None:
        replica = self._replicas[worker_id] = _RayActor(handle, release=release)
        replica.watcher = asyncio.create_task(self._watch(worker_id, replica), name=worker_id)

    async def survivors(self, control_address: str) -> list[tuple[WorkerId, WorkerIdentity]]:
        """Return the workers that an earlier control plane at this address started, and follow them from now
        on. A worker that does not answer is killed."""
        namespace = namespace_of(control_address)
        named: list[dict[str, str]] = await asyncio.to_thread(
            self._home.ray.util.list_named_actors, all_namespaces=True
        )
        names = [WorkerId(actor["name"]) for actor in named if actor["namespace"] == namespace]
        found = await asyncio.gather(*(self._identify(name, control_address) for name in names))
        survivors = [survivor for survivor in found if survivor is not None]
        if not self.is_local:
            alive = [worker_id for worker_id, _ in survivors]
            await asyncio.to_thread(self._groups.release_others, namespace, alive)
        return survivors

    async def _identify(
        self, worker_id: WorkerId, control_address: str
    ) -> tuple[WorkerId, WorkerIdentity] | None:
        handle: Any = None
        namespace = namespace_of(control_address)
        try:
            handle = await asyncio.to_thread(self._home.ray.get_actor, worker_id, namespace)
            async with asyncio.timeout(IDENTIFY_S):
                identity: WorkerIdentity = await handle.identity.remote()
        except TimeoutError:
            log.warning("worker %s of an earlier control plane does not answer; killing it", worker_id)
            self._kill_actor(_RayActor(handle))
            return None
        except Exception as error:  # it died since it was listed
            log.info("worker %s of an earlier control plane is gone: %s", worker_id, first_line(error))
            return None
        release = _nothing if self.is_local else self._release(control_address, worker_id)
        self._follow(worker_id, handle, release)
        return worker_id, identity

    def _placement(self, cluster: ClusterConfig, role: Role, avoid: Sequence[str]) -> dict[str, Any]:
        """Return Ray's placement options. Workers spread over several nodes, so that the loss of one node is
        not the loss of a pool."""
        labels = dict(cluster.node_labels.get(role, {}))
        if avoid:
            labels[NODE_LABEL] = f"!in({','.join(avoid)})"
        options: dict[str, Any] = {"resources": dict(cluster.node_resources.get(role, {}))}
        if labels:
            options["label_selector"] = labels
        if not self.is_local:
            options["scheduling_strategy"] = "SPREAD"
        return options

    def _gpus(self, config: Config, rank_count: int) -> float:
        """Return the GPUs that Ray reserves for one worker. It is 0 for "cuda:N", which names a device of the
        machine that Ray must not renumber. With fewer devices than workers, workers share; with none, the
        worker's own error is clearer than Ray's."""
        if config.model.device != "cuda":
            return 0.0
        if not self.is_local:
            return float(rank_count)
        device_count = float(self._home.ray.cluster_resources().get("GPU", 0.0))
        return gpus_of_worker(rank_count, self._rank_counts, device_count)

    async def drain(self, worker_id: WorkerId) -> None:
        """Ask a worker to finish what it holds and end; `on_exit` reports its end."""
        if replica := self._replicas.get(worker_id):
            replica.handle.drain.remote()

    async def kill(self, worker_id: WorkerId) -> None:
        """Kill a worker at once, even if a signal has stopped it. Ray alone would report such a process as
        dead and leave it there."""
        replica = self._replicas.get(worker_id)
        if replica is None:
            return
        _sigkill(replica.process)
        self._kill_actor(replica)

    def _kill_actor(self, replica: _RayActor) -> None:
        if self._home.is_lost:
            return
        try:
            replica.release()
            self._home.ray.kill(replica.handle, no_restart=True)
        except Exception as error:  # an error of Ray must not prevent the restart of a replica
            log.warning("Ray cannot kill an actor: %s", first_line(error))

    async def close(self, *, leaves_workers: bool = False) -> None:
        """Kill the remaining workers, or leave them to the next control plane. Idempotent."""
        if not leaves_workers:
            for worker_id in list(self._replicas):
                await self.kill(worker_id)
        watchers = [r.watcher for r in self._replicas.values() if r.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch(self, worker_id: WorkerId, replica: _RayActor) -> None:
        serving = replica.handle.serve.remote()
        reason: BaseException | str
        try:
            identity: WorkerIdentity = await replica.handle.identity.remote()
            if identity.host == socket.gethostname():
                replica.process = psutil.Process(identity.pid)
            reason = await serving
        except asyncio.CancelledError:
            raise
        except Exception as error:
            reason = _cause(error)
        _sigkill(replica.process)  # Ray may report a process as dead while it still exists
        self._kill_actor(replica)
        await asyncio.to_thread(_wait_gone, replica.process)
        self._replicas.pop(worker_id, None)
        self._on_exit(worker_id, reason)


def _cause(error: Exception) -> BaseException | str:
    """Return the exception of the actor's own code, which Ray wraps together with the actor's traceback, or a
    text which says that the process is gone."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return cause
    name = type(error).__name__
    if "died" in name.lower():
        return "its process died"
    if name == "ActorUnavailableError":  # Ray's first error when a whole node is lost
        return "its process cannot be reached"
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
        log.error("process %d did not end after SIGKILL", process.pid)
