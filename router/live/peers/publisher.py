"""Publishing the load of this router to those that follow it, a few times a second."""

import asyncio
from collections.abc import AsyncIterator

from baton.core.ids import RouterId
from baton.core.recent_requests import RecentRequestsQuery, RecentRequestsReply
from baton.core.sharing import RouterUpdate
from baton.wire.routers import TooManyFollowers
from router.live.drivers import Drivers
from router.live.recent_requests import RecentRequests

CHANGES_EVERY_S = 0.025
"""Interval of updates while something changes."""

KEEPALIVE_EVERY_S = 0.5
"""Interval of updates while nothing changes: silence means loss."""

FOLLOWERS_MAX = 64
"""Most routers that follow this one. Each costs a queue and its share of every update."""

UNREAD_MAX = 80
"""Most updates that wait for a follower. Beyond them it must follow anew, from a snapshot."""


class PeerPublisher:
    """The implementation of `baton.wire.routers.RouterHandler`."""

    def __init__(
        self, drivers: Drivers, router_id: RouterId, recent_requests: RecentRequests | None = None
    ) -> None:
        self._drivers, self._router_id = drivers, router_id
        self._recent_requests = recent_requests or RecentRequests()
        self._queues: dict[RouterId, asyncio.Queue[RouterUpdate | None]] = {}
        """The updates for each follower."""
        self._is_followed = asyncio.Event()

    async def follow(self, router_id: RouterId) -> AsyncIterator[RouterUpdate]:
        peers = self._drivers.peers
        if router_id not in self._queues and len(self._queues) >= FOLLOWERS_MAX:
            raise TooManyFollowers(f"{FOLLOWERS_MAX} routers follow this one")
        self._send_changes()  # Earlier followers must get the changes that the snapshot has.
        queue: asyncio.Queue[RouterUpdate | None] = asyncio.Queue(UNREAD_MAX)
        if not self._queues:
            peers.listen(is_followed=True)
        replaced = self._queues.get(router_id)
        self._queues[router_id] = queue
        if replaced is not None:  # the stream before is not known to be broken yet
            _end(replaced)
        self._is_followed.set()
        try:
            yield peers.snapshot(self._router_id)
            while (update := await queue.get()) is not None:
                yield update
        finally:
            self._drop(router_id, queue)

    def recent_requests(self, wanted: RecentRequestsQuery) -> RecentRequestsReply:
        return self._recent_requests.reply(wanted, self._router_id)

    async def run(self) -> None:
        """Publish changes until cancelled."""
        loop = asyncio.get_running_loop()
        sent_s = 0.0
        while True:
            await self._is_followed.wait()
            await asyncio.sleep(CHANGES_EVERY_S)
            if self._send_changes():
                sent_s = loop.time()
            elif loop.time() - sent_s >= KEEPALIVE_EVERY_S:
                sent_s = loop.time()
                self._put(RouterUpdate(self._router_id))

    def _send_changes(self) -> bool:
        update = self._drivers.peers.changes(self._router_id)
        if update is not None:
            self._put(update)
        return update is not None

    def _put(self, update: RouterUpdate) -> None:
        for router_id, queue in list(self._queues.items()):
            if queue.full():
                self._drop(router_id, queue)
                _end(queue)
            else:
                queue.put_nowait(update)

    def _drop(self, router_id: RouterId, queue: asyncio.Queue[RouterUpdate | None]) -> None:
        if self._queues.get(router_id) is queue:
            del self._queues[router_id]
        if not self._queues and self._is_followed.is_set():
            self._is_followed.clear()
            self._drivers.peers.listen(is_followed=False)


def _end(queue: asyncio.Queue[RouterUpdate | None]) -> None:
    """Have the stream that reads this queue end."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(None)
