"""Sessions with workers, kept alive: dialled, watched for silence, dialled again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol

from baton.core.errors import BatonError, IncompatiblePeer
from baton.core.ids import RouterId
from baton.core.messages import MembershipView, RouterMessage, WorkerHello, WorkerMessage
from baton.wire.client import DirectoryClient
from baton.wire.link import LinkBroken
from router.driver import Connection, Driver
from router.events import FromWorker
from router.membership import Roster

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
DIRECTORY_SILENCE_S = 5.0
"""The directory sends a view every second; after this long without one it is dialled again."""


class WorkerLink(Protocol):
    def send(self, message: RouterMessage) -> None: ...

    def __aiter__(self) -> AsyncIterator[WorkerMessage]: ...


Dial = Callable[[str, RouterId], AbstractAsyncContextManager[tuple[WorkerHello, WorkerLink]]]
"""`baton.wire.client.worker_session`, or a test's. Raises LinkBroken."""


class Backoff:
    """How long to wait before the next attempt: doubles, begins anew after a success."""

    def __init__(self) -> None:
        self._next_s = BACKOFF_FIRST_S

    def succeeded(self) -> None:
        self._next_s = BACKOFF_FIRST_S

    def next_s(self) -> float:
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, BACKOFF_MAX_S)
        return delay_s


class WorkerSessions:
    """One task per wanted address. Use within `async with`."""

    def __init__(self, driver: Driver, roster: Roster, *, router_id: RouterId, silence_s: float, dial: Dial) -> None:
        self._driver, self._roster, self._dial = driver, roster, dial
        self._router_id, self._silence_s = router_id, silence_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._open: set[str] = set()

    async def __aenter__(self) -> "WorkerSessions":
        self._follow_roster()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_view(self, view: MembershipView) -> None:
        for update in self._roster.on_view(view):
            self._driver.feed(update)
        self._follow_roster()

    def _follow_roster(self) -> None:
        for address in self._roster.addresses - self._tasks.keys():
            self._tasks[address] = asyncio.create_task(self._keep(address), name=f"session {address}")
        for address in self._tasks.keys() - self._roster.addresses - self._open:
            self._tasks.pop(address).cancel()

    async def _keep(self, address: str) -> None:
        backoff = Backoff()
        while address in self._roster.addresses:
            try:
                await self._one_session(address, backoff)
            except (LinkBroken, BatonError, OSError) as error:
                log.info("worker at %s: %s", address, error)
            await asyncio.sleep(backoff.next_s())
        self._tasks.pop(address, None)

    async def _one_session(self, address: str, backoff: Backoff) -> None:
        async with self._dial(address, self._router_id) as (hello, link):
            silence = asyncio.timeout(self._silence_s)
            connection = Connection(hello, address, link.send, lambda: silence.reschedule(self._driver.now_s()))
            if not self._driver.connected(connection):
                raise LinkBroken(f"{hello.worker_id} has a session under another address already")
            self._open.add(address)
            backoff.succeeded()
            log.info("worker %s (%s) joined from %s", hello.worker_id, hello.role, address)
            reason = "its session was closed here"
            try:
                reason = await self._listen(connection, link, silence)
            finally:
                self._open.discard(address)
                log.info("worker %s is lost: %s", hello.worker_id, reason)
                self._driver.disconnected(connection, reason)

    async def _listen(self, connection: Connection, link: WorkerLink, silence: asyncio.Timeout) -> str:
        """Until the session ends; returns why."""
        try:
            async with silence:
                async for message in link:
                    silence.reschedule(self._driver.now_s() + self._silence_s)
                    self._driver.feed(FromWorker(connection.worker_id, message))
        except TimeoutError:
            return f"silent for {self._silence_s:g} s"
        except LinkBroken as error:
            return str(error)
        return "it closed the session"


async def follow_directory(
    client: DirectoryClient, router_id: RouterId, on_view: Callable[[MembershipView], None]
) -> None:
    """Until cancelled. While the directory is away, what it said last holds."""
    backoff = Backoff()
    while True:
        try:
            async with asyncio.timeout(DIRECTORY_SILENCE_S) as silence, aclosing(client.watch(router_id)) as views:
                async for view in views:
                    silence.reschedule(asyncio.get_running_loop().time() + DIRECTORY_SILENCE_S)
                    backoff.succeeded()
                    on_view(view)
        except (LinkBroken, IncompatiblePeer, TimeoutError) as error:
            log.warning("directory %s is away, going on with what is known: %s", client.address, error)
        await asyncio.sleep(backoff.next_s())
