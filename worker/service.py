"""The worker's side of its sessions with routers."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from baton.core.ids import RouterId
from baton.core.messages import Role, RouterMessage, SessionEnds, WorkerMessage
from baton.wire.link import LinkBroken
from baton.wire.server import WorkerEnd
from baton.wire.services import WorkerStatusReply
from baton.wire.serving import serve_until

log = logging.getLogger(__name__)


class RouterSink(Protocol):
    """The receiver of what routers say. `router_joined` answers with the hello, through `send`."""

    def router_joined(self, router_id: RouterId) -> None: ...

    def from_router(self, router_id: RouterId, message: RouterMessage) -> None: ...

    def router_lost(self, router_id: RouterId) -> None: ...

    def drain(self) -> None: ...


class RouterSessions:
    """One multiplexed session per router. A router that does not read is dropped: the engine never waits for
    it. A second session of the same router replaces the first, whose end is reported."""

    def __init__(
        self,
        *,
        sink: RouterSink,
        status: Callable[[], WorkerStatusReply],
        set_role: Callable[[Role, float], None],
    ) -> None:
        """`set_role` gets the role, and for how long sequences that are held may be finished before."""
        self._sink, self._status, self._set_role = sink, status, set_role
        self._sessions: dict[RouterId, tuple[WorkerEnd, asyncio.Event]] = {}
        """The link of each router, and an event that ends the session from our side."""
        self._is_ending = False
        self._none_left = asyncio.Event()

    @property
    def router_count(self) -> int:
        return len(self._sessions)

    async def serve_router(self, router_id: RouterId, link: WorkerEnd) -> None:
        if self._is_ending:
            return
        self._drop(router_id, "replaced by a new session")
        dropped = asyncio.Event()
        self._sessions[router_id] = (link, dropped)
        log.info("router %s joined", router_id)
        self._sink.router_joined(router_id)
        try:
            await serve_until(dropped, self._read(router_id, link))
        finally:
            if self._is_current(router_id, link):
                del self._sessions[router_id]
                log.info("router %s left", router_id)
                self._sink.router_lost(router_id)
                self._look_who_is_left()

    async def _read(self, router_id: RouterId, link: WorkerEnd) -> None:
        async for message in link:
            if not self._is_current(router_id, link):
                return
            self._sink.from_router(router_id, message)

    def send(self, router_id: RouterId, message: WorkerMessage | SessionEnds) -> None:
        """Send a message, or drop it if the session is gone."""
        session = self._sessions.get(router_id)
        if session is None:
            return
        try:
            session[0].send(message)
        except LinkBroken as error:
            self._drop(router_id, str(error))

    async def end(self, within_s: float) -> None:
        """End all sessions and take no new ones. Routers read what is queued for them and hang up; one that
        does not within `within_s` is dropped."""
        self._is_ending = True
        for router_id in list(self._sessions):
            self.send(router_id, SessionEnds())
        self._look_who_is_left()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._none_left.wait()
        for router_id in list(self._sessions):
            self._drop(router_id, "this worker ends")

    async def drain(self) -> None:
        self._sink.drain()

    async def set_role(self, role: Role, drain_s: float) -> None:
        self._set_role(role, drain_s)

    def status(self) -> WorkerStatusReply:
        return self._status()

    def _is_current(self, router_id: RouterId, link: WorkerEnd) -> bool:
        session = self._sessions.get(router_id)
        return session is not None and session[0] is link

    def _drop(self, router_id: RouterId, reason: str) -> None:
        session = self._sessions.pop(router_id, None)
        if session is None:
            return
        log.info("router %s dropped: %s", router_id, reason)
        session[1].set()
        self._sink.router_lost(router_id)
        self._look_who_is_left()

    def _look_who_is_left(self) -> None:
        if self._is_ending and not self._sessions:
            self._none_left.set()
