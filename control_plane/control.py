"""The process of the control plane: directory, orders, and workers as Ray actors. It may be killed at any
time: its workers go on, and the next process at the same address adopts them."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from baton.config import ClusterConfig, Config
from baton.config.served_models import each_model, worker_shapes
from baton.core.budgets import Ledger
from baton.core.errors import SetupError
from baton.core.ids import WorkerId
from baton.core.operate import NodeState
from baton.telemetry.exporter import MetricsServer
from baton.wire.address import host_port, is_loopback, reachable_host
from baton.wire.background import Background
from baton.wire.crash import Crash
from baton.wire.server import start_server
from control_plane.dashboard_child import END_S, DashboardChild, DashboardCommand
from control_plane.expert_groups import ExpertGroups
from control_plane.expert_metrics import ExpertMetrics
from control_plane.expert_ranks import StartedExpertRanks
from control_plane.plane import ControlPlane, restart_policy
from control_plane.ray_cluster import RayCluster
from control_plane.ray_experts import RayExpertRanks
from control_plane.ray_ops import RayReplicas
from control_plane.reconcile_events import Adopted
from control_plane.record_file import RecordFile
from control_plane.scaling import AutoscalerRunner, live_settings
from control_plane.shutdown import Shutdown
from control_plane.store_directory import StoreDirectory, check_directory
from control_plane.workers import Overlay, RayWorkers, first_pools

log = logging.getLogger(__name__)

NODES_S = 5.0
"""Time between two reads of Ray's list of nodes."""


class Control:
    """The control plane of one cluster; call `run` once. `ready` gets the gRPC and metrics addresses once
    they serve. `settled` is called when all workers serve for the first time. `failed` gets the text of a
    SetupError at once, while existing workers are still being ended."""

    def __init__(
        self,
        config: Config,
        *,
        actor_class: type,
        expert_actor_class: type,
        overlay: Overlay,
        is_local: bool,
        record: Path | None,
    ) -> None:
        """`config.cluster.ray_address` must be set. `is_local` means that Ray runs on this machine for this
        cluster alone. `record` is the file that keeps orders, or None to keep none."""
        self._config, self._is_local = config, is_local
        self._home = RayCluster(config.cluster.ray_address)
        self._ray = RayReplicas(
            actor_class, config=config, home=self._home, is_local=is_local, on_exit=self._on_exit
        )
        self._workers = RayWorkers(self._ray, config, overlay=overlay)
        self._record = RecordFile(record)
        self._crash = Crash()
        self._background = Background(self._crash.report)
        life = secrets.token_hex(2)
        self._plane = ControlPlane(
            config.cluster,
            life=life,
            replicas=self._workers,
            spawn=self._background.spawn,
            remember=self._record.write,
            check=self._workers.check,
            crash=self._crash,
        )
        self._expert_ranks = RayExpertRanks(
            expert_actor_class,
            workers=self._ray,
            home=self._home,
            is_local=is_local,
            on_exit=self._plane.on_expert_rank_exit,
        )
        self._experts = self._make_experts(life, is_local=is_local)
        self._scaling = AutoscalerRunner(
            live_settings(config),
            self._plane,
            ranks_max=config.autoscale.ranks_max,
            ranks_of=self._workers.ranks_of,
        )
        self._store_directory = StoreDirectory(config.store, meter=self._plane.meter)
        self._expert_metrics = ExpertMetrics(self._plane.meter)
        self._metrics = MetricsServer(render=self._render, health=self._health)
        self._server: grpc.aio.Server | None = None
        self._has_settled = asyncio.Event()
        """All workers have served."""
        self._start_dashboard: Callable[[str], None] = lambda control_address: None
        self._dashboard: DashboardChild | None = None
        self._is_first_life = True
        """Nobody has been told yet that the cluster is ready, so a setup error may end it."""

    def _make_experts(self, life: str, *, is_local: bool) -> ExpertGroups:
        self._workers.apart = lambda: self._expert_ranks.rank_ids
        started = StartedExpertRanks(
            self._expert_ranks, self._workers, spawn=self._background.spawn, is_local=is_local
        )
        started.on_exit = self._plane.on_expert_rank_exit
        experts = self._plane.experts = ExpertGroups(
            each_model(self._config),
            life=life,
            processes=started,
            spawn=self._background.spawn,
            crash=self._crash,
            restart=restart_policy(self._config.cluster),
            on_changed=self._plane.on_experts,
        )
        return experts

    def with_dashboard(self, command: DashboardCommand, *, announce: Callable[[str], None]) -> None:
        """Have `run` start a dashboard; call this before. `announce` gets its URL and how to sign in."""

        def start(control_address: str) -> None:
            self._dashboard = DashboardChild.of(command, self._config, control_address)
            # On the workers' machine it would take the cores that these load their model with. A control
            # plane that is started anew finds workers that serve.
            after = self._has_settled if self._is_local and self._is_first_life else None
            self._background.spawn(self._dashboard.run_beside(announce, after=after))

        self._start_dashboard = start

    async def run(
        self,
        shutdown: Shutdown,
        *,
        ready: Callable[[str], None],
        settled: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """Run until asked to end. Raises SetupError for what the operator must change before workers can
        start."""
        leaves_workers = True  # after a crash the next control plane adopts them
        try:
            ready(await self._start())
            await self._until_stopped(shutdown, settled)
            leaves_workers = self._config.cluster.keep_workers and not shutdown.now.is_set()
        except SetupError as error:
            leaves_workers = False
            failed(str(error))
            raise
        finally:
            await self._close(leaves_workers=leaves_workers)

    async def _start(self) -> str:
        cluster = self._config.cluster
        await check_directory(self._config.store)
        record = self._record.read()
        self._is_first_life = record is None
        await self._home.open()
        nodes = await asyncio.to_thread(self._home.ray.nodes)
        check_reach(cluster, nodes, here=self._home.host)
        self._ray.choice.on_nodes(nodes)
        for note in [] if self._ray.is_local else room_notes(self._config, nodes_of(nodes)):
            log.warning("%s", note)
        self._server, port = await start_server(
            cluster.control_host,
            cluster.control_port,
            directory=self._plane,
            store_directory=None if self._config.store.directory else self._store_directory,
            budgets=Ledger(),
            operate=self._plane,
            demand=self._scaling,
            experts=self._experts,
        )
        address = self._workers.control_address = host_port(reachable_host(cluster.control_host), port)
        await self._metrics.start(cluster.control_host, cluster.control_metrics_port)
        await self._adopt(address)
        self._plane.want(first_pools(self._config), record=record)
        self._background.spawn(self._follow_nodes())
        self._start_dashboard(address)
        if self._scaling.is_on:
            self._background.spawn(self._scaling.run())
        return f"{address} {self._metrics.address}"

    async def _adopt(self, address: str) -> None:
        for worker_id, identity in await self._ray.survivors(address):
            adopted = Adopted(worker_id, identity.model, identity.role, identity.version, identity.age_s)
            self._workers.adopted(worker_id, identity.model, identity.role)
            self._plane.adopt(adopted)
        for rank_id, identity in await self._expert_ranks.survivors(address):
            self._experts.adopt(rank_id, identity.model, identity.role)
        self._experts.begin()

    async def _until_stopped(self, shutdown: Shutdown, settled: Callable[[], None]) -> None:
        asked = asyncio.create_task(shutdown.asked.wait())
        all_there = asyncio.create_task(self._plane.until_settled())
        crashed = asyncio.create_task(self._crash.wait())
        waits: set[asyncio.Future[Any]] = {asked, all_there, crashed}
        if self._is_first_life:  # later, other workers or models may serve already
            waits.add(self._plane.setup_error)
        try:
            while not asked.done():
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if self._crash.error is not None:
                    raise self._crash.error
                if all_there in waits and all_there.done():
                    waits -= {all_there, self._plane.setup_error}
                    self._has_settled.set()
                    settled()  # from now on, workers that cannot start are logged and tried again
                elif self._plane.setup_error in waits and self._plane.setup_error.done():
                    raise SetupError(self._plane.setup_error.result())
        finally:
            for wait in (asked, all_there, crashed):
                wait.cancel()

    async def _follow_nodes(self) -> None:
        while True:
            with contextlib.suppress(ConnectionError, RuntimeError):
                nodes = await asyncio.to_thread(self._home.ray.nodes)
                self._ray.choice.on_nodes(nodes)
                self._plane.on_nodes(nodes_of(nodes))
            await asyncio.sleep(NODES_S)

    async def _close(self, *, leaves_workers: bool) -> None:
        self._plane.close()
        if self._dashboard is not None:
            await self._dashboard.stop(END_S)
        await self._ray.close(leaves_workers=leaves_workers)
        await self._expert_ranks.close(leaves_ranks=leaves_workers)
        await self._background.cancel()
        await self._metrics.close()
        if self._server is not None:
            await self._server.stop(0)
        await self._store_directory.close()
        await self._home.close()
        if not leaves_workers:
            self._record.remove()

    def _render(self) -> bytes:
        self._store_directory.count()
        self._expert_metrics.count(self._plane.state().experts)
        return self._plane.meter.render()

    def _health(self) -> dict[str, object]:
        routers = {r.router_id: r.metrics_address for r in self._plane.book.view.routers}
        return {"status": "ok" if self._plane.reconciler.is_settled else "converging", "routers": routers}

    def _on_exit(self, worker_id: WorkerId, reason: BaseException | str) -> None:
        self._plane.on_exit(worker_id, reason)


def check_reach(cluster: ClusterConfig, listed: list[dict[str, Any]], *, here: str) -> None:
    """Check that workers on Ray's other hosts and the control plane can reach each other. `listed` is
    `ray.nodes()`, `here` our own address in it. Raises SetupError."""
    if cluster.node_labels:
        return  # labels restrict where workers run, in ways unknown here
    settings = {"control_host": cluster.control_host, "worker_host": cluster.worker_host}
    if not (closed := [f"cluster.{name}={host}" for name, host in settings.items() if is_loopback(host)]):
        return
    found = {str(node.get("NodeManagerAddress", "")) for node in listed if node.get("Alive")} - {here}
    if others := sorted(address for address in found if address and not is_loopback(address)):
        raise SetupError(
            f"{' and '.join(closed)} works on one machine only, and Ray has other hosts "
            f"({', '.join(others[:5])}): "
            "name this host's address in cluster.control_host, and set cluster.worker_host=0.0.0.0"
        )


def room_notes(config: Config, nodes: Sequence[NodeState]) -> list[str]:
    """Return a line, with the numbers, for each kind of worker that no node of a Ray cluster has room for. It
    is no error, because a node may join later; the workers wait for one."""
    notes: list[str] = []
    alive = [node for node in nodes if node.is_alive]
    for name, one in each_model(config).items():
        is_cuda = one.model.device == "cuda"
        has = sorted((node.gpus if is_cuda else node.cpus for node in alive), reverse=True)
        for role, shape in dict(worker_shapes(one)).items():
            of_stage = shape.rank_count // shape.pipeline * (1 if is_cuda else max(1, one.engine.threads))
            if shape.is_single or sum(count // of_stage for count in has) >= shape.pipeline:
                continue
            stages = f" for each of {shape.pipeline} stages" if shape.pipeline > 1 else ""
            notes.append(
                f"{role} workers of {name} wait for a node: one of shape {shape} needs {of_stage} "
                f"{'GPUs' if is_cuda else 'CPUs'} of one node{stages}, and the nodes of Ray have "
                f"{', '.join(f'{count:g}' for count in has) or 'none'}"
            )
    return notes


def nodes_of(listed: list[dict[str, Any]]) -> list[NodeState]:
    """Convert `ray.nodes()`. Dead nodes are listed for as long as Ray lists them."""
    states = [
        NodeState(
            node=node["NodeID"],
            host=node.get("NodeManagerHostname", ""),
            is_alive=bool(node.get("Alive")),
            cpus=float(node.get("Resources", {}).get("CPU", 0.0)),
            gpus=float(node.get("Resources", {}).get("GPU", 0.0)),
        )
        for node in listed
    ]
    return sorted(states, key=lambda state: (not state.is_alive, state.node))
