"""The asyncio adapter around `NodeCore`: events go in, actions are performed. Nothing here decides."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from baton.core.ids import WorkerId
from baton.core.store import NodeRef, NodeToNode, StoreChanges, StoreToWorker
from kv_store.node import events as e
from kv_transfer.read import BlockRead

TICK_MIN_S = 0.001
"""Resolution of the loop's timers; a tick that is due is not scheduled closer than that."""


class Core(Protocol):
    """What this adapter needs of `kv_store.node.core.NodeCore`."""

    @property
    def next_tick_s(self) -> float | None: ...

    def handle(self, event: e.NodeEvent, *, now_s: float) -> list[e.NodeAction]: ...


class Ports(Protocol):
    """Where actions go. None of these calls waits or raises, but `open_space`: without memory there is no
    store."""

    def open_space(self, action: e.OpenSpace) -> None: ...

    def to_worker(self, worker_id: WorkerId, message: StoreToWorker) -> None: ...

    def drop_worker(self, worker_id: WorkerId, message: str) -> None: ...

    def to_peer(self, space: int, peer: NodeRef, message: NodeToNode) -> None: ...

    def read_ssd(self, action: e.ReadSsd) -> None: ...

    def write_ssd(self, action: e.WriteSsd) -> None: ...

    def forget_ssd(self, action: e.ForgetSsd) -> None: ...

    def forget_host(self, action: e.ForgetHost) -> None: ...

    def read_peer(self, read: BlockRead) -> None: ...

    def look_up(self, action: e.LookUp) -> None: ...

    def publish(self, changes: StoreChanges) -> None: ...


class Observer(Protocol):
    """Is shown everything, in order."""

    def saw(self, event: e.NodeEvent) -> None: ...

    def did(self, action: e.NodeAction) -> None: ...


class NodeDriver:
    """Feeds the core and performs what it says, on one event loop. Events wait in line and are handled in
    the order in which they were posted. An exception is a bug: it ends the process by way of `crashed`."""

    def __init__(
        self,
        core: Core,
        *,
        observers: Sequence[Observer] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core, self._observers, self._now = core, tuple(observers), now
        self.ports: Ports | None = None
        self.crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._line: deque[e.NodeEvent] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = float("inf")

    def post(self, event: e.NodeEvent) -> None:
        if self.crashed.done():
            return
        self._line.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._line:
                self._handle(self._line.popleft())
            self._reschedule()
        except Exception as error:
            self.crash(error)
        finally:
            self._is_handling = False

    def crash(self, error: BaseException) -> None:
        """The first error counts; nothing is handled afterwards."""
        if not self.crashed.done():
            self.crashed.set_result(error)

    def close(self) -> None:
        """No further ticks; events posted from now on change nothing."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.crashed.done():
            self.crashed.cancel()

    def _handle(self, event: e.NodeEvent) -> None:
        for observer in self._observers:
            observer.saw(event)
        for action in self.core.handle(event, now_s=self._now()):
            for observer in self._observers:
                observer.did(action)
            self._perform(action)

    def _perform(self, action: e.NodeAction) -> None:
        ports = self.ports
        assert ports is not None, "connect the ports before the first event"
        match action:
            case e.OpenSpace():
                ports.open_space(action)
            case e.ToWorker(worker_id, message):
                ports.to_worker(worker_id, message)
            case e.DropWorker(worker_id, message):
                ports.drop_worker(worker_id, message)
            case e.ToPeer(space, peer, message):
                ports.to_peer(space, peer, message)
            case e.ReadSsd():
                ports.read_ssd(action)
            case e.WriteSsd():
                ports.write_ssd(action)
            case e.ForgetSsd():
                ports.forget_ssd(action)
            case e.ForgetHost():
                ports.forget_host(action)
            case BlockRead():
                ports.read_peer(action)
            case e.LookUp():
                ports.look_up(action)
            case e.Publish(changes):
                ports.publish(changes)
            case _:
                assert_never(action)

    def _reschedule(self) -> None:
        due_s = self.core.next_tick_s
        if due_s == self._timer_due_s and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is None:
            return
        self._timer_due_s = due_s
        delay_s = max(TICK_MIN_S, due_s - self._now())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(e.Tick())
