"""A whole cluster from one command: checks, Ray, directory, workers, router; and its orderly end."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

import psutil

from baton.config import Config
from baton.core.budgets import Ledger
from baton.core.errors import PlatformLost, SetupError
from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.engine.model_check import check_machine, check_model, check_tokenizer
from baton.engine.model_files import default_name, local_folder
from baton.telemetry.exporter import MetricsServer
from baton.wire.address import host_port, reachable_host
from baton.wire.server import start_server
from control_plane.child import child_environment
from control_plane.cores import core_share, thread_count
from control_plane.plane import ControlPlane, restart_policy
from control_plane.ray_ops import RayReplicas, WorkerSpec
from control_plane.ray_watch import RayWatch, adopt_orphans
from control_plane.router_child import RouterChildren, reserved_port
from control_plane.store_child import LocalStore, StoreCommand, check_store
from control_plane.store_directory import StoreDirectory, check_directory

log = logging.getLogger(__name__)

LAST_PROCESSES_S = 3.0
"""After Ray's shutdown, for its processes to end by themselves."""

ROUTER_END_S = 5.0
"""For the router to end after its own drain, which has the same limit as ours."""

RouterCommand = Callable[[str], Sequence[str]]
"""The argv of a router that follows the directory at this address."""


def check_setup(config: Config, *, with_router: bool) -> None:
    """Raises SetupError for what can be known before anything is started."""
    cluster = config.cluster
    worker_count = cluster.prefill_workers + cluster.decode_workers + cluster.both_workers
    if worker_count == 0:
        raise SetupError("no workers: ask for some with --prefill, --decode or --both")
    folder = local_folder(config.model.path)
    if folder is not None:
        check_model(folder, config.model, config.engine)
        if with_router:
            check_tokenizer(folder)
    if not cluster.ray_address:
        check_machine(config.model, config.engine, worker_count=worker_count)
    if config.store.host_bytes and not config.store.socket:
        check_store(config.store)
    _check_port(cluster.control_host, cluster.control_port, knob="cluster.control_port")
    _check_port(cluster.control_host, cluster.control_metrics_port, knob="cluster.control_metrics_port")
    if with_router:
        _check_port(config.router.host, config.router.port, knob="--port")


def _has_chat_template(path: str) -> bool:
    """Only of a folder; of a hub id it is not known here."""
    folder = local_folder(path)
    if folder is None:
        return False
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in config.read_text(encoding="utf-8")


def _check_port(host: str, port: int, *, knob: str) -> None:
    if port == 0:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise SetupError(f"cannot listen on {host}:{port}: {reason} (choose another {knob})") from None


def _must_be_ready(ready: asyncio.Task[None]) -> None:
    try:
        ready.result()
    except TimeoutError:
        raise SetupError("the router does not reach all workers: see the lines above") from None


class Shutdown:
    """The first SIGINT or SIGTERM asks for an orderly end, the second for an immediate one."""

    def __init__(self) -> None:
        self.asked, self.now = asyncio.Event(), asyncio.Event()

    def signal(self) -> None:
        if self.asked.is_set():
            self.now.set()
        self.asked.set()

    @contextlib.contextmanager
    def on_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


class _LocalWorkers:
    """`plane.Replicas` by way of Ray: says what each worker process is told and where it runs."""

    def __init__(self, ray: RayReplicas, config: Config) -> None:
        self._ray, self._config = ray, config
        self.control_address = ""
        self._order: dict[str, int] = {}
        """Replica name -> index, for its share of the cores."""

    def start(self, worker_id: WorkerId, role: Role) -> None:
        cluster = self._config.cluster
        cores, count = _cores(), cluster.prefill_workers + cluster.decode_workers + cluster.both_workers
        index = self._order.setdefault(worker_id.rsplit(".", 1)[0], len(self._order))
        share = core_share(index % count, count, cores) if self._ray.is_local else ()
        threads = thread_count(share, count, len(cores), self._config.engine.threads)
        spec = WorkerSpec(
            worker_id=worker_id,
            role=role,
            control_address=self.control_address,
            config=self._config.model_dump(),
            cores=share,
        )
        self._ray.start(spec, threads=threads)

    async def drain(self, worker_id: WorkerId) -> None:
        await self._ray.drain(worker_id)

    async def kill(self, worker_id: WorkerId) -> None:
        await self._ray.kill(worker_id)


def _cores() -> list[int]:
    return psutil.Process().cpu_affinity() or list(range(psutil.cpu_count() or 1))


async def run_cluster(
    config: Config,
    *,
    actor_class: type,
    router_command: RouterCommand | None,
    announce: Callable[[str], None],
    store_command: StoreCommand | None = None,
    shutdown: Shutdown | None = None,
) -> None:
    """Runs until told to stop by a signal (or `shutdown`), and leaves no process behind.

    `router_command` None: workers and directory only. `store_command` None: no store node.
    `announce` gets the one ready text.
    Raises SetupError, before the ready text, for what the operator must change; PlatformLost if the Ray
    that was started here dies, after which the caller should `os._exit`: Ray's own clean-up would hang.
    """
    check_setup(config, with_router=router_command is not None)
    shutdown = shutdown or Shutdown()
    with shutdown.on_signals():
        store = LocalStore(config, store_command)
        cluster = _Cluster(store, actor_class, router_command, shutdown)
        try:
            if await cluster.start():
                cluster.log_addresses()
                announce(cluster.ready_text())
                await cluster.until_asked_to_stop()
                await cluster.drain()
        finally:
            await cluster.close()


class _Cluster:
    def __init__(
        self, store: LocalStore, actor_class: type, router_command: RouterCommand | None, shutdown: Shutdown
    ) -> None:
        config = store.config
        self._config, self._router_command, self._shutdown = config, router_command, shutdown
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self._ray = RayReplicas(actor_class, config=config, on_exit=self._on_exit)
        self._workers = _LocalWorkers(self._ray, config)
        life = secrets.token_hex(2)
        self._plane = ControlPlane(config.cluster, life=life, replicas=self._workers, spawn=self._spawn)
        self._server: Any = None
        self._store_directory = StoreDirectory(config.store, meter=self._plane.meter)
        self._metrics = MetricsServer(render=self._render, health=self._health)
        self._router: RouterChildren | None = None
        self._router_port: socket.socket | None = None
        self._ray_watch = RayWatch(self._ray_died)
        self._crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> bool:
        """False: told to stop before everything was ready."""
        await check_directory(self._config.store)
        log.debug("starting Ray")
        if self._ray.is_local:
            adopt_orphans()
        await self._ray.open()
        if self._ray.is_local:
            self._ray_watch.start()
        cluster = self._config.cluster
        self._server, port = await start_server(
            cluster.control_host,
            cluster.control_port,
            directory=self._plane,
            store_directory=None if self._config.store.directory else self._store_directory,
            budgets=Ledger(),
        )
        self._workers.control_address = host_port(reachable_host(cluster.control_host), port)
        await self._metrics.start(cluster.control_host, cluster.control_metrics_port)
        if (node := self._store.start(self._workers.control_address)) is not None:
            self._spawn(node.run())
        counts = {
            Role.PREFILL: cluster.prefill_workers,
            Role.DECODE: cluster.decode_workers,
            Role.BOTH: cluster.both_workers,
        }
        self._plane.want(counts)
        if self._router_command is not None:
            self._start_router(self._router_command(self._workers.control_address))
        return await self._until_ready()

    def log_addresses(self) -> None:
        log.info("metrics of the control plane at http://%s/metrics", self._metrics.address)

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
        self._spawn(self._router.run())

    async def _until_ready(self) -> bool:
        """Raises what keeps the cluster from becoming ready."""
        ready = asyncio.create_task(self._all_ready())
        stop = asyncio.create_task(self._shutdown.asked.wait())
        try:
            trouble = {self._plane.setup_error, self._crash}
            await asyncio.wait({ready, stop, *trouble}, return_when=asyncio.FIRST_COMPLETED)
            if self._plane.setup_error.done():
                raise SetupError(self._plane.setup_error.result())
            if self._crash.done():
                self._crash.result()
            if ready.done():
                _must_be_ready(ready)
            return ready.done() and not stop.done()
        finally:
            for task in (ready, stop):
                task.cancel()

    async def _all_ready(self) -> None:
        """Raises SetupError of a child."""
        if self._router is not None:
            await self._router.until_started()
        await self._store.until_ready()
        await self._plane.until_settled()
        if self._router is not None:
            cluster = self._config.cluster
            count = cluster.prefill_workers + cluster.decode_workers + cluster.both_workers
            async with asyncio.timeout(cluster.start_timeout_s):
                await self._router.until_connected(count)

    async def until_asked_to_stop(self) -> None:
        """Raises what breaks the control plane itself."""
        asked = asyncio.create_task(self._shutdown.asked.wait())
        await asyncio.wait({asked, self._crash}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if self._crash.done():
            self._crash.result()

    def ready_text(self) -> str:
        cluster = self._config.cluster
        model = self._config.model.name or default_name(self._config.model.path)
        pools = (
            f"{cluster.prefill_workers} prefill, {cluster.decode_workers} decode, {cluster.both_workers} both"
        )
        pools += f", {self._store.text()}"
        if self._router is None:
            return f"Baton is ready: {model} on {pools}; directory at {self._workers.control_address}"
        url = self._router.url
        path, ask, curl = "completions", '"prompt": "Once upon a time", "max_tokens": 32', "curl"
        if _has_chat_template(self._config.model.path):
            path, curl = "chat/completions", "curl -N"
            ask = '"stream": true, "messages": [{"role": "user", "content": "What is a KV cache?"}]'
        body = f'{{"model": "{model}", {ask}}}'
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._config.router.keys else ""
        command = f"{curl} {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
        return f"Baton is ready: {url} serves {model} on {pools}. Try:\n  {command}"

    async def drain(self) -> None:
        """Router first: it refuses new requests and lets the running ones finish on the workers."""
        timeout_s = self._config.cluster.drain_timeout_s
        log.info("draining, for at most %g s; Ctrl-C again ends at once", timeout_s)
        stopping = asyncio.create_task(self._stop_children(timeout_s))
        at_once = asyncio.create_task(self._shutdown.now.wait())
        await asyncio.wait({stopping, at_once}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, at_once):
            task.cancel()
        await asyncio.gather(stopping, at_once, return_exceptions=True)

    async def _stop_children(self, timeout_s: float) -> None:
        if self._router is not None:
            await self._router.stop(timeout_s + ROUTER_END_S)
        await self._store.stop()

    def _ray_died(self, text: str) -> None:
        """Workers cannot be started any more, and those that run end by themselves."""
        self._ray.lost()
        self._plane.close()
        if not self._crash.done():
            self._crash.set_exception(PlatformLost(text))

    async def close(self) -> None:
        self._ray_watch.close()
        self._plane.close()
        if self._router is not None:
            self._router.kill()
        if self._router_port is not None:
            self._router_port.close()
        self._store.close()
        children = psutil.Process().children(recursive=True) if self._ray.is_local else []
        await self._ray.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._metrics.close()
        if self._server is not None:
            await self._server.stop(0)
        await self._store_directory.close()
        await asyncio.to_thread(_end_all, children)

    def _render(self) -> bytes:
        self._store_directory.count()
        return self._plane.meter.render()

    def _health(self) -> dict[str, object]:
        routers = {r.router_id: r.metrics_address for r in self._plane.book.view.routers}
        return {"status": "ok" if self._plane.reconciler.is_settled else "converging", "routers": routers}

    def _on_exit(self, worker_id: WorkerId, reason: BaseException | str) -> None:
        self._plane.exited(worker_id, reason)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._crash.done():
            self._crash.set_exception(error)


def _end_all(processes: Sequence[psutil.Process]) -> None:
    """Whatever outlived Ray's own shutdown: politely, then not."""
    _, alive = psutil.wait_procs(processes, LAST_PROCESSES_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            log.warning("killing left-over process %d (%s)", process.pid, process.name())
            process.kill()
    psutil.wait_procs(alive, LAST_PROCESSES_S)
