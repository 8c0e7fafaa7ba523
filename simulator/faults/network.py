"""Sessions as ordered reliable streams that are delayed, stall and break.

A break loses what is in flight in both directions. Each end hears of it in its own time: at once on a
reset, much later on a silent partition, and a frozen process when it thaws.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from baton.core.messages import CancelSequence, KVGrant, KVReleased, KVRequest, StartSequence
from simulator.clock import VirtualClock
from simulator.faults.run_context import RunContext

SAFE_TWICE = (StartSequence, CancelSequence, KVRequest, KVReleased, KVGrant)
"""Messages whose receivers promise that a second copy, however late, changes nothing."""


class LocalClock:
    """The monotonic clock of one process. It has an origin of its own, is a little fast or slow, and stops
    while the machine is suspended."""

    __slots__ = ("_origin_s", "_rate", "_stopped_s", "_virtual")

    def __init__(self, virtual: VirtualClock, *, origin_s: float, rate: float) -> None:
        self._virtual, self._origin_s, self._rate = virtual, origin_s, rate
        self._stopped_s: float | None = None

    def now_s(self) -> float:
        return self._origin_s + self._rate * self._running_s()

    def virtual_s(self, local_s: float) -> float:
        """Return the virtual instant at which this clock shows `local_s`, if it does not stop before."""
        return self._virtual.now_s + (local_s - self.now_s()) / self._rate

    def stop(self) -> None:
        self._stopped_s = self._virtual.now_s

    def go_on(self) -> None:
        if self._stopped_s is not None:
            self._origin_s -= self._rate * (self._virtual.now_s - self._stopped_s)
            self._stopped_s = None

    def _running_s(self) -> float:
        return self._virtual.now_s if self._stopped_s is None else self._stopped_s


class SimProcess:
    """A process that is alive, frozen or dead, and handles what happens to it in order."""

    __slots__ = (
        "_inbox",
        "clock_trusted_from_s",
        "is_alive",
        "is_frozen",
        "local_clock",
        "name",
        "run",
        "runs_since_s",
    )

    def __init__(self, run: RunContext, name: str) -> None:
        self.run, self.name = run, name
        self.is_alive, self.is_frozen = True, False
        rng = run.stream(f"clock/{name}")
        self.local_clock = LocalClock(
            run.clock, origin_s=rng.uniform(0, 1000), rate=rng.uniform(0.995, 1.005)
        )
        self.clock_trusted_from_s = 0.0
        """The local clock may be late by more than any slack until this instant, because it stopped not long
        ago."""
        self._inbox: list[Callable[[], None]] = []
        self.runs_since_s = 0.0
        """When it was last thawed."""

    def post(self, happening: Callable[[], None]) -> None:
        """Handle an event now when alive, keep it for the thaw when frozen, drop it when dead."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._inbox.append(happening)
        else:
            happening()

    def freeze(self, *, stops_clock: bool = False) -> None:
        """Stop the process, as SIGSTOP does; with `stops_clock`, as a suspended machine."""
        self.is_frozen = True
        if stops_clock:
            self.local_clock.stop()
            self.clock_trusted_from_s = float("inf")

    def thaw(self, *, mistrust_s: float = 0.0) -> None:
        """Go on, and handle in order what happened meanwhile."""
        if not self.is_alive or not self.is_frozen:
            return
        self.is_frozen = False
        self.runs_since_s = self.run.clock.now_s
        self.local_clock.go_on()
        if self.clock_trusted_from_s == float("inf"):
            self.clock_trusted_from_s = self.run.clock.now_s + mistrust_s
        inbox, self._inbox = self._inbox, []
        for happening in inbox:
            self.post(happening)

    def die(self) -> None:
        self.is_alive = False
        self._inbox.clear()


class SessionEnd(Protocol):
    """One end of a session."""

    @property
    def process(self) -> SimProcess: ...

    def on_message(self, session: "SimSession", message: object) -> None: ...

    def on_break(self, session: "SimSession", reason: str) -> None: ...


class SimSession:
    """A connection between ends[0], which opened it, and ends[1]."""

    __slots__ = ("_last_s", "_under_way", "ends", "is_open", "network", "number", "stalled_until_s")

    def __init__(self, network: "Network", number: int, opener: SessionEnd, accepter: SessionEnd) -> None:
        self.network, self.number = network, number
        self.ends = (opener, accepter)
        self.is_open = True
        self.stalled_until_s = [0.0, 0.0]
        """Instants until which nothing arrives, one per end."""
        self._last_s = [0.0, 0.0]
        self._under_way: tuple[deque[object], deque[object]] = (deque(), deque())

    def send(self, to_end: int, message: object) -> None:
        """Send a message in order. It is lost, without a word, if the session breaks before it arrives."""
        if not self.is_open:
            return
        run = self.network.run
        self._under_way[to_end].append(message)
        arrives_s = max(run.clock.now_s + self.network.delay_s(), self._last_s[to_end])
        self._last_s[to_end] = arrives_s
        run.clock.at(arrives_s, lambda: self._arrive(to_end))
        if isinstance(message, SAFE_TWICE) and self.network.repeats():
            later_s = run.clock.now_s + self.network.repeat_after_s()
            self.network.last_repeat_s = max(self.network.last_repeat_s, later_s)
            run.clock.at(later_s, lambda: self._repeat(to_end, message))

    def _repeat(self, to_end: int, message: object) -> None:
        if self.is_open:
            end = self.ends[to_end]
            end.process.post(lambda: end.on_message(self, message))

    def _arrive(self, to_end: int) -> None:
        """Deliver the oldest message under way. There is one arrival per message sent."""
        if not self.is_open:
            return
        if self.network.run.clock.now_s < self.stalled_until_s[to_end]:
            self.network.run.clock.at(self.stalled_until_s[to_end], lambda: self._arrive(to_end))
            return
        message = self._under_way[to_end].popleft()
        end = self.ends[to_end]
        end.process.post(lambda: end.on_message(self, message))

    def under_way_to(self, to_end: int) -> Iterable[object]:
        """Messages that were sent and have not arrived."""
        return self._under_way[to_end]

    def stall(self, to_end: int, seconds: float) -> None:
        """Partition the session for a time shorter than anybody's patience, or longer: nothing arrives until
        it heals."""
        until_s = self.network.run.clock.now_s + seconds
        self.stalled_until_s[to_end] = max(self.stalled_until_s[to_end], until_s)

    def break_off(self, reason: str, *, noticed_after_s: tuple[float | None, float | None]) -> None:
        """Break the session. Each of `noticed_after_s` is the time after which that end hears of it; None
        means that it knows."""
        if not self.is_open:
            return
        self.is_open = False
        self.network.forget(self)
        for end, delay_s in zip(self.ends, noticed_after_s, strict=True):
            if delay_s is not None:
                self._notify(end, delay_s, reason)

    def _notify(self, end: SessionEnd, delay_s: float, reason: str) -> None:
        run = self.network.run
        run.clock.after(delay_s, lambda: end.process.post(lambda: end.on_break(self, reason)))


class Network:
    """All open sessions, and how slow the wire is at the moment."""

    __slots__ = (
        "_next_number",
        "_rng",
        "cut_off_until_s",
        "last_repeat_s",
        "latency_s",
        "repeat_chance",
        "run",
        "sessions",
        "slowness",
    )

    def __init__(self, run: RunContext, *, latency_s: float) -> None:
        self.run = run
        self.latency_s = latency_s
        self.slowness = 1.0
        self.repeat_chance = 0.0
        """Chance that a message which is safe to receive twice is repeated."""
        self.last_repeat_s = 0.0
        """When the last of all second copies comes."""
        self.sessions: dict[int, SimSession] = {}
        self.cut_off_until_s: dict[str, float] = {}
        """Processes that nobody can connect to, and until when."""
        self._rng = run.stream("network")
        self._next_number = 0

    def delay_s(self) -> float:
        """Draw a delay. It is mostly short and sometimes ten times that, because queues have tails."""
        draw = self._rng.random()
        tail = 10.0 if draw > 0.97 else 1.0
        return self.latency_s * self.slowness * tail * (0.5 + draw)

    def repeats(self) -> bool:
        return self.repeat_chance > 0 and self._rng.random() < self.repeat_chance

    def repeat_after_s(self) -> float:
        """Draw when a repeated message comes: soon, or when whatever it was about is long over."""
        self.run.counts["messages repeated"] += 1
        return self._rng.choice((1.5, 30.0, 500.0)) * self.latency_s * (1.0 + self._rng.random())

    def open(self, opener: SessionEnd, accepter: SessionEnd) -> SimSession:
        self._next_number += 1
        session = SimSession(self, self._next_number, opener, accepter)
        self.sessions[session.number] = session
        return session

    def forget(self, session: SimSession) -> None:
        self.sessions.pop(session.number, None)

    def sessions_of(self, process: SimProcess) -> list[SimSession]:
        return [s for s in self.sessions.values() if any(end.process is process for end in s.ends)]

    def is_cut_off(self, name: str) -> bool:
        return self.cut_off_for_s(name) > 0

    def cut_off_for_s(self, name: str) -> float:
        """Return for how much longer a process is cut off; 0 means that it is not."""
        return max(0.0, self.cut_off_until_s.get(name, 0.0) - self.run.clock.now_s)

    def process_died(self, process: SimProcess, *, noticed_s: float) -> None:
        """Break every session that the process had. The other ends hear after `noticed_s` and a little."""
        for session in self.sessions_of(process):
            other = 1 if session.ends[0].process is process else 0
            delay_s = noticed_s + self.delay_s()
            session.break_off(
                f"{process.name} died", noticed_after_s=(delay_s, None) if other == 0 else (None, delay_s)
            )
