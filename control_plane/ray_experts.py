"""Expert ranks as Ray actors, beside the workers' own."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.core.ids import ExpertRankId
from baton.core.messages import Role
from control_plane.node_choice import NODE_LABEL, Needs, group_of, selected
from control_plane.ray_cluster import RayCluster, namespace_of
from control_plane.ray_ops import RayReplicas, worker_environment
from control_plane.ray_processes import RayProcesses
from control_plane.workers import ExpertRankPlace


class ExpertRankSpec(msgspec.Struct, frozen=True):
    """All that the process of an expert rank needs to know."""

    rank_id: ExpertRankId
    group: str
    model: str
    role: Role
    control_address: str
    config: dict[str, Any]
    """The result of `Config.model_dump()`."""
    ranks: int
    """Ranks that divide the experts."""
    threads: int
    cores: tuple[int, ...] = ()
    """Cores to run on; empty: any."""


class ExpertRankIdentity(msgspec.Struct, frozen=True):
    """The identity that the process of an expert rank reports."""

    host: str
    pid: int
    model: str
    role: Role
    node: str = ""
    """Ray's id of the node where it runs."""


OnExit = Callable[[ExpertRankId, BaseException | str], None]
_KIND = "expert rank"


class RayExpertRanks:
    """Expert ranks as detached actors, one process each. `actor_class(spec, environment)` sets these
    variables and has the async methods `identity() -> ExpertRankIdentity` and `serve() -> reason`."""

    def __init__(
        self, actor_class: type, *, workers: RayReplicas, home: RayCluster, is_local: bool, on_exit: OnExit
    ) -> None:
        self._actor_class, self._workers = actor_class, workers
        self._home, self._is_local = home, is_local
        self._processes: RayProcesses[ExpertRankId, ExpertRankIdentity] = RayProcesses(
            home, kind=_KIND, on_exit=on_exit, choice=workers.choice
        )
        self._choice = workers.choice

    @property
    def rank_ids(self) -> tuple[ExpertRankId, ...]:
        """Ranks that run, start or have not ended yet."""
        return self._processes.names

    def start(
        self, spec: ExpertRankSpec, place: ExpertRankPlace, *, node: str = "", avoid: Sequence[str] = ()
    ) -> None:
        """Start a rank without waiting: on `node` if it is given, and never on those of `avoid`."""
        cluster = place.config.cluster
        is_apart = place.beside is None and not self._is_local
        labels = dict(cluster.node_labels.get(spec.role, {}))
        if is_apart:
            labels = dict(cluster.node_labels.get("experts", labels))
        options: dict[str, Any] = {
            "name": spec.rank_id,
            "namespace": _namespace(spec.control_address),
            "lifetime": "detached",
            "num_cpus": max(1, spec.threads) if is_apart else 0,
            "num_gpus": self._workers.gpus_of(place.config, 1),
            "max_restarts": 0,
            "max_task_retries": 0,
            # Calls of killed control planes keep waiting for the rank's end.
            "max_concurrency": 1000,
        }
        group = group_of(_KIND, spec.model, spec.role)
        needs = Needs({"CPU": options["num_cpus"], "GPU": options["num_gpus"]}, labels)
        if node and node not in avoid:
            options["label_selector"] = {**labels, NODE_LABEL: f"in({node})"}
            self._choice.found(spec.rank_id, group, node, needs)
        elif not self._is_local:
            options |= self._choice.options(spec.rank_id, group, needs, avoid=avoid)
        else:
            options |= selected(labels, avoid)
        make = self._home.ray.remote(self._actor_class).options(**options).remote
        handle = make(spec, worker_environment(spec.threads))
        self._processes.follow(spec.rank_id, handle)

    async def survivors(self, control_address: str) -> list[tuple[ExpertRankId, ExpertRankIdentity]]:
        """Return the ranks that an earlier control plane at this address started, and follow them from now
        on. A rank that does not answer is killed."""
        return await self._processes.survivors(
            _namespace(control_address), ExpertRankId, lambda _: _reserves_nothing
        )

    async def kill(self, rank_id: ExpertRankId) -> None:
        """Kill a rank at once, even if a signal has stopped it."""
        await self._processes.kill(rank_id)

    async def close(self, *, leaves_ranks: bool = False) -> None:
        """Kill the remaining ranks, or leave them to the next control plane. Idempotent."""
        await self._processes.close(leaves_them=leaves_ranks)


def _reserves_nothing() -> None:
    pass


def _namespace(control_address: str) -> str:
    """Ranks are in another namespace than workers, since whatever is in that of workers is adopted as one."""
    return f"{namespace_of(control_address)} experts"
