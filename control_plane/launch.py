"""A whole cluster from one command: checks, Ray, control plane, workers, routers, and the orderly end of all.

This process decides nothing. It keeps Ray, the control plane, the routers and this host's store node as
children, so that each of them may die and come back alone, and all of them end with it.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence

import psutil

from baton.config import Config
from baton.config.operators import DashboardConfig
from baton.config.served_models import about, each_model, expert_ranks, lone_expert_ranks, worker_count
from baton.core.errors import PlatformLost, SetupError
from baton.core.experts import group_name, lone_rank_text
from baton.core.messages import Role
from baton.wire.address import host_port, reachable_host
from baton.wire.background import Background
from control_plane.child import child_environment
from control_plane.control_child import ControlChild
from control_plane.orphans import OrphanWatch, adopt_orphans
from control_plane.plane import restart_policy
from control_plane.ray_cluster import RayCluster
from control_plane.ray_watch import RayWatch
from control_plane.reaper import Reaper
from control_plane.router_child import RouterChildren, reserved_address, reserved_port
from control_plane.runtime_folder import RuntimeFolder
from control_plane.scaling import live_settings
from control_plane.shutdown import Shutdown
from control_plane.store_child import LocalStore, StoreCommand, check_store
from control_plane.workers import usable_cores
from engine.model_files.check import (
    check_gpus,
    check_machine,
    check_memory,
    check_model,
    check_shapes,
    check_tokenizer,
    cores_note,
)
from engine.model_files.check_experts import check_expert_settings, check_experts
from engine.model_files.resolve import check_available, local_folder
from engine.native.build import is_anything_built
from kv_store.directory.redis_url import parse_redis_url

log = logging.getLogger(__name__)

LAST_PROCESSES_S = 3.0
"""Time for Ray's processes to end by themselves after its shutdown."""

CONTROL_END_S = 10.0
"""Time for the control plane to end its workers and itself. They hold no requests by then."""

CONTROL_FAILS_S = 60.0
"""The same time for a control plane that failed to start and ends by itself: Ray may still be starting the
processes that it ends."""

ROUTER_END_S = 5.0
"""Time for the router to end after its own drain, which has the same limit as ours."""

ControlCommand = Callable[[bool], Sequence[str]]
"""Function that returns the argv of a control plane. Its argument says whether Ray runs on this machine for
this cluster alone."""

RouterCommand = Callable[[str], Sequence[str]]
"""Function from the address of the directory to the argv of a router."""


def check_setup(config: Config, *, with_router: bool) -> None:
    """Check all that can be known before anything is started. Raises SetupError."""
    cluster, models = config.cluster, each_model(config)
    if worker_count(config) == 0:
        raise SetupError("the cluster has no workers: set --prefill, --decode or --aggregated")
    if config.autoscale.mode != "off":
        live_settings(config)
    check_expert_settings(config)
    for name, one in models.items():
        with about(config, name):
            _check_model(one, with_router=with_router)
        for role in lone_expert_ranks(one):
            log.warning("%s", lone_rank_text(group_name(name, role), one.experts.parallel))
    if not cluster.ray_address:
        check_memory(models.values())
        check_gpus(models.values())
        if (note := cores_note(models.values(), len(usable_cores()))) is not None:
            log.warning("%s", note)
    if config.store.host_bytes and not config.store.socket:
        check_store(config.store)
    if config.store.directory:
        parse_redis_url(config.store.directory)
    for host, port, setting in _ports(config, with_router=with_router):
        _check_port(host, port, setting=setting)


def check_hub(config: Config, *, with_router: bool) -> None:
    """Check that models without a folder here can be downloaded, if a process of this machine will do it.
    Raises SetupError."""
    if config.cluster.ray_address and not with_router:
        return
    for name, one in each_model(config).items():
        with about(config, name):
            if local_folder(one.model.path) is None:
                check_available(one.model.path, one.model.revision)


def _ports(config: Config, *, with_router: bool) -> Iterator[tuple[str, int, str]]:
    """Hosts and ports that processes on this machine will listen on, with the setting of each."""
    cluster, router, store = config.cluster, config.router, config.store
    yield cluster.control_host, cluster.control_port, "cluster.control_port"
    yield cluster.control_host, cluster.control_metrics_port, "cluster.control_metrics_port"
    if with_router:
        yield router.host, router.port, "--port"
        yield cluster.worker_host, router.peer_port, "router.peer_port"
    if not cluster.ray_address:
        yield cluster.worker_host, cluster.worker_port, "cluster.worker_port"
        yield cluster.worker_host, cluster.worker_metrics_port, "cluster.worker_metrics_port"
    if store.host_bytes and not store.socket:
        yield cluster.worker_host, store.port, "store.port"
        yield cluster.worker_host, store.metrics_port, "store.metrics_port"


def _check_model(config: Config, *, with_router: bool) -> None:
    """Check one of the served models. Raises SetupError."""
    folder = local_folder(config.model.path)
    check_shapes(config)
    check_experts(config, folder)
    if folder is not None:
        check_model(folder, config.model, config.engine)
        if with_router:
            check_tokenizer(folder)
    if not config.cluster.ray_address:
        check_machine(config.model, config.engine, worker_count=worker_count(config))


def _has_chat_template(path: str) -> bool:
    """Return whether the model in this folder has a chat template. False for a hub id, whose files are not
    known here."""
    folder = local_folder(path)
    if folder is None:
        return False
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in config.read_text(encoding="utf-8")


def _pools_text(config: Config) -> str:
    cluster = config.cluster
    counts = (cluster.prefill_workers, cluster.decode_workers, cluster.aggregated_workers)
    shapes = (config.shape_of(role) for role in Role)
    ranks = sum(expert_ranks(config).values())
    return ("" if not ranks else f"{ranks} expert ranks, ") + ", ".join(
        f"{n} {role}" if shape.is_single or not n else f"{n} {role} of shape {shape}"
        for n, role, shape in zip(counts, Role, shapes, strict=True)
    )


def _check_port(host: str, port: int, *, setting: str) -> None:
    if port == 0:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise SetupError(f"cannot listen on {host}:{port}: {reason} (choose another {setting})") from None


def _must_be_ready(ready: asyncio.Task[None]) -> None:
    try:
        ready.result()
    except TimeoutError:
        raise SetupError(
            "the router did not reach all workers in time: see the lines above, "
            "or raise cluster.start_timeout_s"
        ) from None


async def run_cluster(
    config: Config,
    *,
    control_command: ControlCommand,
    router_command: RouterCommand | None,
    announce: Callable[[str], None],
    store_command: StoreCommand | None = None,
    shutdown: Shutdown | None = None,
) -> None:
    """Run a cluster until a signal (or `shutdown`) stops it, and leave no process behind.

    `router_command` None starts workers and directory only. `store_command` None starts no store node.
    `announce` gets the one ready text.

    Raises SetupError, before the ready text, for what the operator must change. Raises PlatformLost if the
    Ray that was started here dies, after which the caller should `os._exit`, since Ray's own clean-up would
    hang.
    """
    check_setup(config, with_router=router_command is not None)
    check_hub(config, with_router=router_command is not None)
    shutdown = shutdown or Shutdown()
    with shutdown.on_signals():
        folder = RuntimeFolder()
        reaper = Reaper(folder.path)  # before Ray and all others are started
        store = LocalStore(config, store_command, folder)
        cluster = _ClusterProcesses(store, folder, control_command, router_command, shutdown)
        try:
            if await cluster.start():
                cluster.log_addresses()
                announce(cluster.ready_text())
                cluster.announce_late_dashboard(announce)
                await cluster.until_asked_to_stop()
                await cluster.drain()
        finally:
            await cluster.close(spared=reaper.pid)
            folder.remove()
            reaper.close()


class _ClusterProcesses:
    def __init__(
        self,
        store: LocalStore,
        folder: RuntimeFolder,
        control_command: ControlCommand,
        router_command: RouterCommand | None,
        shutdown: Shutdown,
    ) -> None:
        config = store.config
        self._config, self._shutdown = config, shutdown
        self._control_command, self._router_command = control_command, router_command
        self._store, self._folder = store, folder
        self._background = Background(self._broke)
        self._ray = RayCluster(config.cluster.ray_address)
        self._control: ControlChild | None = None
        self._control_port: socket.socket | None = None
        self._address = ""
        """Address of the control plane, which stays the same when it restarts."""
        self._router: RouterChildren | None = None
        self._router_port: socket.socket | None = None
        self._ray_watch = RayWatch(self._ray_died)
        self._crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nobody awaits the future once the cluster is ending, so its exception is marked as retrieved.
        self._crash.add_done_callback(lambda crash: crash.cancelled() or crash.exception())

    async def start(self) -> bool:
        """Start all processes. False: a signal came before everything was ready. Routers and store node come
        first: they start while Ray does, and wait for the control plane at an address that is known before it
        runs. The control plane loads its libraries while Ray starts."""
        cluster = self._config.cluster
        self._control_port = reserved_address(cluster.control_host, cluster.control_port)
        port = self._control_port.getsockname()[1]
        self._address = host_port(reachable_host(cluster.control_host), port)
        self._folder.write_address(self._address)
        if (node := self._store.start(self._address)) is not None:
            self._background.spawn(node.run())
        if self._router_command is not None:
            self._start_router(self._router_command(self._address))
        if self._ray.is_ours:
            self._announce_compilation()
            adopt_orphans()
            self._ray.prepare()
        control = self._start_control(port)
        if self._ray.is_ours:
            log.debug("Ray is starting")
            await self._ray.open()
            self._ray_watch.start()
        control.tell_ray(self._ray.address if self._ray.is_ours else cluster.ray_address)
        self._background.spawn(OrphanWatch().run())
        if self._router is not None:
            self._router.check()
        return await self._until_ready(control)

    def _announce_compilation(self) -> None:
        model, kernels = self._config.model, self._config.engine.kernels
        if model.device == "cpu" and kernels in ("auto", "native") and not is_anything_built():
            log.info("kernels for this processor are compiled, once, which takes up to a minute")

    def _start_control(self, port: int) -> ControlChild:
        cluster = self._config.cluster
        changes = {
            "control_port": port,
            "record": cluster.record or str(self._folder.record),
            "keep_workers": False,
        }
        config = self._config.model_copy(
            update={"cluster": cluster.model_copy(update=changes), "dashboard": self._dashboard_config()}
        )
        self._control = ControlChild(
            self._control_command(self._ray.is_ours),
            environment={**child_environment(config), **self._ray.key()},
            policy=restart_policy(cluster),
            silence_s=cluster.router_silence_s,
        )
        self._background.spawn(self._control.run())
        return self._control

    def _dashboard_config(self) -> DashboardConfig:
        """Return the dashboard configuration, with files in our folder for what must survive a restart of
        it."""
        config = self._config
        places = {"sessions_file": config.dashboard.sessions_file or str(self._folder.dashboard_sessions)}
        if not config.access.tokens and not config.dashboard.token_file:
            places["token_file"] = str(self._folder.dashboard_token)
        return config.dashboard.model_copy(update=places)

    def log_addresses(self) -> None:
        assert self._control is not None
        metrics = self._control.ready.result().split()[-1]
        log.info("control plane at %s, metrics at http://%s/metrics", self._address, metrics)

    def _start_router(self, argv: Sequence[str]) -> None:
        config, count = self._config, self._config.router.processes
        if count > 1:
            self._router_port = reserved_port(config.router)
            port = self._router_port.getsockname()[1]
            router = config.router.model_copy(update={"port": port, "share_port": True})
            config = config.model_copy(update={"router": router})
        self._router = RouterChildren(
            argv,
            count=count,
            environment=child_environment(config),
            policy=restart_policy(self._config.cluster),
            silence_s=self._config.cluster.router_silence_s,
        )
        self._background.spawn(self._router.run())

    async def _until_ready(self, control: ControlChild) -> bool:
        """Wait until everything is ready. Raises the error that prevents it."""
        ready = asyncio.create_task(self._all_ready(control))
        stop = asyncio.create_task(self._shutdown.asked.wait())
        try:
            await asyncio.wait(
                {ready, stop, control.failed, self._crash}, return_when=asyncio.FIRST_COMPLETED
            )
            if control.failed.done():
                raise control.failed.result()
            if self._crash.done():
                self._crash.result()
            if ready.done():
                _must_be_ready(ready)
            return ready.done() and not stop.done()
        finally:
            for task in (ready, stop):
                task.cancel()
            await asyncio.gather(ready, stop, return_exceptions=True)

    async def _all_ready(self, control: ControlChild) -> None:
        """Wait for all children. Raises the SetupError of a child."""
        if self._router is not None:
            await self._router.until_started()
        await self._store.until_ready()
        await control.settled.wait()
        if self._router is not None:
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                await self._router.until_connected(worker_count(self._config))

    async def until_asked_to_stop(self) -> None:
        """Wait for a signal. Raises the error that breaks this process itself."""
        asked = asyncio.create_task(self._shutdown.asked.wait())
        await asyncio.wait({asked, self._crash}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if self._crash.done():
            self._crash.result()

    def ready_text(self) -> str:
        models = each_model(self._config)
        served = " and ".join(f"{name} on {_pools_text(one)}" for name, one in models.items())
        served += f", {self._store.text()}"
        if self._router is None:
            return f"Baton is ready: {served}; directory at {self._address}{self._dashboard_text()}"
        url = self._router.url
        command = "\n  ".join(self._example(url, name, one) for name, one in models.items())
        return f"Baton is ready: {url} serves {served}. Try:\n  {command}{self._pages_text(url)}"

    def _example(self, url: str, model: str, config: Config) -> str:
        path, ask, curl = "completions", '"prompt": "Once upon a time", "max_tokens": 32', "curl"
        if _has_chat_template(config.model.path):
            path, curl = "chat/completions", "curl -N"
            ask = '"messages": [{"role": "user", "content": "What is a KV cache?"}]'
            ask = f'"stream": true, "temperature": 0, {ask}'
        body = f'{{"model": "{model}", {ask}}}'
        key = " -H 'Authorization: Bearer YOUR_KEY'" if config.router.keys else ""
        return f"{curl} {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"

    def _pages_text(self, url: str) -> str:
        chat = f"\nChat: {url}/" if self._config.router.chat_page else ""
        return chat + self._dashboard_text()

    def _dashboard_text(self) -> str:
        where = self._control.dashboard if self._control is not None else ""
        return f"\nDashboard: {where}" if where else ""

    def announce_late_dashboard(self, announce: Callable[[str], None]) -> None:
        """Announce a dashboard that becomes ready after the ready text, which names only one that is ready in
        time."""
        control = self._control

        async def announce_when_ready() -> None:
            assert control is not None
            await control.has_dashboard.wait()
            announce(self._dashboard_text().strip())

        if control is not None and not control.has_dashboard.is_set():
            self._background.spawn(announce_when_ready())

    async def drain(self) -> None:
        """Drain the router first: it refuses new requests and lets the running ones finish on the workers."""
        timeout_s = self._config.cluster.drain_timeout_s
        log.info("cluster drains for at most %g s; press Ctrl-C again to end it at once", timeout_s)
        stopping = asyncio.create_task(self._stop_children(timeout_s))
        at_once = asyncio.create_task(self._shutdown.now.wait())
        await asyncio.wait({stopping, at_once}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, at_once):
            task.cancel()
        await asyncio.gather(stopping, at_once, return_exceptions=True)

    async def _stop_children(self, timeout_s: float) -> None:
        """Stop routers and then the store node, within one deadline. Routers come first, since streams read
        blocks from the store."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        if self._router is not None:
            await self._router.stop(timeout_s + ROUTER_END_S)
        await self._store.stop(max(0.0, ends_s - loop.time()))

    def _ray_died(self, text: str) -> None:
        """Note that Ray died. No worker can be started any more, and those that run end by themselves."""
        self._ray.is_lost = True
        if self._control is not None:
            self._control.kill()
        self._broke(PlatformLost(text))

    async def close(self, *, spared: int | None) -> None:
        """End everything. `spared` is a child that ends by itself."""
        self._ray_watch.close()
        if self._router is not None:
            self._router.kill()
        self._store.close()
        if self._control is not None:
            fails = self._control.failed.done()
            await self._control.stop(CONTROL_FAILS_S if fails else CONTROL_END_S)
        for port in (self._router_port, self._control_port):
            if port is not None:
                port.close()
        family = psutil.Process().children(recursive=True) if self._ray.is_ours else []
        children = [process for process in family if process.pid != spared]
        if self._ray.is_ours:
            await self._ray.close()
        await self._background.cancel()
        await asyncio.to_thread(_end_all, children)

    def _broke(self, error: BaseException) -> None:
        if not self._crash.done():
            self._crash.set_exception(error)


def _end_all(processes: Sequence[psutil.Process]) -> None:
    """Wait for the processes that outlived Ray's own shutdown, then kill them."""
    _, alive = psutil.wait_procs(processes, LAST_PROCESSES_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            log.warning("process %d (%s) outlived Ray; killing it", process.pid, process.name())
            process.kill()
    psutil.wait_procs(alive, LAST_PROCESSES_S)
