"""Workers that come, change their role and go while a trace runs, as a rule decides; and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec

from baton.core.demand import Traits
from baton.core.ids import WorkerId
from baton.core.messages import Role
from control_plane.autoscaler.record import Journal
from control_plane.autoscaler.values import Observation, RoleState, ScalingDecision
from simulator.fleet.fleet import Fleet
from simulator.fleet.observed import Observed
from simulator.fleet.spec import FleetWorkerSpec
from simulator.fleet.worker import MacroWorker

LOOK_S = 0.5
"""Time between two looks whether a draining worker is idle, and whether requests wait while there is no
worker."""
IDLE_LOOKS = 2
"""A worker that was found idle so many times has nothing on its way to it any more."""


class Rule(Protocol):
    """A rule that says how many replicas there should be."""

    journal: Journal

    def decide(self, seen: Observation, traits: Mapping[Role, Traits]) -> ScalingDecision: ...


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """The parameters by which a fleet is scaled."""

    start_s: float = 120.0
    """Time from deciding for a worker to its first heartbeat. It is paid for meanwhile."""
    switch_s: float = 1.0
    """Time from the end of a drain to serving in the other role."""
    interval_s: float = 15.0
    gpus_per_worker: int = 1
    is_advice: bool = False
    """Decisions are recorded and nothing is done."""


class ScaleSample(msgspec.Struct, frozen=True):
    """Replicas at one instant."""

    at_s: float
    serving: Mapping[Role, int]
    starting: Mapping[Role, int]
    draining: Mapping[Role, int]
    """Workers that drain, those on their way to another role included."""
    desired: Mapping[Role, int]
    offered_per_s: float


@dataclass(slots=True)
class _Leaving:
    """A worker that drains."""

    worker: MacroWorker
    since_s: float
    target: Role | None
    """The role that the worker takes afterwards; None when it ends."""
    idle_looks: int = 0


@dataclass(slots=True)
class _Durations:
    start_s: list[float] = field(default_factory=list[float])
    drain_s: list[float] = field(default_factory=list[float])
    switch_s: list[float] = field(default_factory=list[float])


def traits_of(kind: FleetWorkerSpec) -> Traits:
    return Traits(
        kind.costs,
        kind.engine.step_tokens_max,
        kind.engine.batch_sequences_max,
        kind.block_count * kind.block_tokens,
    )


class FleetScaling:
    """The scaling of one fleet, which must have one cell. Call `begin` before the fleet runs."""

    def __init__(self, fleet: Fleet, spec: ScalingSpec, rule: Rule) -> None:
        self.fleet, self.spec, self.rule = fleet, spec, rule
        self.samples: list[ScaleSample] = []
        self.drain_s_max = 0.0
        self.switches = self.starts = self.stops = 0
        self._kinds = {kind.role: kind for kind, _ in fleet.spec.workers}
        self._starting: dict[int, Role] = {}
        self._start_number = 0
        self._leaving: dict[WorkerId, _Leaving] = {}
        self._durations = _Durations()
        self._busy_s: dict[WorkerId, float] = {}
        """Busy time of each worker at the last observation."""
        self._replica_s = 0.0
        self._paid_until_s = 0.0
        self._is_looking = False
        self._version = 0
        self.desired: Mapping[Role, int] = {}

    def begin(self) -> None:
        self.fleet.observed = Observed(self.fleet.spec.slo_classes)
        self.fleet.clock.recurring |= {self._interval, self._watch_for_requests}
        self._arm()

    # --- accounts ---------------------------------------------------------------------------------

    @property
    def gpu_s(self) -> float:
        """GPU-seconds paid so far: those of workers that start, serve or drain."""
        self._settle()
        return self._replica_s * self.spec.gpus_per_worker

    def _settle(self) -> None:
        now_s = self.fleet.clock.now_s
        paid = len(self.fleet.workers) + len(self._starting)
        self._replica_s += paid * (now_s - self._paid_until_s)
        self._paid_until_s = now_s

    # --- looking ----------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._version += 1
        self.fleet.clock.after(self.spec.interval_s, self._interval, self._version)

    def _interval(self, version: int) -> None:
        if version == self._version:
            self._decide(self.spec.interval_s)

    def _decide(self, interval_s: float) -> None:
        seen = self._observe(interval_s)
        traits = {role: traits_of(kind) for role, kind in self._kinds.items()}
        decision = self.rule.decide(seen, traits)
        self.desired = decision.desired
        self._sample(seen)
        if not self.spec.is_advice and not decision.is_advice:
            self._perform(decision)
        self._arm()
        if not any(decision.desired.values()):
            self._watch_for_requests()

    def _watch_for_requests(self) -> None:
        """Decide at once when there is no worker and a request waits."""
        if any(self.desired.values()):
            return
        if self.fleet.queued_count:
            self._decide(self.spec.interval_s)
        else:
            self.fleet.clock.after(LOOK_S, self._watch_for_requests)

    def _observe(self, interval_s: float) -> Observation:
        fleet = self.fleet
        assert fleet.observed is not None
        done, self._durations = self._durations, _Durations()
        return Observation(
            fleet.clock.now_s,
            interval_s,
            fleet.observed.take(),
            {role: self._state(role) for role in self._kinds},
            queued=fleet.queued_count,
            queued_prompt_tokens=fleet.unplaced_tokens,
            start_s=tuple(done.start_s),
            drain_s=tuple(done.drain_s),
            switch_s=tuple(done.switch_s),
        )

    def _state(self, role: Role) -> RoleState:
        workers = [cast("MacroWorker", w) for w in self.fleet.workers if w.spec.role is role]
        usages = [worker.usage() for worker in workers]
        busy_s = 0.0
        for worker, usage in zip(workers, usages, strict=True):
            busy_s += usage.busy_s - self._busy_s.get(worker.worker_id, 0.0)
            self._busy_s[worker.worker_id] = usage.busy_s
        draining = sum(worker.worker_id in self._leaving for worker in workers)
        return RoleState(
            serving=len(workers) - draining,
            starting=sum(starting is role for starting in self._starting.values()),
            joining=sum(leaving.target is role for leaving in self._leaving.values()),
            draining=draining,
            waiting_prompt_tokens=sum(usage.waiting_tokens for usage in usages),
            decoding=sum(usage.decoding for usage in usages),
            context_tokens=sum(worker.engine.context_tokens for worker in workers),
            busy_share=busy_s / self.spec.interval_s / max(1, len(workers)),
            held_share=sum(u.held_blocks for u in usages)
            / max(1, sum(worker.spec.block_count for worker in workers)),
        )

    def _sample(self, seen: Observation) -> None:
        states = {role: seen.of(role) for role in self._kinds}
        self.samples.append(
            ScaleSample(
                seen.at_s,
                {role: state.serving for role, state in states.items()},
                {role: state.starting for role, state in states.items()},
                {role: state.draining for role, state in states.items()},
                dict(self.desired),
                seen.arrived / seen.interval_s,
            )
        )

    # --- doing ------------------------------------------------------------------------------------

    def _perform(self, decision: ScalingDecision) -> None:
        for switch_role in decision.switches:
            for worker in self._spare(switch_role.source, switch_role.count):
                self.switches += 1
                self._drain(worker, switch_role.target)
        for role, count in decision.stops.items():
            # A worker that has not started serves nobody: it goes first.
            for number in [n for n, starting in self._starting.items() if starting is role][:count]:
                self._settle()
                del self._starting[number]
                count -= 1
            for worker in self._spare(role, count):
                self.stops += 1
                self._drain(worker, None)
        for role, count in decision.starts.items():
            for _ in range(count):
                self._start(role)

    def _start(self, role: Role) -> None:
        self._settle()
        self.starts += 1
        self._start_number += 1
        self._starting[self._start_number] = role
        self.fleet.clock.after(self.spec.start_s, self._started, self._start_number)

    def _started(self, number: int) -> None:
        role = self._starting.get(number)
        if role is None:
            return
        self._settle()
        del self._starting[number]
        self.fleet.add(self._kinds[role])
        self._durations.start_s.append(self.spec.start_s)

    def _spare(self, role: Role, count: int) -> list[MacroWorker]:
        """Return those of the serving workers that have least to do."""
        able = [
            cast("MacroWorker", w)
            for w in self.fleet.workers
            if w.spec.role is role and w.worker_id not in self._leaving
        ]
        able.sort(key=lambda w: (w.engine.waiting_tokens, w.usage().decoding, w.usage().held_blocks))
        return able[: max(0, count)]

    def _drain(self, worker: MacroWorker, target: Role | None) -> None:
        self._leaving[worker.worker_id] = _Leaving(worker, self.fleet.clock.now_s, target)
        worker.drain()
        self.fleet.update(worker.worker_id, worker.spec.role, is_draining=True)
        if not self._is_looking:
            self._is_looking = True
            self.fleet.clock.after(LOOK_S, self._look)

    def _look(self) -> None:
        for worker_id, leaving in list(self._leaving.items()):
            leaving.idle_looks = leaving.idle_looks + 1 if leaving.worker.is_idle else 0
            if leaving.idle_looks == IDLE_LOOKS:
                self._drained(worker_id, leaving)
        self._is_looking = bool(self._leaving)
        if self._is_looking:
            self.fleet.clock.after(LOOK_S, self._look)

    def _drained(self, worker_id: WorkerId, leaving: _Leaving) -> None:
        took_s = self.fleet.clock.now_s - leaving.since_s
        self.drain_s_max = max(self.drain_s_max, took_s)
        self._durations.drain_s.append(took_s)
        if leaving.target is not None:
            self.fleet.clock.after(self.spec.switch_s, self._switched, worker_id)
            return
        self._settle()
        del self._leaving[worker_id]
        leaving.worker.end()
        self.fleet.remove(worker_id)

    def _switched(self, worker_id: WorkerId) -> None:
        leaving = self._leaving.pop(worker_id)
        assert leaving.target is not None
        leaving.worker.take_role(leaving.target)
        self.fleet.update(worker_id, leaving.target, is_draining=False)
        self._durations.switch_s.append(self.fleet.clock.now_s - leaving.since_s)
