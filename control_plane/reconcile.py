"""The reconciler decides which worker processes there should be, and what to do about the difference. Pure.

A replica is a name ("decode-0") with at most one process life at a time. The next life is started only when
the end of the last one is *confirmed* (`ReplicaExited`), so two lives of one name never run side by side: a
silent process is killed first, and killed again until its end is known.

A replica's role can change. If one role of a model has too many replicas and another too few, running workers
switch roles, and keep their weights, before any worker is stopped or started.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from baton.core.ids import WorkerId, replica_name
from baton.core.lifecycle import Lifecycle
from baton.core.messages import INFO_NOTE, MEMORY_NOTE, Member, Role
from baton.core.operate import Pool, ReplicaState, ReplicaStatus, Version, replica_prefix
from control_plane.reconcile_events import (
    Adopted,
    DrainReplica,
    DrainWanted,
    KillReplica,
    LeaseLapsed,
    MemberSeen,
    MemberSilent,
    ReconcileAction,
    ReconcileEvent,
    ReconcileTick,
    ReplicaExited,
    RestartPolicy,
    SetDesired,
    StartReplica,
    SwitchReplicaRole,
)
from control_plane.targets import ReplicaSummary, add_count, names_of, retirements, switches

__all__ = ("KILL_CONFIRM_S", "Reconciler", "ReplicaState", "RestartPolicy")

KILL_CONFIRM_S = 2.0
"""A killed process whose end is not confirmed after this long is killed again."""

_P = ReplicaState
_LEGAL: dict[ReplicaState, frozenset[ReplicaState]] = {
    _P.WAITING: frozenset({_P.STARTING}),
    _P.STARTING: frozenset({_P.RUNNING, _P.DRAINING, _P.KILLING, _P.WAITING}),
    _P.RUNNING: frozenset({_P.SUSPECT, _P.SWITCHING, _P.DRAINING, _P.KILLING, _P.WAITING}),
    _P.SUSPECT: frozenset({_P.RUNNING, _P.DRAINING, _P.KILLING, _P.WAITING}),
    _P.SWITCHING: frozenset({_P.RUNNING, _P.DRAINING, _P.KILLING, _P.WAITING}),
    _P.DRAINING: frozenset({_P.KILLING, _P.WAITING}),
    _P.KILLING: frozenset({_P.WAITING}),
}
_SERVING = (_P.RUNNING, _P.SUSPECT, _P.SWITCHING)
_ON_ITS_WAY_OUT = (_P.DRAINING, _P.KILLING)


@dataclass(slots=True)
class _ReplicaEntry:
    name: str
    model: str
    role: Role
    """Its wanted role."""
    version: Version
    life: Lifecycle[ReplicaState]
    due_s: float | None
    """Instant at which the state ends if nothing happens. None: it may last."""
    worker_id: WorkerId | None = None
    member: Member | None = None
    """Its last report to the directory."""
    serving_since_s: float | None = None
    adopted_since_s: float | None = None
    """Instant at which an earlier control plane started it. None once anything has happened to it since its
    adoption."""
    deaths_in_a_row: int = 0
    is_wanted: bool = True
    switches_to: Role | None = None
    """Role it was last told to take, while it switches."""
    is_excused: bool = False
    """Its end was ordered, and another life follows at once."""
    last_exit: str = ""

    @property
    def state(self) -> ReplicaState:
        return self.life.state

    def summary(self) -> ReplicaSummary:
        return ReplicaSummary(
            self.name, self.role, self.state, self.version.name, self.is_wanted, self.may_serve
        )

    @property
    def may_serve(self) -> bool:
        """It was adopted, and has not been heard since."""
        return self.state is _P.STARTING and self.adopted_since_s is not None


@dataclass(slots=True)
class Reconciler:
    """The reconciler of one cluster. `life` is unique per control plane process, so that worker ids are never
    used twice."""

    policy: RestartPolicy
    life: str
    _pools: tuple[Pool, ...] = ()
    _avoided: frozenset[str] = frozenset()
    """Nodes that workers must leave."""
    _replicas: dict[str, _ReplicaEntry] = field(default_factory=dict[str, _ReplicaEntry])
    _start_count: int = 0

    @property
    def next_tick_s(self) -> float | None:
        return min((r.due_s for r in self._replicas.values() if r.due_s is not None), default=None)

    @property
    def is_settled(self) -> bool:
        """Every wanted replica serves in its role and version, and no other process is left."""
        return all(self.is_pool_settled(model) for model in {r.model for r in self._replicas.values()})

    def is_pool_settled(self, model: str) -> bool:
        pool = next((p for p in self._pools if p.model == model), None)
        version = pool.version.name if pool else ""
        mine = [r for r in self._replicas.values() if r.model == model]
        return all(r.is_wanted and r.state is _P.RUNNING and r.version.name == version for r in mine)

    def status(self, *, now_s: float = 0.0) -> list[ReplicaStatus]:
        return [self._state(r, now_s) for _, r in sorted(self._replicas.items())]

    def _state(self, r: _ReplicaEntry, now_s: float) -> ReplicaStatus:
        since_s, _, reason = r.life.history[-1]
        if r.state is _P.RUNNING and r.adopted_since_s is not None:
            since_s = r.adopted_since_s
        return ReplicaStatus(
            name=r.name,
            model=r.model,
            role=r.role,
            state=r.state,
            for_s=max(0.0, now_s - since_s),
            version=r.version.name,
            worker_id=r.worker_id,
            node=r.member.node or r.member.host if r.member else "",
            deaths_in_a_row=r.deaths_in_a_row,
            last_exit=r.last_exit,
            reason=reason,
            address=r.member.address if r.member else "",
            metrics_address=r.member.metrics_address if r.member else "",
            shape=r.member.shape if r.member else "",
            memory=_memory(r.member.notes) if r.member else "",
        )

    def handle(self, event: ReconcileEvent, *, now_s: float) -> list[ReconcileAction]:
        return [*self._on(event, now_s), *self._converge(now_s), *self._tick(now_s)]

    def _on(self, event: ReconcileEvent, now_s: float) -> Iterator[ReconcileAction]:
        match event:
            case SetDesired():
                yield from self._set_desired(event, now_s)
            case Adopted():
                yield from self._adopt(event, now_s)
            case ReplicaExited(worker_id, reason):
                if replica := self._of(worker_id):
                    self._exited(replica, reason, now_s)
            case LeaseLapsed(worker_id):
                replica = self._of(worker_id)
                if replica and replica.state in (*_SERVING, _P.DRAINING):
                    yield self._kill(replica, "its lease lapsed", now_s)
            case MemberSilent(worker_id):
                replica = self._of(worker_id)
                if replica and replica.state is _P.RUNNING:
                    replica.adopted_since_s = None
                    replica.life.to(_P.SUSPECT, now_s=now_s, cause="it missed heartbeats")
            case MemberSeen(member):
                if replica := self._of(member.worker_id):
                    yield from self._seen(replica, member, now_s)
            case DrainWanted(worker_id, drain_reason):
                replica = self._of(worker_id)
                if replica and replica.state in _SERVING:
                    replica.is_excused = True
                    yield self._drain(replica, drain_reason, now_s)
            case ReconcileTick():
                pass
            case _:
                assert_never(event)

    def _set_desired(self, event: SetDesired, now_s: float) -> Iterator[ReconcileAction]:
        self._pools, self._avoided = event.pools, event.avoid
        for name, role in event.roles.items():
            if replica := self._replicas.get(name):
                replica.role = role
        for worker_id in sorted(event.leaving):
            if replica := self._of(worker_id):
                yield from self._retire(replica, "it was ordered to go", now_s)
        yield from self._leave_nodes(now_s)

    def _of(self, worker_id: WorkerId) -> _ReplicaEntry | None:
        """Return the replica whose current life has this worker id."""
        return next((r for r in self._replicas.values() if r.worker_id == worker_id), None)

    # --- events of workers ----------------------------------------------------------------------------

    def _seen(self, replica: _ReplicaEntry, member: Member, now_s: float) -> Iterator[ReconcileAction]:
        replica.member = member
        match replica.state:
            case _P.STARTING:
                replica.life.to(_P.RUNNING, now_s=now_s, cause="first heartbeat")
                began_s = replica.adopted_since_s
                replica.due_s, replica.serving_since_s = None, now_s if began_s is None else began_s
            case _P.SUSPECT:
                replica.life.to(_P.RUNNING, now_s=now_s, cause="it renewed its lease again")
            case _P.SWITCHING if member.role is replica.role and not member.is_draining:
                replica.life.to(_P.RUNNING, now_s=now_s, cause=f"it is a {member.role} worker now")
                replica.due_s = None
            case _P.RUNNING if member.is_draining:
                pass
            case _:
                return
        if member.is_draining:
            self._wait_for_drain(replica, now_s)
        elif member.node and member.node in self._avoided:
            replica.is_excused = True
            yield self._drain(replica, "its node is drained", now_s)

    def _wait_for_drain(self, replica: _ReplicaEntry, now_s: float) -> None:
        """Wait for a worker that drains by an order that is not ours, such as an earlier control plane's. It
        takes nothing new, so it does not count as running; it serves again, ends, or is killed in time."""
        replica.adopted_since_s = None
        replica.life.to(_P.SWITCHING, now_s=now_s, cause="it drains, and nobody here ordered that")
        replica.switches_to = replica.role
        replica.due_s = now_s + self.policy.drain_timeout_s + KILL_CONFIRM_S

    def _adopt(self, event: Adopted, now_s: float) -> Iterator[ReconcileAction]:
        """Add a worker of an earlier control plane."""
        name = replica_name(event.worker_id)
        if name in self._replicas:
            yield KillReplica(event.worker_id, f"another {name} exists")
            return
        life = Lifecycle(_P.WAITING, _LEGAL, now_s=now_s)
        life.to(_P.STARTING, now_s=now_s, cause="it was adopted from an earlier control plane")
        self._replicas[name] = _ReplicaEntry(
            name,
            event.model,
            event.role,
            Version(event.version),
            life,
            due_s=now_s + self.policy.start_timeout_s,
            worker_id=event.worker_id,
            adopted_since_s=now_s - event.age_s,
        )

    def _exited(self, replica: _ReplicaEntry, reason: str, now_s: float) -> None:
        served_s = 0.0 if replica.serving_since_s is None else now_s - replica.serving_since_s
        was_ordered = replica.is_excused or replica.state is _P.DRAINING
        if was_ordered or served_s >= self.policy.stable_s:
            replica.deaths_in_a_row = 0
        replica.deaths_in_a_row += not replica.is_excused
        replica.life.to(_P.WAITING, now_s=now_s, cause=reason)
        delay_s = self.policy.delay_s(replica.deaths_in_a_row) if replica.deaths_in_a_row else 0.0
        replica.worker_id, replica.serving_since_s, replica.last_exit = None, None, reason
        replica.adopted_since_s = None
        replica.member, replica.is_excused, replica.due_s = None, False, now_s + delay_s
        if not replica.is_wanted:
            del self._replicas[replica.name]

    # --- the desired state -----------------------------------------------------------------------------

    def _converge(self, now_s: float) -> Iterator[ReconcileAction]:
        models = {pool.model for pool in self._pools}
        for replica in list(self._replicas.values()):
            if replica.model not in models and replica.is_wanted and self._pools:
                yield from self._retire(replica, "its model is no longer wanted", now_s)
        for pool in self._pools:
            yield from self._converge_pool(pool, now_s)
        for replica in self._replicas.values():
            yield from self._match_role(replica, now_s)

    def _converge_pool(self, pool: Pool, now_s: float) -> Iterator[ReconcileAction]:
        for replica in self._replicas.values():
            if replica.model == pool.model and replica.state is _P.WAITING:
                replica.version = pool.version  # there is no process to replace
        for name, role in switches(pool, self._summaries(pool.model)):
            self._replicas[name].role = role
        for role in Role:
            for name, reason in retirements(pool, role, self._summaries(pool.model)):
                yield from self._retire(self._replicas[name], reason, now_s)
            count = add_count(pool, role, self._summaries(pool.model))
            models = [one.model for one in self._pools]
            prefix = replica_prefix(pool.model, models) if len(models) > 1 else ""
            for name in names_of(prefix, role, count, taken=self._replicas):
                life = Lifecycle(_P.WAITING, _LEGAL, now_s=now_s)
                self._replicas[name] = _ReplicaEntry(name, pool.model, role, pool.version, life, due_s=now_s)

    def _summaries(self, model: str) -> list[ReplicaSummary]:
        return [r.summary() for _, r in sorted(self._replicas.items()) if r.model == model]

    def _match_role(self, replica: _ReplicaEntry, now_s: float) -> Iterator[ReconcileAction]:
        member, ordered = replica.member, replica.switches_to
        if member is None or replica.state not in (_P.RUNNING, _P.SWITCHING):
            return
        if (ordered if replica.state is _P.SWITCHING else member.role) is replica.role:
            return
        source = ordered if replica.state is _P.SWITCHING else member.role
        reason = f"there are too few {replica.role} workers and too many {source} workers"
        if replica.state is _P.RUNNING:
            replica.adopted_since_s = None
            replica.life.to(_P.SWITCHING, now_s=now_s, cause=reason)
        replica.switches_to = replica.role
        replica.due_s = now_s + self.policy.drain_timeout_s + KILL_CONFIRM_S
        yield SwitchReplicaRole(member.worker_id, replica.role, reason)

    def _leave_nodes(self, now_s: float) -> Iterator[ReconcileAction]:
        for replica in self._replicas.values():
            if replica.state in _SERVING and replica.member and replica.member.node in self._avoided:
                replica.is_excused = True
                yield self._drain(replica, "its node is drained", now_s)

    def _retire(self, replica: _ReplicaEntry, reason: str, now_s: float) -> Iterator[ReconcileAction]:
        replica.is_wanted = False
        if replica.state is _P.WAITING:
            del self._replicas[replica.name]
        elif replica.state is _P.STARTING and not replica.may_serve:
            yield self._kill(replica, reason, now_s)
        elif replica.state not in _ON_ITS_WAY_OUT:
            yield self._drain(replica, reason, now_s)

    # --- timeouts --------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> Iterator[ReconcileAction]:
        for replica in self._replicas.values():
            if replica.due_s is None or now_s < replica.due_s:
                continue
            match replica.state:
                case _P.WAITING:
                    yield self._start(replica, now_s)
                case _P.STARTING:
                    yield self._kill(replica, "it did not start in time", now_s)
                case _P.DRAINING:
                    yield self._kill(replica, "it did not drain in time", now_s)
                case _P.SWITCHING:
                    yield self._kill(replica, "it did not change its role in time", now_s)
                case _P.KILLING:
                    replica.due_s = now_s + KILL_CONFIRM_S
                    yield KillReplica(self._id(replica), "its end is not confirmed")
                case _P.RUNNING | _P.SUSPECT:
                    raise AssertionError(f"{replica.name} serves and has a timeout")

    def _start(self, replica: _ReplicaEntry, now_s: float) -> StartReplica:
        self._start_count += 1
        worker_id = WorkerId(f"{replica.name}.{self.life}{self._start_count:x}")
        replica.worker_id = worker_id
        reason = f"after {replica.last_exit}" if replica.last_exit else "wanted"
        replica.life.to(_P.STARTING, now_s=now_s, cause=reason)
        replica.due_s = now_s + self.policy.start_timeout_s
        avoid = tuple(sorted(self._avoided))
        return StartReplica(worker_id, replica.role, reason, replica.model, replica.version, avoid)

    def _drain(self, replica: _ReplicaEntry, reason: str, now_s: float) -> DrainReplica:
        replica.life.to(_P.DRAINING, now_s=now_s, cause=reason)
        replica.due_s = now_s + self.policy.drain_timeout_s
        return DrainReplica(self._id(replica), reason)

    def _kill(self, replica: _ReplicaEntry, reason: str, now_s: float) -> KillReplica:
        replica.life.to(_P.KILLING, now_s=now_s, cause=reason)
        replica.due_s = now_s + KILL_CONFIRM_S
        return KillReplica(self._id(replica), reason)

    def _id(self, replica: _ReplicaEntry) -> WorkerId:
        assert replica.worker_id is not None, f"{replica.name} has no process: {list(replica.life.history)}"
        return replica.worker_id


def _memory(notes: Sequence[str]) -> str:
    """What a worker says of its memory among its notes."""
    begin = INFO_NOTE + MEMORY_NOTE
    return next((note.removeprefix(begin) for note in notes if note.startswith(begin)), "")
