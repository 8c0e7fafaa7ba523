"""The one loop around every pure core: events go in with the time, actions are performed, ticks come in time.

A core is synchronous and knows neither clock nor IO (`Core`). `CoreDriver` owns everything else that the
router, the worker, the store node and the control plane would each write again: the order of events, the
timer, what an error means, and the end. A process adds a table that names a performer for each action.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from types import UnionType
from typing import Any, Generic, Protocol, TypeVar, get_args

from baton.wire.crash import Crash

TICK_MIN_S = 0.001
"""The resolution of the loop's timers. A tick that is due already comes after this long, not at once."""

PAUSE_S = 0.25
"""A timer later than this means that this process was held up (a suspended machine, a busy core)."""

Clock = Callable[[], float]
"""Seconds that never go back."""

Event = TypeVar("Event")
Event_contra = TypeVar("Event_contra", contravariant=True)
Action = TypeVar("Action")
Action_co = TypeVar("Action_co", covariant=True)
Action_contra = TypeVar("Action_contra", contravariant=True)


class Core(Protocol[Event_contra, Action_co]):
    """Decisions of one process, as a function of its events and their times."""

    @property
    def next_tick_s(self) -> float | None:
        """The time by which the core wants a tick; None asks for none."""
        ...

    def handle(self, event: Event_contra, *, now_s: float) -> Iterable[Action_co]: ...


class CoreObserver(Protocol[Event_contra, Action_contra]):
    """Sees everything in the order in which it happens, for spans and metrics."""

    def on_event(self, event: Event_contra) -> None: ...

    def on_action(self, action: Action_contra) -> None: ...


Performers = Mapping[type, Callable[[Any], None]]
"""The performer of each type of action. A performer may post events; it must not wait."""


def performer(kind: type[Action], perform: Callable[[Action], None]) -> tuple[type, Callable[[Any], None]]:
    """Make one row of a table of performers, so that a type checker compares the two columns."""
    return kind, perform


def performers(actions: UnionType, *rows: tuple[type, Callable[[Any], None]]) -> Performers:
    """Make a table out of `performer` rows. Every member of `actions` has exactly one row, or this raises."""
    table = dict(rows)
    expected = set(get_args(actions))
    assert len(table) == len(rows), "an action has two performers"
    wrong = sorted(kind.__name__ for kind in expected ^ table.keys())
    assert not wrong, f"actions without a performer, or performers without an action: {', '.join(wrong)}"
    return table


class Timer:
    """One timer on the event loop, which is set again only when it is needed earlier.

    Deadlines of a busy core move later with almost every event. A timer that is too early costs one look
    when it fires, which is far less than setting it anew with every event.
    """

    def __init__(self, fire: Callable[[float], None], *, clock: Clock) -> None:
        """`fire` gets the seconds by which it is called too late. `clock` is that of the due times."""
        self._fire, self._clock = fire, clock
        self._handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._planned_s = inf
        self.due_s = inf
        """The due time for which it is set; infinite while it is not."""

    def need(self, due_s: float | None) -> None:
        """Fire at `due_s` at the latest."""
        if due_s is not None and due_s < self.due_s:
            self._set(due_s)

    def close(self) -> None:
        """Never fire again."""
        if self._handle is not None:
            self._handle.cancel()
        self.due_s = -inf

    def _set(self, due_s: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        now_s = self._clock()
        self.due_s, self._planned_s = due_s, max(due_s, now_s + TICK_MIN_S)
        # The loop is known when the timer is first set: who owns a timer may be made before the loop runs.
        self._loop = self._loop or asyncio.get_running_loop()
        self._handle = self._loop.call_later(self._planned_s - now_s, self._on_time)

    def _on_time(self) -> None:
        self._handle, self.due_s = None, inf
        self._fire(max(0.0, self._clock() - self._planned_s))


class CoreDriver(Generic[Event, Action]):
    """Drives one core on one event loop, without locks.

    An event is handled, and its actions are performed, before the next one begins. Events that are posted
    meanwhile are handled afterwards, in the order in which they were posted. An exception of the core or of
    a performer is a defect, and so is a panic of a native library, which leaves half of an event: it goes to
    `crash`, and nothing is handled any more.
    """

    def __init__(
        self,
        core: Core[Event, Action],
        *,
        tick: Event,
        performers: Performers,
        crash: Crash,
        clock: Clock = time.monotonic,
        observers: Sequence[CoreObserver[Event, Action]] = (),
        on_handled: Callable[[], None] | None = None,
        paused: Callable[[float], Event] | None = None,
    ) -> None:
        """`tick` is posted when `next_tick_s` has come. `on_handled` is called after each event and its
        actions. `paused` makes the event that says for how long this process was held up."""
        self.core, self.crash = core, crash
        self._tick, self._performers, self._clock = tick, performers, clock
        self._observers, self._on_handled, self._paused = tuple(observers), on_handled, paused
        self._events: deque[Event] = deque()
        self._is_handling = self._is_closed = False
        self._timer = Timer(self._on_timer, clock=clock)

    def post(self, event: Event) -> None:
        """Handle the event now, or right after the one that is being handled. Raises nothing but what ends
        the process."""
        if self._is_closed or self.crash.error is not None:
            return
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._handle(self._events.popleft())
            self._timer.need(self.core.next_tick_s)
        except BaseException as error:
            self.crash.report(error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._is_handling = False

    def stop_ticks(self) -> None:
        """Post no tick any more; other events are handled as before."""
        self._timer.close()

    def close(self) -> None:
        """Post no tick any more; events posted from now on change nothing."""
        self._is_closed = True
        self._timer.close()

    def _handle(self, event: Event) -> None:
        for observer in self._observers:
            observer.on_event(event)
        for action in self.core.handle(event, now_s=self._clock()):
            for observer in self._observers:
                observer.on_action(action)
            self._performers[type(action)](action)
        if self._on_handled is not None:
            self._on_handled()

    def _on_timer(self, late_s: float) -> None:
        if self._paused is not None and late_s > PAUSE_S:
            self.post(self._paused(late_s))
        next_s = self.core.next_tick_s
        if next_s is not None and next_s <= self._clock():
            self.post(self._tick)
        else:  # the core's deadlines have moved since the timer was set
            self._timer.need(next_s)
