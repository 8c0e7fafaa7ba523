"""The asyncio adapter around `WorkerCore`: events go in, actions are performed.

One event loop owns the core and all sessions, one engine thread computes steps, and the transfer
manager moves bytes. Nothing here decides anything.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, assert_never

from baton.core.ids import RouterId, WorkerId
from baton.core.messages import (
    PeerRef,
    ReaderMessage,
    RouterMessage,
    SourceMessage,
    WorkerMessage,
)
from baton.core.steps import StepPlan, StepResult
from baton.core.store import WorkerToStore
from kv_transfer.read import BlockRead, ReadDone, ReadEvent
from worker import events as e

log = logging.getLogger(__name__)

TICK_MIN_S = 0.001
"""Resolution of the loop's timers; a tick that is due is not scheduled closer than that."""


class StepOverdue(Exception):
    pass


class Core(Protocol):
    """What this adapter needs of `worker.core.WorkerCore`."""

    @property
    def next_tick_s(self) -> float | None: ...

    @property
    def is_idle(self) -> bool: ...

    def handle(self, event: e.WorkerEvent, *, now_s: float) -> list[e.WorkerAction]: ...


class Ports(Protocol):
    """Where actions go. None of these calls waits or raises."""

    def to_router(self, router_id: RouterId, message: WorkerMessage) -> None: ...

    def to_reader(self, reader: WorkerId, message: SourceMessage) -> None: ...

    def to_source(self, source: PeerRef, message: ReaderMessage) -> None: ...

    def start_read(self, read: BlockRead) -> None: ...

    def to_store(self, message: WorkerToStore) -> None: ...

    def copy_to_store(self, copy: e.CopyToStore) -> None: ...

    def copy_from_store(self, copy: e.CopyFromStore) -> None: ...


class Observer(Protocol):
    """Is shown everything, in order: spans, metrics."""

    def saw(self, event: e.WorkerEvent) -> None: ...

    def did(self, action: e.WorkerAction) -> None: ...


class CoreDriver:
    """Feeds the core and performs what it says. Runs on one event loop, in one thread.

    An action may cause an event at once (a session that turns out to be broken): events wait in line
    and are handled in the order in which they were posted. An exception of core or engine is a bug or
    a broken device; it ends the process by way of `crashed`.
    """

    def __init__(
        self,
        core: Core,
        *,
        step: Callable[[StepPlan], Coroutine[Any, Any, StepResult]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        step_timeout_s: float,
        observers: Sequence[Observer] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core, self._observers = core, tuple(observers)
        self.ports: Ports | None = None
        self.idle = asyncio.Event()
        """Set while the core holds nothing for anybody."""
        self.crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._step, self._spawn, self._now = step, spawn, now
        self._step_timeout_s = step_timeout_s
        self._steps_open = 0
        self._line: deque[e.WorkerEvent] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = float("inf")

    def post(self, event: e.WorkerEvent) -> None:
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

    def close(self) -> None:
        """No further ticks; events posted from now on change nothing."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.crashed.done():
            self.crashed.cancel()

    def _handle(self, event: e.WorkerEvent) -> None:
        for observer in self._observers:
            observer.saw(event)
        for action in self.core.handle(event, now_s=self._now()):
            for observer in self._observers:
                observer.did(action)
            self._perform(action)
        (self.idle.set if self.core.is_idle else self.idle.clear)()

    def _perform(self, action: e.WorkerAction) -> None:
        assert self.ports is not None, "connect the ports before the first event"
        match action:
            case e.ToRouter(router_id, message):
                self.ports.to_router(router_id, message)
            case e.ToReader(reader, message):
                self.ports.to_reader(reader, message)
            case e.ToSource(source, message):
                self.ports.to_source(source, message)
            case BlockRead():
                self.ports.start_read(action)
            case e.ToStore(message):
                self.ports.to_store(message)
            case e.CopyToStore():
                self.ports.copy_to_store(action)
            case e.CopyFromStore():
                self.ports.copy_from_store(action)
            case e.RunStep(plan):
                self._spawn(self._run_step(plan))
            case _:
                assert_never(action)

    async def _run_step(self, plan: StepPlan) -> None:
        # Heartbeats go on while the device hangs, and so would everybody's trust in this worker. A step
        # that was planned ahead waits for the one before it.
        limit = asyncio.timeout(2 * self._step_timeout_s if self._steps_open else self._step_timeout_s)
        self._steps_open += 1
        try:
            async with limit:
                result = await self._step(plan)
        except Exception as raised:
            overdue = StepOverdue(f"the device hangs: a step takes longer than {self._step_timeout_s:g} s")
            error = overdue if limit.expired() else raised
            keys = ", ".join(str(item.key) for item in plan.items)
            error.add_note(f"in step {plan.step_number}, {plan.token_count} tokens of {keys}")
            self.crash(error)
            return
        finally:
            self._steps_open -= 1
        self.post(e.StepDone(result))

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

    def crash(self, error: BaseException) -> None:
        """The first error counts; nothing is handled afterwards."""
        if not self.crashed.done():
            self.crashed.set_result(error)


class CoreSink:
    """What sessions and reads report, as events of the core. Implements `RouterSink`, `ReaderSink`
    and `KVReaderSink`."""

    def __init__(self, post: Callable[[e.WorkerEvent], None], *, on_read: Callable[[ReadDone], None]) -> None:
        self._post, self._on_read = post, on_read

    def router_joined(self, router_id: RouterId) -> None:
        self._post(e.RouterJoined(router_id))

    def from_router(self, router_id: RouterId, message: RouterMessage) -> None:
        self._post(e.FromRouter(router_id, message))

    def router_lost(self, router_id: RouterId) -> None:
        self._post(e.RouterLost(router_id))

    def drain(self) -> None:
        self._post(e.Drain())

    def from_reader(self, reader: WorkerId, message: ReaderMessage) -> None:
        self._post(e.FromReader(reader, message))

    def reader_lost(self, reader: WorkerId) -> None:
        self._post(e.ReaderLost(reader))

    def from_source(self, source: WorkerId, message: SourceMessage) -> None:
        self._post(e.FromSource(source, message))

    def source_lost(self, source: WorkerId, message: str) -> None:
        self._post(e.SourceLost(source, message))

    def read_event(self, event: ReadEvent) -> None:
        if isinstance(event, ReadDone):
            self._on_read(event)
        self._post(event)
