"""Publishing the load of this router to those that follow it, a few times a second."""

import asyncio
from collections.abc import AsyncIterator

from baton.core.ids import RouterId
from baton.core.recent_requests import RecentRequestsQuery, RecentRequestsReply
from baton.core.sharing import RouterUpdate
from router.live.drivers import Drivers
from router.live.recent_requests import RecentRequests

CHANGES_EVERY_S = 0.025
"""Interval of updates while something changes."""

KEEPALIVE_EVERY_S = 0.5
"""Interval of updates while nothing changes: silence means loss."""

UNREAD_MAX = 80
"""Most updates that wait for a follower. Beyond them it must follow anew, from a snapshot."""


class PeerPublisher:
    """The implementation of `baton.wire.routers.RouterHandler`."""

    def __init__(
        self, drivers: Drivers, router_id: RouterId, recent_requests: RecentRequests | None = None
    ) -> None:
        self._drivers, self._router_id = drivers, router_id
        self._recent_requests = recent_requests or RecentRequests()
        self._queues: set[asyncio.Queue[RouterUpdate | None]] = set()
        self._is_followed = asyncio.Event()

    async def follow(self, router_id: RouterId) -> AsyncIterator[RouterUpdate]:
        peers = self._drivers.peers
        self._send_changes()  # Earlier followers must get the changes that the snapshot has.
        queue: asyncio.Queue[RouterUpdate | None] = asyncio.Queue(UNREAD_MAX)
        if not self._queues:
            peers.listen(is_followed=True)
        self._queues.add(queue)
        self._is_followed.set()
        try:
            yield peers.snapshot(self._router_id)
            while (update := await queue.get()) is not None:
                yield update
        finally:
            self._drop(queue)

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
        for queue in list(self._queues):
            if queue.full():
                self._drop(queue)
                queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(update)

    def _drop(self, queue: asyncio.Queue[RouterUpdate | None]) -> None:
        self._queues.discard(queue)
        if not self._queues and self._is_followed.is_set():
            self._is_followed.clear()
            self._drivers.peers.listen(is_followed=False)
