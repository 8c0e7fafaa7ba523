"""The specification of each worker process, and where it runs."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil

from baton.config import ClusterConfig, Config
from baton.config.served_models import (
    apart_expert_ranks,
    device_ranks,
    each_model,
    rank_count,
    served_name,
)
from baton.core.errors import SetupError
from baton.core.ids import ExpertRankId, WorkerId, replica_name
from baton.core.messages import Role
from baton.core.operate import Pool, Version
from baton.core.shape import Shape
from baton.wire.client import set_worker_role
from baton.wire.link import LinkBroken
from control_plane.cores import RankNumbers, thread_count, worker_cores
from control_plane.ray_ops import RayReplicas, WorkerSpec
from control_plane.reconcile_events import StartReplica
from engine.model_files.check import check_gpus, check_shapes, cores_note

log = logging.getLogger(__name__)

SWITCH_ATTEMPTS, SWITCH_RETRY_S = 4, 0.5

Overlay = Callable[[Config, Sequence[str]], Config]
"""Function that returns a configuration with SECTION.FIELD=VALUE texts applied. Raises SetupError."""


OF_ROLES = ("cluster.shapes", *(f"cluster.{role}_workers" for role in Role))
"""Settings that may name shapes of single roles."""


def first_pools(config: Config) -> list[Pool]:
    """Return the pools that the configuration wants, one per model."""
    return [_pool(name, one.cluster) for name, one in each_model(config).items()]


def _pool(model: str, cluster: ClusterConfig) -> Pool:
    counts = {
        Role.PREFILL: cluster.prefill_workers,
        Role.DECODE: cluster.decode_workers,
        Role.AGGREGATED: cluster.aggregated_workers,
    }
    return Pool(model, {role: count for role, count in counts.items() if count})


class ExpertRankPlace(NamedTuple):
    """Where an expert rank runs."""

    config: Config
    cores: tuple[int, ...]
    threads: int
    beside: WorkerId | None = None
    """The worker whose node and cores it shares; None: it has its own."""


class StartedWorker(NamedTuple):
    """A worker process as it was started."""

    worker_id: WorkerId
    model: str
    role: Role
    cores: tuple[int, ...]
    threads: int


class RayWorkers:
    """The implementation of `plane.Replicas` with Ray."""

    def __init__(self, ray: RayReplicas, config: Config, *, overlay: Overlay) -> None:
        self._ray, self._config, self._overlay = ray, config, overlay
        self._configs = each_model(config)
        self._started = dict(self._configs)
        """The configuration of the newest version of each model that a worker was started with."""
        self.control_address = ""
        self._numbers = RankNumbers()
        self._workers: dict[str, StartedWorker] = {}
        """The last process of each replica."""
        self.apart: Callable[[], Sequence[ExpertRankId]] = tuple
        """Returns the processes of expert ranks that have cores of their own."""

    def check(self, pool: Pool) -> str:
        """Return what should be known about the pool's version before its workers start, or an empty text.
        Raises SetupError if it cannot be made of the model's configuration, or asks for more GPUs than there
        are."""
        config = self._config_of(pool.model, pool.version)
        if (name := served_name(config)) != pool.model:
            raise SetupError(f"this version would be served as {name}: set model.name={pool.model} too")
        check_shapes(config)
        check_expert_version(self._configs[pool.model], config)
        if not self._ray.is_local:
            return ""
        counts = {f"{role}_workers": pool.count(role) for role in Role}
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update=counts)})
        models = {**self._started, pool.model: config}
        check_gpus(models.values())
        return cores_note(models.values(), len(usable_cores())) or ""

    def start(self, start: StartReplica) -> None:
        whole = self._started[start.model] = self._config_of(start.model, start.version)
        config = whole.of_role(start.role)
        shape, name = Shape.parse(config.engine.shape), replica_name(start.worker_id)
        asked = self._configs[start.model].engine.threads
        share, threads = self._share(name, shape.rank_count, asked)
        self._workers[name] = StartedWorker(start.worker_id, start.model, start.role, share, threads)
        spec = WorkerSpec(
            worker_id=start.worker_id,
            role=start.role,
            control_address=self.control_address,
            config=config.model_dump(),
            cores=share,
            version=start.version.name,
            model=start.model,
            rank_count=shape.rank_count,
            stage_count=shape.pipeline,
        )
        self._ray.start(spec, threads=threads, avoid=start.avoid)

    def _share(self, name: str, ranks: int, asked: int) -> tuple[tuple[int, ...], int]:
        """Return the cores of a process with so many ranks, and the threads of one rank."""
        cores = usable_cores()
        in_all = sum(rank_count(one) + apart_expert_ranks(one) for one in self._started.values())
        present = {replica_name(worker_id) for worker_id in self._ray.worker_ids}
        present |= {replica_name(WorkerId(rank_id)) for rank_id in self.apart()}
        first = self._numbers.first(name, ranks, present=present)
        share = worker_cores(first, ranks, in_all, cores) if self._ray.is_local and in_all else ()
        return share, thread_count(share, in_all, len(cores), asked, rank_count=ranks)

    def beside(self, model: str, role: Role) -> list[StartedWorker]:
        """Return the workers of a pool that have a process, by the role that it was started in."""
        alive = set(self._ray.worker_ids)
        found = [one for _, one in sorted(self._workers.items()) if one.worker_id in alive]
        return [one for one in found if (one.model, one.role) == (model, role)]

    def adopted(self, worker_id: WorkerId, model: str, role: Role) -> None:
        """Count a worker of an earlier control plane, in its present role."""
        if model in self._started:
            engine, name = self._started[model].of_role(role).engine, replica_name(worker_id)
            share, threads = self._share(name, Shape.parse(engine.shape).rank_count, engine.threads)
            self._workers[name] = StartedWorker(worker_id, model, role, share, threads)

    def expert_rank(self, rank_id: ExpertRankId, number: int, model: str, role: Role) -> ExpertRankPlace:
        """Return where an expert rank runs, and with which configuration. A rank beside workers has the cores
        of one of them; `number` says of which."""
        whole = self._started[model]
        config, experts = whole.of_role(role), whole.experts
        beside = self.beside(model, role) if experts.parallel == "workers" else []
        if not beside:
            cores, threads = self._share(replica_name(WorkerId(rank_id)), 1, experts.threads)
            return ExpertRankPlace(config, cores, threads)
        worker = beside[number % len(beside)]
        threads = experts.threads or worker.threads or 1
        return ExpertRankPlace(config, worker.cores, threads, beside=worker.worker_id)

    async def node_of(self, worker_id: WorkerId, *, timeout_s: float) -> str:
        """Return the node of a worker; empty if it has not started in time."""
        identity = await self._ray.identity(worker_id, timeout_s=timeout_s)
        return identity.node if identity is not None else ""

    def _config_of(self, model: str, version: Version) -> Config:
        """A version that names `engine.shape` means the workers of every role, whatever shapes the roles were
        started with. Raises SetupError."""
        config = self._overlay(self._configs[model], version.sets)
        names = {one.partition("=")[0].strip() for one in version.sets}
        if "engine.shape" not in names or any(name.startswith(OF_ROLES) for name in names):
            return config
        return config.model_copy(update={"cluster": config.cluster.model_copy(update={"shapes": {}})})

    def ranks_of(self, pool: Pool) -> dict[Role, int]:
        """Return the ranks of one worker of each role, in the version that the pool wants now. Raises
        SetupError."""
        config = self._config_of(pool.model, pool.version)
        return {role: device_ranks(config, role) for role in Role}

    async def switch_role(self, worker_id: WorkerId, role: Role, address: str) -> None:
        """Tell a worker its new role. If it cannot be reached, the reconciler's timeout ends it."""
        drain_s = self._config.cluster.drain_timeout_s
        for attempt in range(SWITCH_ATTEMPTS):
            try:
                await set_worker_role(address, role, drain_s=drain_s)
                break
            except LinkBroken as error:
                log.warning("worker %s cannot be told to switch to %s: %s", worker_id, role, error)
                await asyncio.sleep(SWITCH_RETRY_S * 2**attempt)
        if (started := self._workers.get(replica_name(worker_id))) is not None:
            self._ray.switched(worker_id, started.model, role)

    async def drain(self, worker_id: WorkerId) -> None:
        await self._ray.drain(worker_id)

    async def kill(self, worker_id: WorkerId) -> None:
        await self._ray.kill(worker_id)


def check_expert_version(before: Config, after: Config) -> None:
    """Raises SetupError for a version that expert ranks, which go on as they are, would not agree with."""
    if before.experts.parallel == after.experts.parallel == "off":
        return
    if (before.model, before.experts) != (after.model, after.experts):
        raise SetupError(
            "the experts of this model are on expert ranks, which hold those of one version: a rollout may "
            "not change settings of model or experts; start the cluster anew with them"
        )


def usable_cores() -> list[int]:
    """Return the cores of this machine that this process may use."""
    return psutil.Process().cpu_affinity() or list(range(psutil.cpu_count() or 1))
