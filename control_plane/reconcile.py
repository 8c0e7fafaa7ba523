"""Which worker processes there should be, and what to do about the difference. Pure.

A replica is a name ("decode-0"); it has at most one process life at a time. The next life is started
only when the end of the last one is *confirmed* (`ReplicaExited`), so two lives of one name never run
side by side: a silent process is killed first, and killed again until its end is known.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import assert_never

import msgspec

from baton.core.ids import WorkerId
from baton.core.lifecycle import Lifecycle
from baton.core.messages import Role

KILL_CONFIRM_S = 2.0
"""A killed process whose end is not confirmed after this long is killed again."""

# --- events ---------------------------------------------------------------------------------------


class SetDesired(msgspec.Struct, frozen=True):
    """How many replicas of each role there should be; a role left out has none."""

    counts: Mapping[Role, int]


class ReplicaExited(msgspec.Struct, frozen=True):
    """The process is dead, or could not be started. An id that is not the current life: no effect."""

    worker_id: WorkerId
    reason: str


class LeaseLapsed(msgspec.Struct, frozen=True):
    """The directory has not heard from it for a lease."""

    worker_id: WorkerId


class MemberSeen(msgspec.Struct, frozen=True):
    """The directory heard from it: it serves."""

    worker_id: WorkerId


class Tick(msgspec.Struct, frozen=True):
    """The time `next_tick_s` named has come (or an earlier one: harmless)."""


ReconcileEvent = SetDesired | ReplicaExited | LeaseLapsed | MemberSeen | Tick

# --- actions --------------------------------------------------------------------------------------


class StartReplica(msgspec.Struct, frozen=True):
    """Answered by MemberSeen or ReplicaExited; after `start_timeout_s` of neither it is killed."""

    worker_id: WorkerId
    role: Role
    because: str


class DrainReplica(msgspec.Struct, frozen=True):
    """Let it finish what it holds, then end. Killed after `drain_timeout_s`."""

    worker_id: WorkerId
    because: str


class KillReplica(msgspec.Struct, frozen=True):
    """At once and hard: it may be hanging. Answered by ReplicaExited; repeated until then."""

    worker_id: WorkerId
    because: str


ReconcileAction = StartReplica | DrainReplica | KillReplica

# --- the lifecycle of a replica -------------------------------------------------------------------


class ReplicaPhase(StrEnum):
    WAITING = auto()
    """No process; the next is due at `due_s`."""
    STARTING = auto()
    RUNNING = auto()
    DRAINING = auto()
    KILLING = auto()


_LEGAL: dict[ReplicaPhase, frozenset[ReplicaPhase]] = {
    ReplicaPhase.WAITING: frozenset({ReplicaPhase.STARTING}),
    ReplicaPhase.STARTING: frozenset({ReplicaPhase.RUNNING, ReplicaPhase.KILLING, ReplicaPhase.WAITING}),
    ReplicaPhase.RUNNING: frozenset({ReplicaPhase.DRAINING, ReplicaPhase.KILLING, ReplicaPhase.WAITING}),
    ReplicaPhase.DRAINING: frozenset({ReplicaPhase.KILLING, ReplicaPhase.WAITING}),
    ReplicaPhase.KILLING: frozenset({ReplicaPhase.WAITING}),
}


class ReplicaStatus(msgspec.Struct, frozen=True):
    """For people: the ready check, the log, the dashboard."""

    name: str
    role: Role
    phase: ReplicaPhase
    worker_id: WorkerId | None
    deaths_in_a_row: int
    last_exit: str


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Seconds. A life that served for `stable_s` ends the row of deaths."""

    backoff_s: float
    backoff_max_s: float
    start_timeout_s: float
    drain_timeout_s: float
    stable_s: float

    def delay_s(self, deaths_in_a_row: int) -> float:
        """Before the start that follows the n-th death in a row (from 1)."""
        doublings = min(deaths_in_a_row - 1, 60)  # 2**60 is beyond any bound, and a float still
        return min(self.backoff_s * 2.0**doublings, self.backoff_max_s)


@dataclass(slots=True)
class _Replica:
    name: str
    role: Role
    life: Lifecycle[ReplicaPhase]
    due_s: float | None
    """When the phase is over if nothing happens; None: it may last."""
    worker_id: WorkerId | None = None
    serving_since_s: float | None = None
    deaths_in_a_row: int = 0
    is_wanted: bool = True
    last_exit: str = ""


@dataclass(slots=True)
class Reconciler:
    """`life` is unique per control plane process, so that worker ids are never used twice."""

    policy: RestartPolicy
    life: str
    _replicas: dict[str, _Replica] = field(default_factory=dict[str, _Replica])
    _start_count: int = 0

    @property
    def next_tick_s(self) -> float | None:
        return min((r.due_s for r in self._replicas.values() if r.due_s is not None), default=None)

    @property
    def is_settled(self) -> bool:
        """Every wanted replica serves and no other process is left."""
        phases = (r.is_wanted and r.life.phase is ReplicaPhase.RUNNING for r in self._replicas.values())
        return all(phases)

    def status(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(r.name, r.role, r.life.phase, r.worker_id, r.deaths_in_a_row, r.last_exit)
            for _, r in sorted(self._replicas.items())
        ]

    def handle(self, event: ReconcileEvent, *, now_s: float) -> list[ReconcileAction]:
        match event:
            case SetDesired(counts):
                return list(self._set_desired(counts, now_s))
            case ReplicaExited(worker_id, reason):
                if replica := self._of(worker_id):
                    self._exited(replica, reason, now_s)
                return list(self._tick(now_s))
            case LeaseLapsed(worker_id):
                replica = self._of(worker_id)
                if replica and replica.life.phase in (ReplicaPhase.RUNNING, ReplicaPhase.DRAINING):
                    return [self._kill(replica, "its lease lapsed", now_s)]
                return []
            case MemberSeen(worker_id):
                replica = self._of(worker_id)
                if replica and replica.life.phase is ReplicaPhase.STARTING:
                    replica.life.to(ReplicaPhase.RUNNING, now_s=now_s, cause="first heartbeat")
                    replica.due_s, replica.serving_since_s = None, now_s
                return []
            case Tick():
                return list(self._tick(now_s))
            case _:
                assert_never(event)

    def _of(self, worker_id: WorkerId) -> _Replica | None:
        """The replica whose current life this is."""
        return next((r for r in self._replicas.values() if r.worker_id == worker_id), None)

    def _set_desired(self, counts: Mapping[Role, int], now_s: float) -> Iterator[ReconcileAction]:
        wanted = {f"{role}-{i}": role for role in Role for i in range(counts.get(role, 0))}
        for name, role in wanted.items():
            if name not in self._replicas:
                life = Lifecycle(ReplicaPhase.WAITING, _LEGAL, now_s=now_s)
                self._replicas[name] = _Replica(name, role, life, due_s=now_s)
        for name, replica in list(self._replicas.items()):
            replica.is_wanted = name in wanted
            if not replica.is_wanted:
                yield from self._retire(replica, now_s)
        yield from self._tick(now_s)

    def _retire(self, replica: _Replica, now_s: float) -> Iterator[ReconcileAction]:
        match replica.life.phase:
            case ReplicaPhase.WAITING:
                del self._replicas[replica.name]
            case ReplicaPhase.STARTING:
                yield self._kill(replica, "no longer wanted", now_s)
            case ReplicaPhase.RUNNING:
                replica.life.to(ReplicaPhase.DRAINING, now_s=now_s, cause="no longer wanted")
                replica.due_s = now_s + self.policy.drain_timeout_s
                yield DrainReplica(self._id(replica), "no longer wanted")
            case ReplicaPhase.DRAINING | ReplicaPhase.KILLING:
                pass  # on its way out already

    def _exited(self, replica: _Replica, reason: str, now_s: float) -> None:
        served_s = 0.0 if replica.serving_since_s is None else now_s - replica.serving_since_s
        if replica.life.phase is ReplicaPhase.DRAINING or served_s >= self.policy.stable_s:
            replica.deaths_in_a_row = 0
        replica.deaths_in_a_row += 1
        replica.life.to(ReplicaPhase.WAITING, now_s=now_s, cause=reason)
        replica.worker_id, replica.serving_since_s, replica.last_exit = None, None, reason
        replica.due_s = now_s + self.policy.delay_s(replica.deaths_in_a_row)
        if not replica.is_wanted:
            del self._replicas[replica.name]

    def _tick(self, now_s: float) -> Iterator[ReconcileAction]:
        for replica in self._replicas.values():
            if replica.due_s is None or now_s < replica.due_s:
                continue
            match replica.life.phase:
                case ReplicaPhase.WAITING:
                    yield self._start(replica, now_s)
                case ReplicaPhase.STARTING:
                    yield self._kill(replica, "it did not start in time", now_s)
                case ReplicaPhase.DRAINING:
                    yield self._kill(replica, "it did not drain in time", now_s)
                case ReplicaPhase.KILLING:
                    replica.due_s = now_s + KILL_CONFIRM_S
                    yield KillReplica(self._id(replica), "its end is not confirmed")
                case ReplicaPhase.RUNNING:
                    raise AssertionError(f"{replica.name} runs and has a due time")

    def _start(self, replica: _Replica, now_s: float) -> StartReplica:
        self._start_count += 1
        replica.worker_id = WorkerId(f"{replica.name}.{self.life}{self._start_count:x}")
        because = f"after {replica.last_exit}" if replica.last_exit else "wanted"
        replica.life.to(ReplicaPhase.STARTING, now_s=now_s, cause=because)
        replica.due_s = now_s + self.policy.start_timeout_s
        return StartReplica(replica.worker_id, replica.role, because)

    def _kill(self, replica: _Replica, because: str, now_s: float) -> KillReplica:
        replica.life.to(ReplicaPhase.KILLING, now_s=now_s, cause=because)
        replica.due_s = now_s + KILL_CONFIRM_S
        return KillReplica(self._id(replica), because)

    def _id(self, replica: _Replica) -> WorkerId:
        assert replica.worker_id is not None, f"{replica.name} has no process: {list(replica.life.story)}"
        return replica.worker_id
