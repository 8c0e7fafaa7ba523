"""What the components of a node share: the time, the actions so far, timers, limits and counts."""

import heapq
from collections.abc import Callable

from baton.config import StoreConfig
from baton.core.store import NodeRef
from kv_store.node.counts import Counts
from kv_store.node.events import NodeAction

HASHES_MAX = 4096
"""Hashes of one message; more come in several."""
SIZE_CLASSES_MAX = 16
WORKERS_MAX = 256
OFFERS_OPEN_MAX = 256
"""Open offers of one worker."""
LOADS_OPEN_MAX = 1024
"""Open loads of one worker."""
LOADS_WAITING_MAX = 1024
"""Loads that wait for room, over all workers and peers."""
LOOKUPS_MAX = 1024
LEASES_MAX = 256
"""Leases of one peer."""
PEERS_MAX = 1024


class Context:
    """The context of one core. `now_s` is the time of the event that is being handled; `emit` keeps the order
    of the actions."""

    def __init__(self, node: NodeRef, config: StoreConfig, *, now_s: float) -> None:
        self.node = node
        self.config = config
        self.now_s = now_s
        self.counts = Counts()
        self._actions: list[NodeAction] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._last_id = 0

    def emit(self, action: NodeAction) -> None:
        self._actions.append(action)

    def take_actions(self) -> list[NodeAction]:
        actions, self._actions = self._actions, []
        return actions

    def new_id(self) -> int:
        """A new id for an operation, read, look-up or fetch, unique in this node's life."""
        self._last_id += 1
        return self._last_id

    def ends_later(self, seconds: float) -> bool:
        """Whether this many seconds from now is after now. A span that a clock does not resolve is not."""
        return self.now_s + seconds > self.now_s

    @property
    def next_tick_s(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call `call` at `when_s`. Timers are never taken back: `call` looks whether it is still of any
        use."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when_s, self._timer_count, call))

    def run_due(self) -> None:
        """Run the timers that are due now. Timers that they set for now run in the next call."""
        due: list[Callable[[], None]] = []
        while self._timers and self._timers[0][0] <= self.now_s:
            due.append(heapq.heappop(self._timers)[2])
        for call in due:
            call()
