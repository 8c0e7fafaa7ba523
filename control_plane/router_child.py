"""The routers as supervised child processes."""

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from baton.config.router import RouterConfig
from baton.core.errors import SetupError
from control_plane.child import LIVE_PATH, Child
from control_plane.reconcile import RestartPolicy

HEALTH_PATH = "/health"
CONNECTED_PROBE_S = 0.1
CONNECTED_TIMEOUT_S = 1.0


class RouterChild(Child):
    name = "router"

    @property
    def url(self) -> asyncio.Future[str]:
        """Addresses from the first ready line: the public URL and, if routers share that port, the router's
        own. SetupError if it cannot start until a person changes something."""
        return self.ready

    def live_url(self, ready: str) -> str:
        return f"{_own(ready)}{LIVE_PATH}"

    async def until_connected(self, worker_count: int) -> None:
        """Wait until the router has a session with this many workers, so that requests reach all of them.
        That many workers must serve."""
        url = _own(await asyncio.shield(self.url))
        async with httpx.AsyncClient(trust_env=False, timeout=CONNECTED_TIMEOUT_S, verify=False) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    pools = (await client.get(f"{url}{HEALTH_PATH}")).json()["workers"]
                    if sum(map(len, pools.values())) >= worker_count:
                        return
                await asyncio.sleep(CONNECTED_PROBE_S)


def _own(ready: str) -> str:
    """Return the URL that leads to this process alone."""
    return ready.split()[-1]


def reserved_port(config: RouterConfig) -> socket.socket:
    """Return a socket that holds the port which routers will share, so that it stays reserved while none of
    them runs. Nobody connects to a socket that does not listen. Raises SetupError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        reason = error.strerror or error
        raise SetupError(
            f"the routers cannot listen on {config.host}:{config.port}: {reason}; choose another router.port"
        ) from None
    return sock


def reserved_address(host: str, port: int) -> socket.socket:
    """Return a socket that holds an address for a child across its restarts. Nobody connects to a socket that
    does not listen, and Linux lets another socket listen there as long as this one does not. Raises
    SetupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        reason = error.strerror or error
        raise SetupError(f"the control plane cannot listen on {host}:{port}: {reason}") from None
    return sock


class RouterChildren:
    """All routers of one `baton serve`. A router that dies is started again; the others go on."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        count: int,
        environment: Mapping[str, str],
        policy: RestartPolicy,
        silence_s: float,
    ) -> None:
        self.children = [
            RouterChild(argv, environment=environment, policy=policy, silence_s=silence_s)
            for _ in range(count)
        ]
        for number, child in enumerate(self.children if count > 1 else (), 1):
            child.name = f"router {number}"

    async def until_started(self) -> None:
        """Wait for all routers. Raises SetupError if one cannot start until a person changes something."""
        await asyncio.gather(*(asyncio.shield(child.url) for child in self.children))

    def check(self) -> None:
        """Raise SetupError if one is known to be unable to start until a person changes something."""
        for child in self.children:
            if child.url.done():
                child.url.result()

    @property
    def url(self) -> str:
        """The public URL, once the routers are started."""
        return self.children[0].url.result().split()[0]

    async def until_connected(self, worker_count: int) -> None:
        """Wait for all routers, see `RouterChild.until_connected`."""
        await asyncio.gather(*(child.until_connected(worker_count) for child in self.children))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(child.run())

    async def stop(self, timeout_s: float) -> None:
        """Let the routers drain for at most this long, then kill them. Idempotent."""
        stops: list[Any] = [child.stop(timeout_s) for child in self.children]
        await asyncio.gather(*stops)

    def kill(self) -> None:
        for child in self.children:
            child.kill()
