"""Following the other routers: those that the directory lists, and those given by hand."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from baton.core.ids import RouterId
from baton.core.messages import MembershipView
from baton.core.sharing import RouterUpdate
from baton.wire.link import LinkBroken
from baton.wire.routers import followed
from router.decisions.events import PeerLost, PeerUpdated
from router.decisions.peer_loads import PEER_SILENCE_S
from router.live.drivers import Drivers
from router.live.sessions import Backoff
from router.live.silence import SilenceWatch

log = logging.getLogger(__name__)

FollowCall = Callable[[str, RouterId], AsyncGenerator[RouterUpdate]]
"""The call `baton.wire.routers.followed`, or a test's. Raises LinkBroken."""


class PeerFollower:
    """A follower with one task per router. Use it within `async with`."""

    def __init__(
        self,
        drivers: Drivers,
        router_id: RouterId,
        *,
        addresses: Iterable[str] = (),
        follow: FollowCall = followed,
    ) -> None:
        """`addresses` are followed whatever the directory says. Our own among them does no harm."""
        self._drivers, self._router_id, self._follow = drivers, router_id, follow
        self._given = frozenset(addresses)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "PeerFollower":
        self._follow_all(self._given)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_view(self, view: MembershipView) -> None:
        listed = {r.address for r in view.routers if r.address and r.router_id != self._router_id}
        self._follow_all(self._given | listed)

    def _follow_all(self, wanted: Iterable[str]) -> None:
        addresses = frozenset(wanted)
        for address in sorted(addresses - self._tasks.keys()):
            task = asyncio.create_task(self._keep(address), name=f"router {address}")
            task.add_done_callback(self._ended)
            self._tasks[address] = task
        for address in sorted(self._tasks.keys() - addresses):
            self._tasks.pop(address).cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._drivers.crash(error)

    async def _keep(self, address: str) -> None:
        backoff = Backoff()
        while True:
            try:
                if await self._listen(address, backoff):
                    return
            except LinkBroken as error:
                log.debug("router at %s: %s", address, error)
            except TimeoutError:
                log.info("router at %s is silent", address)
            await asyncio.sleep(backoff.next_s())

    async def _listen(self, address: str, backoff: Backoff) -> bool:
        """Handle updates until the stream ends. Returns whether it turned out to be our own."""
        followed_id: RouterId | None = None
        try:
            async with (
                asyncio.timeout(None) as ending,
                aclosing(self._follow(address, self._router_id)) as updates,
            ):
                with SilenceWatch(PEER_SILENCE_S, lambda: _end_now(ending)) as silence:
                    async for update in updates:
                        if update.router_id == self._router_id:
                            return True
                        if followed_id is None:
                            log.info("following router %s at %s", update.router_id, address)
                            followed_id = update.router_id
                        if not update.is_snapshot and update.router_id not in self._drivers.peers:
                            # It was given up while this process stood still. Changes say nothing without a
                            # snapshot, and a new stream begins with one.
                            raise LinkBroken(f"{update.router_id} was given up meanwhile")
                        silence.observe()
                        backoff.succeeded()
                        self._drivers.feed(PeerUpdated(update))
        finally:
            if followed_id is not None:
                self._drivers.feed(PeerLost(followed_id))
        return False


def _end_now(ending: asyncio.Timeout) -> None:
    if not ending.expired():
        ending.reschedule(0.0)
