"""Sessions with workers. They are dialled, watched for silence, and dialled again."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol, cast

from baton.core.errors import BatonError, IncompatiblePeer
from baton.core.ids import RouterId
from baton.core.messages import MembershipView, RouterMessage, WorkerHello, WorkerMessage
from baton.core.sharing import RouterMember
from baton.wire.client import DirectoryClient
from baton.wire.link import LinkBroken
from router.decisions.membership import FollowedMembership
from router.live.driver import Connection, Driver
from router.live.drivers import Drivers
from router.live.silence import SilenceWatch

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
DIRECTORY_BACKOFF_MAX_S = 0.5
"""Longest pause before the directory is dialled again. A cluster's start waits for this: routers start beside
their control plane, which takes longer."""
DIRECTORY_SILENCE_S = 5.0
"""The directory sends a view every second; after this long without one it is dialled again."""
DIRECTORY_ABSENCE_TOLD_S = 2.0


class WorkerLink(Protocol):
    def send(self, message: RouterMessage) -> None: ...

    def __aiter__(self) -> AsyncIterator[WorkerMessage]: ...


Dial = Callable[[str, RouterId], AbstractAsyncContextManager[tuple[WorkerHello, WorkerLink]]]
"""The call `baton.wire.client.worker_session`, or a test's. Raises LinkBroken."""


class Backoff:
    """The wait before the next attempt. It doubles, and begins anew after a success."""

    def __init__(self, max_s: float = BACKOFF_MAX_S) -> None:
        self._next_s, self._max_s = BACKOFF_FIRST_S, max_s

    def succeeded(self) -> None:
        self._next_s = BACKOFF_FIRST_S

    def next_s(self) -> float:
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return delay_s


class WorkerSessions:
    """The sessions, with one task per wanted address. Use them within `async with`."""

    def __init__(
        self,
        drivers: Drivers,
        membership: FollowedMembership,
        *,
        router_id: RouterId,
        silence_s: float,
        dial: Dial,
    ) -> None:
        """Each worker belongs to the driver of its model. A worker of an unknown model is never used."""
        self._drivers, self._membership, self._dial = drivers, membership, dial
        self._router_id, self._silence_s = router_id, silence_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._open: set[str] = set()

    async def __aenter__(self) -> "WorkerSessions":
        self._follow_membership()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_view(self, view: MembershipView) -> None:
        for update in self._membership.on_view(view):
            self._drivers.feed(update)
        self._follow_membership()

    def _follow_membership(self) -> None:
        for address in sorted(self._membership.addresses - self._tasks.keys()):
            task = asyncio.create_task(self._keep(address), name=f"session {address}")
            task.add_done_callback(self._ended)
            self._tasks[address] = task
        for address in sorted(self._tasks.keys() - self._membership.addresses - self._open):
            self._tasks.pop(address).cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the router after a defect, which must not leave a worker undialled unnoticed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._drivers.crash(error)

    async def _keep(self, address: str) -> None:
        backoff = Backoff()
        while address in self._membership.addresses:
            try:
                await self._one_session(address, backoff)
            except (LinkBroken, BatonError, OSError) as error:
                log.info("worker at %s: %s", address, str(error).removeprefix(f"{address}: "))
            await asyncio.sleep(backoff.next_s())
        self._tasks.pop(address, None)

    async def _one_session(self, address: str, backoff: Backoff) -> None:
        async with self._dial(address, self._router_id) as (hello, link):
            driver = self._drivers.of(hello.model)
            if driver is None:
                known = " or ".join(self._drivers.names)
                raise IncompatiblePeer(f"{hello.worker_id} serves {hello.model}, not {known}")
            log.info("worker %s (%s) answers at %s", hello.worker_id, hello.role, address)
            self._open.add(address)
            try:
                reason = await self._listen(driver, address, hello, link, backoff)
            finally:
                self._open.discard(address)
            log.info("worker %s is lost: %s", hello.worker_id, reason)

    async def _listen(
        self, driver: Driver, address: str, hello: WorkerHello, link: WorkerLink, backoff: Backoff
    ) -> str:
        """Handle messages until the session ends. Returns the reason."""
        reason = "its session was closed here"
        ending = asyncio.timeout(None)
        is_broken_off = False

        def break_off() -> None:
            nonlocal is_broken_off
            is_broken_off = True  # A message that is here already must not put the end off again.
            _end_now(ending)

        connection = Connection(hello, address, link.send, break_off)
        try:
            async with ending:
                if not driver.connected(connection):
                    return "it has a session under another address already"
                backoff.succeeded()
                with SilenceWatch(self._silence_s, lambda: _end_now(ending)) as silence:
                    async for message in link:
                        if is_broken_off:
                            return "messages to it cannot be delivered"
                        silence.observe()
                        driver.on_message(hello.worker_id, message)
                reason = "it closed the session"
        except TimeoutError:
            reason = f"silent for {self._silence_s:g} s"
        except LinkBroken as error:
            reason = str(error).removeprefix(f"{hello.worker_id}: ")
        finally:
            driver.disconnected(connection, reason)
        return reason


def _end_now(ending: asyncio.Timeout) -> None:
    if not ending.expired():
        ending.reschedule(0.0)


class DirectoryWatch:
    """A watch of the directory. While the directory is away, its last view holds.

    An operator is told of an absence when it lasts: a control plane that begins anew is back soon, and when
    a whole cluster ends, a router may outlive the control plane by a moment.
    """

    def __init__(self, client: DirectoryClient, member: RouterMember) -> None:
        self._client, self._member = client, member
        self.is_current = False
        self._is_told = True  # An absence is told once, and never before the first view.

    async def run(self, on_view: Callable[[MembershipView], None]) -> None:
        """Follow the directory until cancelled."""
        backoff = Backoff(DIRECTORY_BACKOFF_MAX_S)
        now_s = asyncio.get_running_loop().time
        current_until_s = now_s()
        while True:
            try:
                await self._follow(on_view, backoff)
            except (LinkBroken, TimeoutError) as error:
                if self.is_current:
                    current_until_s = now_s()
                if not self._is_told and now_s() - current_until_s >= DIRECTORY_ABSENCE_TOLD_S:
                    self._is_told, reason = True, str(error) or "it is silent"
                    log.warning("directory %s is away: %s", self._client.address, reason)
            self.is_current = False
            await asyncio.sleep(backoff.next_s())

    async def _follow(self, on_view: Callable[[MembershipView], None], backoff: Backoff) -> None:
        # The generator must be closed for its call to end.
        views = cast("AsyncGenerator[MembershipView]", self._client.watch(self._member))
        async with asyncio.timeout(None) as ending, aclosing(views):
            with SilenceWatch(DIRECTORY_SILENCE_S, lambda: _end_now(ending)) as silence:
                async for view in views:
                    silence.observe()
                    backoff.succeeded()
                    self.is_current, self._is_told = True, False
                    on_view(view)
