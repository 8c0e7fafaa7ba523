"""Worker processes as Ray actors.

Ray starts, places and ends processes. Requests and KV never pass through it.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.config import Config
from baton.config.served_models import each_model, expert_ranks, worker_shapes
from baton.core.ids import WorkerId
from baton.core.messages import Role
from control_plane.cores import gpus_of_worker
from control_plane.node_choice import Needs, NodeChoice, group_of, selected
from control_plane.ray_cluster import RayCluster, namespace_of
from control_plane.ray_processes import RayProcesses
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
    node: str = ""
    """Ray's id of the node where it runs."""


def worker_environment(threads: int) -> dict[str, str]:
    """Return variables that must be set before torch is imported; those that the operator set stay.

    Actors set them themselves, as the first thing they do. Ray's `runtime_env` would do it too: by an agent
    that has to start before the first actor can, and by an interpreter that imports Ray and then starts the
    actor's, which imports it again.
    """
    ours = {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)} if threads else WORKER_ENVIRONMENT
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def own_environment() -> dict[str, str]:
    """Return the same variables as a worker's process has them, for those that it starts elsewhere."""
    names = (*WORKER_ENVIRONMENT, "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def _nothing() -> None:
    pass


_KIND = "worker"

OnExit = Callable[[WorkerId, BaseException | str], None]


class RayReplicas:
    """Worker processes as detached Ray actors, one process each. They outlive this process, and the next
    control plane adopts them.

    `actor_class(spec, environment)` sets these variables and has the async methods `identity() ->
    WorkerIdentity`, `serve() -> reason`, which runs for the life of the worker, and `drain()`.
    `on_exit(worker_id, reason)` is called once per worker, when the process has ended or could not be
    started.
    """

    def __init__(
        self, actor_class: type, *, config: Config, home: RayCluster, is_local: bool, on_exit: OnExit
    ) -> None:
        """`is_local`: all of Ray runs on this machine, for this cluster alone."""
        self._actor_class = actor_class
        self._configs = each_model(config)
        self._rank_counts = [
            shape.rank_count for one in self._configs.values() for _, shape in worker_shapes(one)
        ]
        self._rank_counts += [
            1 for one in self._configs.values() for _ in range(sum(expert_ranks(one).values()))
        ]
        self._home, self.is_local = home, is_local
        self._groups = StageGroups(home)
        self.choice = NodeChoice()
        """Where workers and whatever else runs on the same nodes go."""
        self._processes: RayProcesses[WorkerId, WorkerIdentity] = RayProcesses(
            home, kind=_KIND, on_exit=on_exit, choice=self.choice
        )

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Workers that run, start or have not ended yet."""
        return self._processes.names

    def start(self, spec: WorkerSpec, *, threads: int, avoid: Sequence[str] = ()) -> None:
        """Start a worker without waiting. The directory or `on_exit` reports the result. `threads` are those
        of one rank. The ranks of one stage are on one node. On a Ray cluster other stages are on others if no
        node has room for all. All ranks are placed, or none is. `avoid` lists nodes."""
        options: dict[str, Any] = {
            "name": spec.worker_id,
            "namespace": namespace_of(spec.control_address),
            "lifetime": "detached",
            "num_cpus": 0 if self.is_local else max(1, threads) * spec.rank_count,
            "num_gpus": self.gpus_of(self._configs[spec.model], spec.rank_count),
            "max_restarts": 0,  # the reconciler decides on restarts
            "max_task_retries": 0,
            # Calls of killed control planes keep waiting for the worker's end.
            "max_concurrency": 1000,
        }
        cluster = self._configs[spec.model].cluster
        options["resources"] = dict(cluster.node_resources.get(spec.role, {}))
        labels = dict(cluster.node_labels.get(spec.role, {}))
        release = _nothing
        if self.is_local:
            options |= selected(labels, avoid)
        elif spec.stage_count == 1:
            options |= self._node(spec, options, labels, avoid)
        else:
            options |= self._stages(spec, options, labels, avoid)
            release = self._release(spec.control_address, spec.worker_id)
        make = self._home.ray.remote(self._actor_class).options(**options).remote
        handle = make(spec, worker_environment(threads))
        self._processes.follow(spec.worker_id, handle, release)

    def _node(
        self, spec: WorkerSpec, options: dict[str, Any], labels: dict[str, str], avoid: Sequence[str]
    ) -> dict[str, Any]:
        """Choose a node for a worker that is on one."""
        amounts = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
        group = group_of(_KIND, spec.model, spec.role)
        return self.choice.options(spec.worker_id, group, Needs(amounts, labels), avoid=avoid)

    def _stages(
        self, spec: WorkerSpec, options: dict[str, Any], labels: dict[str, str], avoid: Sequence[str]
    ) -> dict[str, Any]:
        """Reserve a place for each stage. `options` are those of one actor with all ranks."""
        place = StageNeeds(
            cpus=options["num_cpus"] / spec.stage_count,
            gpus=options["num_gpus"] / spec.stage_count,
            resources=options["resources"],
            labels=selected(labels, avoid).get("label_selector", {}),
        )
        namespace = namespace_of(spec.control_address)
        return self._groups.reserve(namespace, spec.worker_id, [place] * spec.stage_count)

    def _release(self, control_address: str, worker_id: WorkerId) -> Callable[[], None]:
        return lambda: self._groups.release(namespace_of(control_address), worker_id)

    async def identity(self, worker_id: WorkerId, *, timeout_s: float) -> WorkerIdentity | None:
        """Return the identity of a worker that has been started, or None if it does not report it in time."""
        return await self._processes.identity(worker_id, timeout_s=timeout_s)

    async def survivors(self, control_address: str) -> list[tuple[WorkerId, WorkerIdentity]]:
        """Return the workers that an earlier control plane at this address started, and follow them from now
        on. A worker that does not answer is killed."""
        namespace = namespace_of(control_address)

        def release(worker_id: WorkerId) -> Callable[[], None]:
            return _nothing if self.is_local else self._release(control_address, worker_id)

        survivors = await self._processes.survivors(namespace, WorkerId, release)
        if not self.is_local:
            alive = [worker_id for worker_id, _ in survivors]
            await asyncio.to_thread(self._groups.release_others, namespace, alive)
        return survivors

    def gpus_of(self, config: Config, rank_count: int) -> float:
        """Return the GPUs that Ray reserves for one worker. It is 0 for "cuda:N", which names a device of the
        machine that Ray must not renumber. With fewer devices than workers, workers share; with none, the
        worker's own error is clearer than Ray's."""
        if config.model.device != "cuda":
            return 0.0
        if not self.is_local:
            return float(rank_count)
        device_count = float(self._home.ray.cluster_resources().get("GPU", 0.0))
        return gpus_of_worker(rank_count, self._rank_counts, device_count)

    def switched(self, worker_id: WorkerId, model: str, role: Role) -> None:
        """Note that a worker belongs to another pool now, so that others of that pool go elsewhere."""
        self.choice.regroup(worker_id, group_of(_KIND, model, role))

    async def drain(self, worker_id: WorkerId) -> None:
        """Ask a worker to finish what it holds and end; `on_exit` reports its end."""
        if (handle := self._processes.handle(worker_id)) is not None:
            handle.drain.remote()

    async def kill(self, worker_id: WorkerId) -> None:
        """Kill a worker at once, even if a signal has stopped it."""
        await self._processes.kill(worker_id)

    async def close(self, *, leaves_workers: bool = False) -> None:
        """Kill the remaining workers, or leave them to the next control plane. Idempotent."""
        await self._processes.close(leaves_them=leaves_workers)
