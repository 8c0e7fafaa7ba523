"""The directory in one process's memory: the control plane's. A restart forgets everything, and the nodes
publish it again."""

import time
from collections.abc import Callable, Sequence

from baton.core.ids import BlockHash, NodeId
from baton.core.store import BlockLocation, StoreChanges, StoreMember
from baton.wire.core_driver import PAUSE_S, Timer
from kv_store.directory.book import BookChange, DirectoryBook

RETRIED_AFTER_S = 1.5
"""The time after which nodes whose calls failed have tried again (`registration.RETRY_S`)."""


class MemoryDirectory:
    """Implements `kv_store.directory.interface.Directory`; never raises DirectoryLost.

    `on_change` gets each node that joined, left or lapsed. `clock` gives seconds that never go back.
    """

    def __init__(
        self,
        *,
        entries_max: int,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[BookChange], None] = lambda change: None,
    ) -> None:
        self.book = DirectoryBook(entries_max)
        self._clock, self._on_change = clock, on_change
        self._timer = Timer(self._timer_fired, clock=clock)

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool:
        is_known, changes = self.book.renew(member, lease_s=lease_s, now_s=self._clock())
        self._report(changes)
        return is_known

    async def leave(self, node_id: NodeId) -> None:
        self._report(self.book.leave(node_id, now_s=self._clock()))

    async def members(self) -> tuple[StoreMember, ...]:
        return self.book.members

    async def publish(self, changes: StoreChanges) -> bool:
        return self.book.publish(changes)

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[BlockLocation, ...]]:
        return self.book.look_up(hashes)

    async def close(self) -> None:
        self._timer.close()

    def tick(self) -> None:
        """End the leases that are over. The directory's own timer calls it."""
        self._report(self.book.tick(now_s=self._clock()))

    def _report(self, changes: Sequence[BookChange]) -> None:
        for change in changes:
            self._on_change(change)
        self._timer.need(self.book.next_tick_s)

    def _timer_fired(self, late_s: float) -> None:
        if late_s > PAUSE_S:
            self.book.paused(late_s + RETRIED_AFTER_S)
        self.tick()
