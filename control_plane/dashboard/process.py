"""The dashboard's process: one collector, the pages, and the authentication in front of them."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.tokens import Scope, TokenBook, TokenRecord, digest_of
from baton.files.token_places import LiveTokens, new_token, token_at
from baton.wire.address import host_port
from control_plane.dashboard.authentication import Authentication
from control_plane.dashboard.collector import ClusterCollector
from control_plane.dashboard.connections import HeadersInTime
from control_plane.dashboard.pages import mount
from control_plane.dashboard.session_file import SessionFile
from control_plane.dashboard.sessions import SessionStore

log = logging.getLogger(__name__)

CLOSE_S = 1.0
CONNECTIONS_MAX = 512
"""Most connections; a browser opens a handful."""
LOCAL_NAME = "operator"
"""Holder of the token that was made for this start."""


def _is_news(record: logging.LogRecord) -> bool:
    """Filter out the error that a browser left before its page was there, which Starlette's middleware takes
    for a defect."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, RuntimeError) and str(error) == "No response returned.")


class DashboardServer(uvicorn.Server):
    """A uvicorn server without uvicorn's own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def run_dashboard(
    config: Config,
    control_address: str,
    *,
    on_ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`. `on_ready` gets the URL and how to sign in. Raises
    SetupError."""
    settings = config.dashboard
    book, hint = tokens_of(config)
    collector = ClusterCollector(config, control_address)
    remembered = SessionFile(Path(settings.sessions_file) if settings.sessions_file else None)
    sessions = SessionStore(book, now_s=time.time, known=remembered.read(), remember=remembered.write)
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    mount(app, collector, sessions)
    is_tls = bool(settings.tls_cert)
    with _listening(settings.host, settings.port) as sock:
        server = _server(Authentication(app, sessions, is_tls=is_tls, hint=hint), config)
        port = sock.getsockname()[1]
        stop = stop or asyncio.Event()
        _set_on_signals(stop)
        async with asyncio.TaskGroup() as group:
            collecting = group.create_task(collector.run())
            serving = group.create_task(server.serve(sockets=[sock]))
            url = f"{'https' if is_tls else 'http'}://{host_port(settings.host, port)}"
            on_ready(f"{url} {hint or 'sign in with a token, see `baton tokens`'}")
            await stop.wait()
            server.should_exit = True
            await serving
            collecting.cancel()


def tokens_of(config: Config) -> tuple[Callable[[], TokenBook], str]:
    """Return the valid tokens, and a hint for people that says where one is. Raises SetupError."""
    if config.access.tokens:
        live = LiveTokens(config.access.tokens)
        return lambda: live.book, ""
    if config.dashboard.token_file:
        path = Path(config.dashboard.token_file)
        record = TokenRecord(LOCAL_NAME, Scope.OPERATE, digest_of(_local_token(path)))
        return lambda: TokenBook([record]), f"sign in with the token in {path}"
    log.warning("dashboard has no tokens, so nobody can sign in: set access.tokens, see `baton tokens`")
    return TokenBook, "No tokens are configured: set access.tokens, see `baton tokens`."


def _local_token(path: Path) -> str:
    """Return the token in the file, or make one. A restarted dashboard thus keeps earlier sign-ins."""
    with contextlib.suppress(SetupError):
        return token_at(str(path))
    token = new_token()
    try:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"{token}\n")
    except OSError as error:
        raise SetupError(f"dashboard.token_file: cannot write {path}: {error.strerror or error}") from None
    return token


def _server(app: Any, config: Config) -> DashboardServer:
    settings = config.dashboard
    try:
        uvicorn_config = uvicorn.Config(
            app,
            http=HeadersInTime,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(CLOSE_S),
            limit_concurrency=CONNECTIONS_MAX,
            ssl_certfile=settings.tls_cert or None,
            ssl_keyfile=settings.tls_key or None,
        )
        uvicorn_config.load()
        logging.getLogger("uvicorn.error").addFilter(_is_news)
    except OSError as error:
        raise SetupError(f"dashboard.tls_cert, dashboard.tls_key: {error}") from None
    return DashboardServer(uvicorn_config)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Generator[socket.socket]:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(128)
        except OSError as error:
            reason = error.strerror or error
            raise SetupError(
                f"the dashboard cannot listen on {host}:{port}: {reason}; choose another dashboard.port"
            ) from None
        sock.setblocking(False)
        yield sock
    finally:
        sock.close()


def _set_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, stop.set)
