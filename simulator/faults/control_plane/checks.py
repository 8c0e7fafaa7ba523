"""Invariant 13, seen from outside: which processes the control plane starts, drains and kills, and whom it
lists."""

from collections.abc import Iterable, Mapping

from baton.core.demand import DemandReport
from baton.core.ids import WorkerId, replica_name
from baton.core.messages import Member, Role
from baton.core.operate import (
    ClusterState,
    Decision,
    Order,
    Outcome,
    Pool,
    ReplicaState,
    ReplicaStatus,
    RollOut,
)
from control_plane import membership as mb
from control_plane import reconcile_events as ev
from simulator.faults.control_plane.demand import Demand, SimDemandRouter
from simulator.faults.control_plane.life import ControlLife
from simulator.faults.control_plane.membership_checks import MembershipChecker
from simulator.faults.control_plane.replicas import SimReplica
from simulator.faults.control_plane.scaling_checks import ScalingChecker
from simulator.faults.control_plane.scenario import ControlScenario
from simulator.faults.run_context import RunContext, Violation

EPSILON_S = 0.01
INVARIANT = 13


class ControlChecker:
    """The checks of one run. They know what the processes really do."""

    __slots__ = (
        "_drained_s",
        "_ends",
        "_expected_pools",
        "_killed",
        "_pools",
        "_resized_s",
        "_run",
        "_scenario",
        "_states",
        "_switched_s",
        "membership",
        "scaling",
    )

    def __init__(self, run: RunContext, scenario: ControlScenario) -> None:
        self._run, self._scenario = run, scenario
        self.membership = MembershipChecker(run, scenario)
        self.scaling = ScalingChecker(run, scenario)
        self._drained_s: dict[WorkerId, float] = {}
        self._switched_s: dict[WorkerId, float] = {}
        self._killed: set[WorkerId] = set()
        self._ends: dict[str, tuple[float, int]] = {}
        """Replicas that ended unasked: when this life heard of it, and how often in a row before they
        served."""
        self._states: dict[str, ReplicaStatus] = {}
        """The reconciler's replicas after its last event."""
        self._pools: tuple[Pool, ...] = scenario.pools
        self._expected_pools: tuple[Pool, ...] | None = None
        self._resized_s: dict[str, float] = {}

    @property
    def _now_s(self) -> float:
        return self._run.clock.now_s

    # --- lives ----------------------------------------------------------------------------------------

    def life_begins(self, life: ControlLife, survivors: list[ev.Adopted], *, has_record: bool) -> None:
        self._expected_pools = self._pools if has_record else None
        self._ends.clear()
        self._states.clear()
        self.membership.life_begins()
        self.scaling.life_begins(life)
        self._run.counts["replicas adopted"] += len(survivors)

    # --- what the reconciler wants --------------------------------------------------------------------

    def starts(
        self, life: ControlLife, start: ev.StartReplica, processes: Mapping[WorkerId, SimReplica]
    ) -> None:
        name = replica_name(start.worker_id)
        twin = next((one for one in processes.values() if one.name == name and one.is_alive), None)
        if twin is not None:
            raise Violation(INVARIANT, f"{start.worker_id} is started while {twin.worker_id} still runs")
        if not life.orders.avoid <= set(start.avoid):
            raise Violation(INVARIANT, f"{start.worker_id} may run on a drained node: {start}")
        heard_s, deaths = self._ends.get(name, (0.0, 0))
        if start.reason == "wanted":  # a replica that there was not before, whatever had its name
            self._ends.pop(name, None)
            deaths = 0
        pause_s = self._backoff_s(deaths)
        if self._now_s - heard_s < pause_s - EPSILON_S:
            raise Violation(
                INVARIANT,
                f"{name} is started again {self._now_s - heard_s:.2f} s after death {deaths} in a row, and "
                f"{pause_s:g} s are to pass",
            )
        self._surge(life, start)

    def _backoff_s(self, deaths: int) -> float:
        policy = self._scenario.policy
        return min(policy.backoff_s * 2.0 ** (deaths - 1), policy.backoff_max_s) if deaths else 0.0

    def _surge(self, life: ControlLife, start: ev.StartReplica) -> None:
        """Check that an update of versions keeps to its bound of processes."""
        pool = next((one for one in life.orders.pools if one.model == start.model), None)
        resized_s = self._resized_s.get(start.model, float("-inf"))
        if pool is None or self._now_s - resized_s < 60.0:
            return
        mine = [r for r in life.reconciler.status() if r.model == start.model and r.role is start.role]
        is_rolling = any(r.version != pool.version.name for r in mine)
        if is_rolling and len(mine) > pool.count(start.role) + pool.surge_max:
            raise Violation(
                INVARIANT,
                f"{start.worker_id} is started as the {len(mine)}th {start.role} worker; "
                f"{pool.count(start.role)} and {pool.surge_max} more are allowed",
            )

    def acts(self, life: ControlLife, action: ev.ReconcileAction, process: SimReplica | None) -> None:
        """Look at an order to a process, before it is carried out."""
        match action:
            case ev.DrainReplica(worker_id):
                self._drained_s[worker_id] = self._now_s
            case ev.SwitchReplicaRole(worker_id):
                self._switched_s[worker_id] = self._now_s
            case ev.KillReplica(worker_id, reason):
                if process is not None and not self._may_be_killed(life, process, reason):
                    raise Violation(INVARIANT, f"{worker_id} is well, and is killed because {reason}")
                self._killed.add(worker_id)
                self._run.counts["replicas killed"] += 1
            case _:
                pass

    def _may_be_killed(self, life: ControlLife, process: SimReplica, reason: str) -> bool:
        now_s, policy, worker_id = self._now_s, self._scenario.policy, process.worker_id
        if not process.is_alive or worker_id in self._killed:
            return True
        if not process.is_serving and "start" in reason:
            began_s = max(process.born_s, life.began_s)
            return now_s - began_s >= policy.start_timeout_s - EPSILON_S
        if not process.is_well(now_s) or life.was_stalled_lately:
            return True
        is_new = now_s - process.serves_since_s < self._scenario.heartbeat_s
        if is_new and not self.membership.was_heard(worker_id):
            return True
        for ordered_s in (self._drained_s.get(worker_id), self._switched_s.get(worker_id)):
            if ordered_s is not None and now_s - ordered_s >= policy.drain_timeout_s - EPSILON_S:
                return True
        return False

    def reconciled(
        self, life: ControlLife, event: ev.ReconcileEvent, actions: list[ev.ReconcileAction]
    ) -> None:
        if isinstance(event, ev.SetDesired) and self._expected_pools is not None:
            if life.orders.pools != self._expected_pools:
                raise Violation(
                    INVARIANT,
                    f"after a restart {life.orders.pools} are wanted, before {self._expected_pools}",
                )
            self._expected_pools = None
        self._note_resizes(life)
        status = {replica.name: replica for replica in life.reconciler.status()}
        self._unavailable(life, event, actions, status)
        self._states = status
        self._ends = {name: end for name, end in self._ends.items() if name in status}

    def _note_resizes(self, life: ControlLife) -> None:
        for pool in life.orders.pools:
            before = next((one for one in self._pools if one.model == pool.model), pool)
            if before.counts != pool.counts or before.surge_max > pool.surge_max:
                self._resized_s[pool.model] = self._now_s
        self._pools = life.orders.pools

    def _unavailable(
        self,
        life: ControlLife,
        event: ev.ReconcileEvent,
        actions: list[ev.ReconcileAction],
        status: Mapping[str, ReplicaStatus],
    ) -> None:
        """Check that an update of versions takes no more replicas from a role than it may."""
        if any(isinstance(action, ev.SwitchReplicaRole) for action in actions):
            return
        about: WorkerId | None = getattr(event, "worker_id", None)
        for action in actions:
            if not isinstance(action, ev.DrainReplica) or not action.reason.startswith("version "):
                continue
            before = self._states.get(replica_name(action.worker_id))
            if before is None or before.state is not ReplicaState.RUNNING or about == action.worker_id:
                continue
            self._run.counts["replicas replaced by another version"] += 1
            pool = next(one for one in life.orders.pools if one.model == before.model)
            running = _running(status.values(), before.model, before.role)
            if running < pool.count(before.role) - pool.unavailable_max:
                raise Violation(
                    INVARIANT,
                    f"{action.worker_id} is drained for another version, and {running} of "
                    f"{pool.count(before.role)} {before.role} workers are left",
                )

    # --- what processes do ----------------------------------------------------------------------------

    def exited(self, process: SimReplica, reason: str) -> None:
        self._run.counts[f"replicas ended: {reason}"] += 1

    def exit_heard(self, life: ControlLife, process: SimReplica, reason: str) -> None:
        """Note an end that nobody ordered: the next start has to wait."""
        known = self._states.get(process.name)
        if known is None or known.worker_id != process.worker_id:
            return
        if process.worker_id in self._drained_s:
            self._ends.pop(process.name, None)
            return
        _, deaths = self._ends.get(process.name, (0.0, 0))
        self._ends[process.name] = (self._now_s, 1 if process.is_serving else deaths + 1)

    def renewed(self, life: ControlLife, member: Member) -> None:
        self.membership.renewed(member)

    def membership_changed(self, life: ControlLife, event: mb.MembershipEvent) -> None:
        self.membership.changed(life, event)

    def look(self, life: ControlLife, processes: Iterable[SimReplica]) -> None:
        """Look at the control plane now and then, whether or not anything happened. `processes` are those
        that live."""
        if life.is_stalled or life.was_stalled_lately:
            return  # it has not done yet what was due
        self.membership.look(life)
        for process in processes:
            lapsed_s = self.membership.lapsed_for_s(process.worker_id)
            if lapsed_s > 1.0 and process.worker_id not in self._killed:
                raise Violation(
                    INVARIANT,
                    f"the lease of {process.worker_id} lapsed {lapsed_s:.1f} s ago, and it is left alone",
                )

    # --- routers, orders and the autoscaler -----------------------------------------------------------

    def router_watches(self, life: ControlLife, router: SimDemandRouter) -> None:
        self.scaling.router_watches(router)

    def reported(self, life: ControlLife, router: SimDemandRouter, report: DemandReport) -> None:
        self.scaling.reported(router, report)

    def ordered(self, life: ControlLife, order: Order, decision: Decision) -> None:
        if decision.outcome is Outcome.ACCEPTED and isinstance(order.action, RollOut):
            self._run.counts["versions rolled out"] += 1

    def looked(self, life: ControlLife, state: ClusterState, order: Order | None, demand: Demand) -> None:
        self.scaling.looked(state, order, demand)

    # --- at the end -----------------------------------------------------------------------------------

    def rest(self, life: ControlLife, processes: Mapping[WorkerId, SimReplica]) -> None:
        """Check that after the faults everything is as it was ordered."""
        pending = [d for d in life.orders.log.entries if d.outcome is Outcome.ACCEPTED]
        if pending:
            raise Violation(INVARIANT, f"{len(pending)} orders do not end; the first is {pending[0]}")
        living = [one for one in processes.values() if one.is_alive]
        for pool in life.orders.pools:
            for role in Role:
                mine = [one for one in living if one.model == pool.model and one.role is role]
                right = [one for one in mine if one.version == pool.version.name and not one.is_draining]
                if len(mine) != pool.count(role) or len(right) != len(mine):
                    names = [one.worker_id for one in mine]
                    raise Violation(INVARIANT, f"{names} run as {role}; {pool} was ordered")
        astray = [one.worker_id for one in living if one.node in life.orders.avoid]
        if astray:
            raise Violation(INVARIANT, f"{astray} run on drained nodes")
        if not life.reconciler.is_settled:
            raise Violation(
                INVARIANT, f"everything is as ordered, and is not settled: {life.reconciler.status()}"
            )
        listed = {member.worker_id for member in life.book.view.members}
        if listed != {one.worker_id for one in living}:
            raise Violation(
                INVARIANT, f"{sorted(listed)} are listed, {[one.worker_id for one in living]} live"
            )
        extra = [r.name for r in life.reconciler.status() if r.worker_id is None]
        if extra:
            raise Violation(INVARIANT, f"{extra} have no process, and are remembered")


def _running(replicas: Iterable[ReplicaStatus], model: str, role: Role) -> int:
    return sum(r.model == model and r.role is role and r.state is ReplicaState.RUNNING for r in replicas)
