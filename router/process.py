"""One router process: the API, the driver, the sessions with workers, the directory watch."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence

import msgspec
import uvicorn

from baton.config import Config
from baton.config.router import RouterConfig
from baton.config.served_models import about, each_model
from baton.core import garbage
from baton.core.errors import SetupError
from baton.core.ids import RouterId
from baton.core.messages import MembershipView
from baton.core.sharing import RouterMember
from baton.telemetry.metrics import Meter
from baton.telemetry.tracing import spans_for
from baton.wire.address import host_port, reachable_host
from baton.wire.client import DirectoryClient, worker_session
from baton.wire.demand import DemandClient
from baton.wire.server import start_server
from baton.wire.slices import answer_soon
from engine.model_files.host_memory import give_back_free_memory
from kv_store.directory.connect import connect
from router.decisions.core import RouterCore
from router.decisions.membership import FollowedMembership
from router.http.app import make_app
from router.http.authentication import AccessControl
from router.http.batch_runner import BatchRunner
from router.http.observe import RequestRecorder
from router.http.protocol import protocol_for
from router.http.served_models import Models
from router.http.service import Service
from router.http.tls import PublicTls
from router.live.demand_reporter import DemandReporter
from router.live.driver import Driver
from router.live.drivers import Drivers
from router.live.peers.follower import PeerFollower
from router.live.peers.publisher import PeerPublisher
from router.live.quick_tokenizers import QuickTokenizers
from router.live.recent_requests import RecentRequests
from router.live.request_log import RequestLog
from router.live.sessions import Dial, DirectoryWatch, WorkerSessions
from router.live.store_lookup import StoreLookup
from router.openai.adapters import Adapters
from router.responses.keeper import keeper_of
from router.tenants.keyring import LiveKeys
from router.tenants.open import budgets_of, open_keys
from router.text.parsers.select import choose_parsers
from router.text.sampling_defaults import read_sampling_defaults
from router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BACKLOG = 2048
SEND_BUFFER_BYTES = 256 * 1024
"""Size of the kernel's send buffer per connection. The kernel's default of up to 4 MiB would hide ten
thousand unread tokens of a slow client from our own bound."""
KEEP_ALIVE_S = 65.0
"""Idle time after which a connection is closed. It exceeds the usual idle time of clients and balancers, so
that they close first."""
CLOSE_S = 2.0
"""Time for connections to close after the drain. A client that reads nothing is not waited for."""


OnReady = Callable[[Sequence[str]], None]


class PublicServer(uvicorn.Server):
    """uvicorn's server without its signal handling, since stopping means draining first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def listening_socket(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a listening socket. `is_shared` lets other routers listen on the same port. Raises SetupError if
    the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is given because asyncio turns Nagle's algorithm off only for sockets that say TCP. With
    # it on, every small answer waits 40 ms for the client's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise SetupError(
            f"the router cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another router.port"
        ) from error
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket, *, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{host_port(host, port)}"


async def run_router(
    config: Config,
    *,
    control_address: str | None = None,
    workers: Sequence[str] = (),
    on_ready: OnReady = lambda _: None,
    stop: asyncio.Event | None = None,
    dial: Dial = worker_session,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then drain for at most `cluster.drain_timeout_s`.

    Workers are found through the directory at `control_address`, or given as host:port. `on_ready` gets the
    API's URLs once they are open, whether there are workers yet or not: the public one and, where its port is
    shared, one that leads to this process only. A second signal ends the process at once. Raises SetupError
    if the model's tokenizer or the port is not available.
    """
    answer_soon()
    tls = PublicTls.of(config.router)
    tokenizers: dict[str, Tokenizer] = {}
    for name, one in each_model(config).items():
        with about(config, name):
            tokenizers[name] = await _tokenizer(one)
    with contextlib.closing(Sockets(config.router)) as sockets:
        lookup = await _store_lookup(config, control_address)
        keys = await open_keys(config)
        router = RouterProcess(config, tokenizers, control_address, workers, dial, sockets, lookup, keys, tls)
        stop = stop or asyncio.Event()
        try:
            with _signals_set(stop):
                await router.run(on_ready, stop)
        finally:
            await router.close()


async def _tokenizer(config: Config) -> Tokenizer:
    """Load the tokenizer of one model. Raises SetupError."""
    model = config.model
    tokenizer = await asyncio.to_thread(
        Tokenizer.load,
        model.path,
        model.revision,
        may_be_quick=config.router.quick_tokenizer,
        is_quick_later=True,
        defaults_of=lambda folder: read_sampling_defaults(
            folder, model.generation_config, model.generation_overrides
        ),
    )
    defaults = msgspec.to_builtins(tokenizer.card.sampling)
    if defaults:
        log.info("requests for %s that leave sampling out have the model's own: %s", model.path, defaults)
    tokenizer.limit_context(config.model.context_tokens_max)
    await asyncio.to_thread(give_back_free_memory)  # reading a tokenizer takes several times what stays of it
    return tokenizer


async def _store_lookup(config: Config, control_address: str | None) -> StoreLookup | None:
    """Connect to the directory of the store; None: the cluster has no store."""
    if not config.store.host_bytes or not (config.store.directory or control_address):
        return None
    directory = await connect(config.store, control_address=control_address or "")
    return StoreLookup(directory, timeout_s=config.store.lookup_timeout_s)


class Sockets:
    """The sockets that a router serves on. A router with a shared port has a second one that leads to this
    very process, for health and metrics."""

    def __init__(self, config: RouterConfig) -> None:
        """Open the sockets. Raises SetupError."""
        self._scheme = "https" if config.tls_cert else "http"
        self.all = [listening_socket(config.host, config.port, is_shared=config.share_port)]
        if config.share_port:
            try:
                self.all.append(listening_socket(config.host, 0))
            except SetupError:
                self.close()
                raise

    @property
    def urls(self) -> list[str]:
        return [url_of(sock, scheme=self._scheme) for sock in self.all]

    @property
    def own_port(self) -> int:
        """Port that leads to this process only."""
        return self.all[-1].getsockname()[1]

    def close(self) -> None:
        for sock in self.all:
            sock.close()


def _configured_workers(config: Config) -> int:
    """How many workers the model has from its start; 0: their number is somebody else's choice."""
    cluster = config.cluster
    if config.autoscale.mode != "off":
        return 0
    return cluster.prefill_workers + cluster.decode_workers + cluster.aggregated_workers


class RouterProcess:
    """The parts of a router, put together within a running event loop."""

    def __init__(
        self,
        config: Config,
        tokenizers: Mapping[str, Tokenizer],
        control_address: str | None,
        workers: Sequence[str],
        dial: Dial,
        sockets: Sockets,
        store_lookup: StoreLookup | None = None,
        keys: LiveKeys | None = None,
        tls: PublicTls | None = None,
    ) -> None:
        """`tokenizers` has the tokenizer of each of `each_model`, by name. Without `keys` everybody has
        access; without `tls` the router serves plain HTTP. Raises SetupError."""
        self._tls, self._store_lookup = tls, store_lookup
        self._config, self._sockets = config, sockets
        self._router_id = router_id = RouterId(f"router-{uuid.uuid4().hex[:8]}")
        self._spans = spans_for(router_id, config.telemetry)
        self._meter, self._recent_requests = (
            Meter(),
            RecentRequests(RequestLog(config.telemetry.log_requests)),
        )
        self._access = AccessControl(
            keys, budgets_of(config, control_address, router_id), router_id=router_id
        )
        self._configs = each_model(config)
        expected = 0 if workers else sum(map(_configured_workers, self._configs.values()))
        self._quick = QuickTokenizers(tokenizers, workers=expected)
        self._responses = keeper_of(config)
        self.models = Models(
            [self._service(name, one, tokenizers[name]) for name, one in self._configs.items()]
        )
        self.drivers = Drivers({service.model: service.driver for service in self.models})
        self._batches = BatchRunner(config.router, self.drivers, self._access)
        self._sessions = WorkerSessions(
            self.drivers,
            FollowedMembership(workers),
            router_id=router_id,
            silence_s=config.router.worker_silence_s,
            dial=dial,
        )
        self._towards = control_address or next(iter(workers), "")
        """Address of a process that shares a network with all others of the cluster; empty: none is known."""
        self._directory = DirectoryClient(control_address) if control_address else None
        self._demand = DemandClient(control_address) if control_address else None
        self._watch: DirectoryWatch | None = None
        self._publisher = PeerPublisher(self.drivers, router_id, self._recent_requests)
        self._follower = PeerFollower(self.drivers, router_id, addresses=config.router.peers)

    def _service(self, name: str, config: Config, tokenizer: Tokenizer) -> Service:
        """Make the parts of one model. Models share no requests, queue, predictions or prefix index."""
        observer = RequestRecorder(self._meter, self._spans, self._recent_requests, model=name)
        now_s = asyncio.get_running_loop().time()
        core = RouterCore(
            config=config.router,
            slo=config.slo,
            rng=random.Random(),
            now_s=now_s,
            configured_workers=_configured_workers(config),
        )
        return Service(
            config=config.router,
            slo=config.slo,
            model=name,
            model_path=config.model.path,
            driver=Driver(core, on_note=observer.on_note),
            tokenizer=tokenizer,
            observer=observer,
            parsers=choose_parsers(
                tool=config.model.tool_parser,
                reasoning=config.model.reasoning_parser,
                template=tokenizer.template_text,
                model_type=tokenizer.card.model_type,
            ),
            adapters=Adapters(
                name,
                tokenizer.card,
                rank_max=config.engine.adapter_rank_max,
                may_change=config.router.adapter_loading,
            ),
            access=self._access,
            store_lookup=self._store_lookup,
            may_sleep=config.autoscale.may_sleep,
            responses=self._responses,
        )

    def _directory_state(self) -> str:
        if self._watch is None:
            return "none"
        return "current" if self._watch.is_current else "away"

    async def run(self, on_ready: OnReady, stop: asyncio.Event) -> None:
        for service in self.models:
            await service.adapters.load_configured(self._configs[service.model].model.adapters)
        server = self._make_server()
        async with self._sessions, self._peers() as member, asyncio.TaskGroup() as group:
            background = [group.create_task(driver.run()) for driver in self.drivers.all]
            background.append(group.create_task(self._publisher.run()))
            background.append(group.create_task(self._quick.run()))
            batches = group.create_task(self._batches.run())
            if self._directory is not None:
                self._watch = DirectoryWatch(self._directory, member)
                background.append(group.create_task(self._watch.run(self._on_view)))
            if self._demand is not None:
                background += [group.create_task(r.run()) for r in self._reporters(self._demand)]
            if self._tls is not None:
                background.append(group.create_task(self._tls.keep_looking()))
            serving = group.create_task(server.serve(sockets=self._sockets.all))
            garbage.spare_what_stays()
            on_ready(self._sockets.urls)
            await stop.wait()
            self._batches.stop()
            await batches
            await self._drain()
            server.should_exit = True
            await serving
            for task in background:
                task.cancel()

    def _reporters(self, client: DemandClient) -> list[DemandReporter]:
        return [DemandReporter(s.driver, client, self._router_id, model=s.model) for s in self.models]

    def _make_server(self) -> PublicServer:
        config = uvicorn.Config(
            make_app(self.models, directory_state=self._directory_state, batches=self._batches),
            http=protocol_for(self._config.router),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=int(CLOSE_S),
        )
        config.load()  # uvicorn makes a TLS context of its own here, or none.
        config.ssl = self._tls.context if self._tls is not None else None
        return PublicServer(config)

    def _on_view(self, view: MembershipView) -> None:
        self._sessions.on_view(view)
        self._quick.on_view(view)
        self._follower.on_view(view)

    @contextlib.asynccontextmanager
    async def _peers(self) -> AsyncGenerator[RouterMember]:
        """Follow the other routers, and serve those that follow this one."""
        config, inside = self._config.router, self._config.cluster.worker_host
        server, port = await start_server(inside, config.peer_port, router=self._publisher)
        try:
            # Private networks may lead to nobody but the cluster.
            here, public = (reachable_host(h, towards=self._towards) for h in (inside, config.host))
            member = RouterMember(
                self._router_id,
                address=host_port(here, port),
                metrics_address=host_port(public, self._sockets.own_port),
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            async with self._follower:
                yield member
        finally:
            await server.stop(0)

    async def _drain(self) -> None:
        timeout_s, drivers = self._config.cluster.drain_timeout_s, self.drivers
        log.info("router drains: %d sequences in flight", drivers.in_flight_count)
        ended = await asyncio.gather(*(driver.drain(timeout_s) for driver in drivers.all))
        if not all(ended):
            log.warning(
                "%d sequences were cut off by the drain after %g s", drivers.in_flight_count, timeout_s
            )
            drivers.fail_all("the router is shutting down")

    async def close(self) -> None:
        if self._directory is not None:
            await self._directory.close()
        if self._demand is not None:
            await self._demand.close()
        if self._store_lookup is not None:
            await self._store_lookup.close()
        await self._access.close()
        await self._responses.close()
        for service in self.models:
            await service.tokenizer.close()
        await asyncio.to_thread(self._spans.shutdown)


@contextlib.contextmanager
def _signals_set(stop: asyncio.Event) -> Generator[None]:
    """The first SIGTERM or SIGINT sets `stop`; the second has its default effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        stop.set()
        for one in signals:
            loop.remove_signal_handler(one)

    for one in signals:
        loop.add_signal_handler(one, on_signal)
    try:
        yield
    finally:
        for one in signals:
            loop.remove_signal_handler(one)
