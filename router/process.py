"""One router process: the API, the driver, the sessions with workers, the directory watch."""

import asyncio
import contextlib
import logging
import random
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Generator, Sequence

import uvicorn

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.ids import RouterId
from baton.engine.model_files import default_name
from baton.telemetry.metrics import Meter
from baton.telemetry.tracing import spans_for
from baton.wire.client import DirectoryClient, worker_session
from router.adapters import Adapters
from router.app import make_app
from router.core import RouterCore
from router.driver import Driver
from router.http_protocol import protocol_for
from router.membership import Roster
from router.observe import Observer
from router.parsers.select import choose_parsers
from router.service import Service
from router.sessions import Dial, DirectoryWatch, WorkerSessions
from router.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BACKLOG = 2048
SEND_BUFFER_BYTES = 256 * 1024
"""The kernel's, per connection. Its own choice of up to 4 MiB would hide ten thousand tokens that a slow
client has not read from the bound that we keep."""
KEEP_ALIVE_S = 65.0
"""Longer than the usual idle time of clients and balancers, so that they close first."""
CLOSE_S = 2.0
"""For connections to close after the drain; a client that reads nothing is not waited for."""


class Server(uvicorn.Server):
    """Without uvicorn's own signal handling: stopping means draining first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def served_name(config: Config) -> str:
    """The model's name for clients."""
    return config.model.name or default_name(config.model.path)


def listening_socket(host: str, port: int) -> socket.socket:
    """Raises SetupError if the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by name: asyncio turns Nagle's algorithm off only for sockets that say TCP, and with
    # it on, every small answer waits 40 ms for the client's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
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


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def run_router(
    config: Config,
    *,
    control_address: str | None = None,
    workers: Sequence[str] = (),
    on_ready: Callable[[str], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    dial: Dial = worker_session,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then drain for at most `cluster.drain_timeout_s`.

    Workers are found through the directory at `control_address`, or given as host:port. `on_ready`
    gets the API's URL once it is open, whether there are workers yet or not. Raises SetupError if the
    model's tokenizer or the port can't be had. A second signal ends at once.
    """
    tokenizer = await asyncio.to_thread(Tokenizer.load, config.model.path, config.model.revision)
    tokenizer.limit_context(config.model.context_tokens_max)
    sock = listening_socket(config.router.host, config.router.port)
    router = RouterProcess(config, tokenizer, control_address, workers, dial)
    stop = stop or asyncio.Event()
    try:
        with _signals_set(stop):
            await router.run(sock, on_ready, stop)
    finally:
        sock.close()
        await router.close()


class RouterProcess:
    """The parts of a router, put together within a running event loop."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        control_address: str | None,
        workers: Sequence[str],
        dial: Dial,
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
        router_id = RouterId(f"router-{uuid.uuid4().hex[:8]}")
        model = served_name(config)
        self._spans = spans_for(router_id, config.telemetry)
        observer = Observer(Meter(), self._spans, model=model)
        now_s = asyncio.get_running_loop().time()
        core = RouterCore(config=config.router, rng=random.Random(), now_s=now_s)
        self.driver = Driver(core, on_note=observer.on_note)
        self._sessions = WorkerSessions(
            self.driver,
            Roster(workers),
            router_id=router_id,
            silence_s=config.router.worker_silence_s,
            dial=dial,
            model=model,
        )
        self._directory = DirectoryClient(control_address) if control_address else None
        self._watch = DirectoryWatch(self._directory, router_id) if self._directory else None
        self._service = Service(
            config=config.router,
            model=model,
            model_path=config.model.path,
            driver=self.driver,
            tokenizer=tokenizer,
            observer=observer,
            parsers=choose_parsers(
                tool=config.model.tool_parser,
                reasoning=config.model.reasoning_parser,
                template=tokenizer.template_text,
                model_type=tokenizer.card.model_type,
            ),
            adapters=Adapters(
                model,
                tokenizer.card,
                rank_max=config.engine.adapter_rank_max,
                may_change=config.router.adapter_loading,
            ),
            directory_state=self._directory_state,
        )

    def _directory_state(self) -> str:
        if self._watch is None:
            return "none"
        return "current" if self._watch.is_current else "away"

    async def run(self, sock: socket.socket, on_ready: Callable[[str], None], stop: asyncio.Event) -> None:
        await self._service.adapters.load_configured(self._config.model.adapters)
        server = Server(
            uvicorn.Config(
                make_app(self._service),
                http=protocol_for(self._config.router),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(KEEP_ALIVE_S),
                timeout_graceful_shutdown=int(CLOSE_S),
            )
        )
        async with self._sessions, asyncio.TaskGroup() as group:
            background = [group.create_task(self.driver.run())]
            if self._watch is not None:
                background.append(group.create_task(self._watch.run(self._sessions.on_view)))
            serving = group.create_task(server.serve(sockets=[sock]))
            on_ready(url_of(sock))
            await stop.wait()
            await self._drain()
            server.should_exit = True
            await serving
            for task in background:
                task.cancel()

    async def _drain(self) -> None:
        timeout_s = self._config.cluster.drain_timeout_s
        log.info("draining: %d sequences in flight", self.driver.in_flight_count)
        if not await self.driver.drain(timeout_s):
            log.warning("%d sequences cut off after %g s", self.driver.in_flight_count, timeout_s)
            self.driver.fail_all("the router is shutting down")

    async def close(self) -> None:
        if self._directory is not None:
            await self._directory.close()
        await self._tokenizer.close()
        await asyncio.to_thread(self._spans.shutdown)


@contextlib.contextmanager
def _signals_set(stop: asyncio.Event) -> Generator[None]:
    """The first SIGTERM or SIGINT sets `stop`, the second does what it does without us."""
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
