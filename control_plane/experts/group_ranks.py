"""The ranks of one group and their processes: started, restarted with a backoff, killed until they end. Pure.

A rank has a name ("experts-decode-0") with at most one process at a time. A rank that leaves keeps its name
until its process has ended; the one that takes its place has another name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto

from baton.core.experts import ExpertRankHello, ExpertRankPhase, ExpertRankRetired
from baton.core.ids import ExpertRankId
from control_plane.experts.group_values import (
    ExpertGroupAction,
    ExpertGroupPolicy,
    KillExpertRank,
    StartExpertRank,
    TellExpertRank,
)


class ExpertRankLife(StrEnum):
    WAITING = auto()
    """There is no process, and one will be started."""
    STARTING = auto()
    READY = auto()
    DRAINING = auto()
    ENDING = auto()
    """It is in no map, and was told to end."""
    KILLING = auto()


_L = ExpertRankLife
_PHASES = {
    _L.STARTING: ExpertRankPhase.STARTING,
    _L.READY: ExpertRankPhase.READY,
    _L.DRAINING: ExpertRankPhase.DRAINING,
    _L.ENDING: ExpertRankPhase.DRAINING,
    _L.KILLING: ExpertRankPhase.LOST,
}


@dataclass(slots=True)
class ExpertRankEntry:
    name: str
    state: ExpertRankLife
    since_s: float
    due_s: float | None
    """Instant at which the state ends if nothing happens. None: it may last."""
    rank_id: ExpertRankId | None = None
    hello: ExpertRankHello | None = None
    stream: int = 0
    beat_s: float = 0.0
    """Instant of the last sign of life."""
    rows: int = 0
    busy_s: float = 0.0
    ready_since_s: float | None = None
    is_leaving: bool = False
    """No process of this name is started any more."""
    deaths_in_a_row: int = 0
    last_exit: str = ""
    kills: int = 0
    load_failures: int = 0
    suspects: dict[str, float] = field(default_factory=dict[str, float])
    """Callers that suspect it, and since when."""

    @property
    def is_serving(self) -> bool:
        """Whether it has said hello and maps may name it."""
        return self.state in (_L.READY, _L.DRAINING) and self.hello is not None

    @property
    def phase(self) -> ExpertRankPhase:
        if self.state is _L.WAITING:
            return ExpertRankPhase.LOST if self.last_exit else ExpertRankPhase.STARTING
        return _PHASES[self.state]

    def to(self, state: ExpertRankLife, *, now_s: float, due_s: float | None) -> None:
        self.state, self.since_s, self.due_s = state, now_s, due_s


class ExpertRankBook:
    """The ranks of one group. `life` is unique per control plane process, so that ids are never used
    twice."""

    def __init__(self, prefix: str, policy: ExpertGroupPolicy, *, life: str) -> None:
        self._prefix, self._policy, self._life = prefix, policy, life
        self.wanted = 0
        self.is_known = False
        """Somebody has said how many are wanted. Until then, adopted ranks are just kept."""
        self.avoided: frozenset[str] = frozenset()
        self.entries: dict[str, ExpertRankEntry] = {}
        self._start_count = 0

    @property
    def next_tick_s(self) -> float | None:
        return min((e.due_s for e in self.entries.values() if e.due_s is not None), default=None)

    def of(self, rank_id: ExpertRankId) -> ExpertRankEntry | None:
        """The rank whose present process has this id."""
        return next((e for e in self.entries.values() if e.rank_id == rank_id), None)

    @property
    def serving(self) -> list[ExpertRankEntry]:
        return [entry for _, entry in sorted(self.entries.items()) if entry.is_serving]

    @property
    def coming(self) -> int:
        """Ranks that will say hello if nothing goes wrong."""
        started = (_L.WAITING, _L.STARTING, _L.KILLING)
        return sum(e.state in started and not e.is_leaving for e in self.entries.values())

    @property
    def staying(self) -> int:
        """Ranks that are not leaving."""
        return sum(not entry.is_leaving for entry in self.entries.values())

    def adopt(self, rank_id: ExpertRankId, name: str, *, now_s: float) -> Iterator[ExpertGroupAction]:
        if name in self.entries:
            yield KillExpertRank(rank_id, f"another {name} exists")
            return
        due_s = now_s + self._policy.adopt_s
        self.entries[name] = ExpertRankEntry(name, _L.STARTING, now_s, due_s, rank_id)

    def converge(self, *, now_s: float) -> Iterator[ExpertGroupAction]:
        """Start ranks that are missing, and let those leave that are too many or on a node to be left."""
        if not self.is_known:
            return
        for entry in self.entries.values():
            node = entry.hello.node if entry.hello is not None else ""
            if entry.state is _L.READY and node and node in self.avoided:
                self.drain(entry, now_s=now_s)
        staying = [e for _, e in sorted(self.entries.items()) if not e.is_leaving]
        order = [_L.WAITING, _L.KILLING, _L.STARTING, _L.READY]
        surplus = sorted(staying, key=lambda e: (order.index(e.state), -self._number(e.name)))
        for entry in surplus[: max(0, len(staying) - self.wanted)]:
            yield from self._leave(entry, now_s)
        for _ in range(self.wanted - len(staying)):
            number = next(n for n in range(len(self.entries) + 1) if self._name(n) not in self.entries)
            name = self._name(number)
            self.entries[name] = ExpertRankEntry(name, _L.WAITING, now_s, now_s)
        yield from self.tick(now_s=now_s)

    def _name(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    def _number(self, name: str) -> int:
        number = name.removeprefix(f"{self._prefix}-")
        return int(number) if number.isdecimal() else 0

    def _leave(self, entry: ExpertRankEntry, now_s: float) -> Iterator[ExpertGroupAction]:
        entry.is_leaving = True
        match entry.state:
            case _L.WAITING:
                del self.entries[entry.name]
            case _L.STARTING:
                yield self.kill(entry, "it is not wanted any more", now_s=now_s)
            case _L.READY:
                self.drain(entry, now_s=now_s)
            case _:
                pass

    def drain(self, entry: ExpertRankEntry, *, now_s: float) -> None:
        entry.is_leaving = True
        entry.to(_L.DRAINING, now_s=now_s, due_s=None)

    def retire(self, entry: ExpertRankEntry, *, now_s: float) -> TellExpertRank:
        assert entry.rank_id is not None
        entry.to(_L.ENDING, now_s=now_s, due_s=now_s + self._policy.retire_s)
        return TellExpertRank(entry.rank_id, ExpertRankRetired("other ranks have its experts"))

    def kill(self, entry: ExpertRankEntry, reason: str, *, now_s: float) -> KillExpertRank:
        assert entry.rank_id is not None
        entry.last_exit, entry.kills = reason, 1
        entry.to(_L.KILLING, now_s=now_s, due_s=now_s + self._policy.kill_again_s)
        return KillExpertRank(entry.rank_id, reason)

    def ready(self, entry: ExpertRankEntry, hello: ExpertRankHello, stream: int, *, now_s: float) -> None:
        entry.hello, entry.stream, entry.beat_s, entry.ready_since_s = hello, stream, now_s, now_s
        entry.to(_L.READY, now_s=now_s, due_s=None)

    def exited(self, entry: ExpertRankEntry, reason: str, *, now_s: float) -> None:
        """The process has ended. Another one is started after a while, unless the rank was leaving."""
        if entry.is_leaving:
            del self.entries[entry.name]
            return
        policy = self._policy.restart
        if entry.ready_since_s is not None and now_s - entry.ready_since_s >= policy.stable_s:
            entry.deaths_in_a_row = 0
        entry.deaths_in_a_row += 1
        entry.rank_id, entry.hello, entry.ready_since_s = None, None, None
        entry.suspects.clear()
        entry.rows, entry.busy_s, entry.load_failures = 0, 0.0, 0
        if entry.state is not _L.KILLING:
            entry.last_exit = reason
        entry.to(_L.WAITING, now_s=now_s, due_s=now_s + policy.delay_s(entry.deaths_in_a_row))

    def tick(self, *, now_s: float) -> Iterator[ExpertGroupAction]:
        for entry in list(self.entries.values()):
            if entry.due_s is None or now_s < entry.due_s:
                continue
            match entry.state:
                case _L.WAITING:
                    yield self._start(entry, now_s)
                case _L.STARTING:
                    yield self.kill(entry, "it did not start in time", now_s=now_s)
                case _L.ENDING:
                    yield self.kill(entry, "it did not end in time", now_s=now_s)
                case _L.KILLING if entry.kills >= self._policy.kills_max:
                    self.exited(entry, entry.last_exit, now_s=now_s)
                case _L.KILLING:
                    assert entry.rank_id is not None
                    entry.kills += 1
                    entry.due_s = now_s + self._policy.kill_again_s
                    yield KillExpertRank(entry.rank_id, "its end is not confirmed")
                case _L.READY | _L.DRAINING:
                    raise AssertionError(f"{entry.name} is {entry.state} and has a timeout")

    def _start(self, entry: ExpertRankEntry, now_s: float) -> StartExpertRank:
        self._start_count += 1
        entry.rank_id = ExpertRankId(f"{entry.name}.{self._life}{self._start_count:x}")
        entry.to(_L.STARTING, now_s=now_s, due_s=now_s + self._policy.restart.start_timeout_s)
        reason = f"after {entry.last_exit}" if entry.last_exit else "wanted"
        return StartExpertRank(entry.rank_id, max(1, self.wanted), reason, tuple(sorted(self.avoided)))
