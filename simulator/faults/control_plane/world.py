"""Everything around the control plane: the platform that runs processes, routers, operators and faults."""

import random
from collections.abc import Callable
from functools import partial

from baton.core.demand import DemandReport
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Member, Role
from baton.core.operate import (
    Action,
    ClusterState,
    Decision,
    DrainNode,
    DrainWorker,
    NodeState,
    Order,
    Resize,
    RollOut,
    Scale,
    SwitchRole,
    Version,
)
from control_plane import membership as mb
from control_plane import reconcile_events as ev
from control_plane.autoscaler.live import LiveAutoscaler
from control_plane.orders import ControlRecord
from simulator.faults.control_plane.checks import ControlChecker
from simulator.faults.control_plane.demand import Demand, SimDemandRouter
from simulator.faults.control_plane.life import REPORTS_PER_INTERVAL, ControlLife
from simulator.faults.control_plane.replicas import SimReplica, worker_of
from simulator.faults.control_plane.scenario import MODEL, ControlScenario
from simulator.faults.run_context import RunContext

RECONNECT_S = 0.5
IDENTIFY_SHARE = 0.7
"""Share of starting processes that answer a control plane that looks for survivors."""
AT_ZERO_S = 0.5


class ControlWorld:
    """One simulated cluster of replicas, and the control plane of the moment."""

    def __init__(self, run: RunContext, scenario: ControlScenario) -> None:
        self.run, self.scenario = run, scenario
        self.nodes = tuple(NodeState(name, f"host-{name}") for name in scenario.nodes)
        self.checker = ControlChecker(run, scenario)
        self.is_calm = False
        self.processes: dict[WorkerId, SimReplica] = {}
        self.record: ControlRecord | None = None
        self.demand = Demand(scenario, run.stream("demand"))
        self.routers: list[SimDemandRouter] = []
        self._rng: random.Random = run.stream("control world")
        self._operator: random.Random = run.stream("operator")
        self._lives = self._router_lives = 0
        self._killed_s = 0.0
        self.life: ControlLife | None = None
        self._begin_life()
        for _ in range(scenario.router_count):
            self._begin_router()

    # --- the control plane's lives --------------------------------------------------------------------

    def _begin_life(self) -> None:
        self._lives += 1
        clock, rng = self.run.clock, self.run.stream(f"life/{self._lives}")
        life = ControlLife(self, clock, rng, name=f"{self._lives}x", record=self.record)
        self.life = life
        survivors: list[ev.Adopted] = []
        for process in [one for one in self.processes.values() if one.is_alive]:
            is_loading = not process.is_serving
            if not process.answers or (
                is_loading and (not process.starts_at_all or rng.random() > IDENTIFY_SHARE)
            ):
                process.is_alive = False  # it does not say who it is, and is killed
                continue
            age_s = clock.now_s - process.born_s
            survivors.append(
                ev.Adopted(process.worker_id, process.model, process.role, process.version, age_s)
            )
        self.checker.life_begins(life, survivors, has_record=self.record is not None)
        life.begin(survivors, away_s=clock.now_s - self._killed_s)
        if life.scaler is not None:
            self._look_later(life)

    def kill_control(self, span_s: float) -> None:
        life = self.life
        if life is None:
            return
        life.kill()
        self.life, self._killed_s = None, self.run.clock.now_s
        if "record_lost" in self.scenario.faults and self._rng.random() < 0.5:
            self.record = None
            self.run.counts["control records lost"] += 1
        self.run.counts["control planes killed"] += 1
        self.run.clock.after(span_s, self._begin_life)

    def to_life(self, call: Callable[[ControlLife], None], *, late_s: float = 0.0) -> None:
        """Send something to the control plane of the moment at which it arrives. Nobody hears it while there
        is none."""

        def arrive() -> None:
            life = self.life
            if life is not None:
                life.post(lambda: call(life))

        self.run.clock.after(self.scenario.delay_s * (0.5 + self._rng.random()) + late_s, arrive)

    def remember(self, record: ControlRecord) -> None:
        self.record = record

    def _look_later(self, life: ControlLife) -> None:
        assert self.scenario.settings is not None

        def look() -> None:
            if life.is_alive:
                life.post(life.look)
                self._look_later(life)

        self.run.clock.after(self.scenario.settings.interval_s, look)

    # --- the platform ---------------------------------------------------------------------------------

    def perform(self, life: ControlLife, action: ev.ReconcileAction) -> None:
        self.run.note(f"control {life.name}", action)
        if isinstance(action, ev.StartReplica):
            self._start(life, action)
            return
        self.checker.acts(life, action, self.processes.get(action.worker_id))
        process = worker_of(self.processes, action.worker_id)
        if process is None:
            return
        call: Callable[[], None]
        match action:
            case ev.SwitchReplicaRole(_, role):
                call = partial(process.switch_role, role)
            case ev.DrainReplica():
                call = process.drain
            case ev.KillReplica():
                call = process.kill
        self.run.clock.after(self.scenario.delay_s * self._rng.random(), call)

    def _start(self, life: ControlLife, start: ev.StartReplica) -> None:
        self.checker.starts(life, start, self.processes)
        nodes = [node.node for node in self.nodes if node.node not in start.avoid]
        if not nodes:
            return  # no node has room, and the start times out
        number = len(self.processes)
        process = SimReplica(
            self, start, node=self._rng.choice(nodes), rng=self.run.stream(f"replica/{number}")
        )
        self.processes[start.worker_id] = process
        self.run.counts["replicas started"] += 1

    def renew(self, member: Member, *, late_s: float) -> None:
        def arrive(life: ControlLife) -> None:
            self.checker.renewed(life, member)
            life.renew(member)

        self.run.counts["renewals that were late"] += late_s > 0
        self.to_life(arrive, late_s=late_s)

    def exited(self, process: SimReplica, reason: str) -> None:
        self.run.note(process.worker_id, reason)
        self.checker.exited(process, reason)

        def arrive(life: ControlLife) -> None:
            self.checker.exit_heard(life, process, reason)
            life.exited(process.worker_id, reason)

        self.to_life(arrive, late_s=self._rng.choice((0.0, 0.0, 1.0)) if not self.is_calm else 0.0)

    def reconciled(
        self, life: ControlLife, event: ev.ReconcileEvent, actions: list[ev.ReconcileAction]
    ) -> None:
        self.checker.reconciled(life, event, actions)

    def membership_changed(self, life: ControlLife, event: mb.MembershipEvent) -> None:
        self.checker.membership_changed(life, event)

    # --- routers --------------------------------------------------------------------------------------

    def _begin_router(self) -> None:
        self._router_lives += 1
        router = SimDemandRouter(
            RouterId(f"router.{self._router_lives}"),
            share=1.0 / self.scenario.router_count,
            now_s=self.run.clock.now_s,
        )
        self.routers.append(router)
        self._router_runs(router)

    def _router_runs(self, router: SimDemandRouter) -> None:
        """Watch the directory, and report the demand, for as long as the router lives."""
        if not router.is_alive:
            return
        life, now_s = self.life, self.run.clock.now_s
        if life is not None and (router.watch is None or router.watch[0] != life.name):
            self.to_life(partial(self._watch, router))
        serving = [w for w in self._serving() if w.role.prefills]
        router.count(self.demand.rate(now_s), serving=len(serving), now_s=now_s)
        settings = self.scenario.settings
        if settings is None:
            self.run.clock.after(5.0, self._router_runs, router)
            return
        at_zero = not self._serving()
        every_s = AT_ZERO_S if at_zero else settings.interval_s / REPORTS_PER_INTERVAL
        if now_s >= router.silent_until_s and life is not None:
            report = router.report(self._serving(), self.demand.rate(now_s), now_s=now_s)
            self.to_life(lambda life: self._reported(life, router, report))
        self.run.clock.after(every_s, self._router_runs, router)

    def _serving(self) -> list[SimReplica]:
        return [
            one
            for one in self.processes.values()
            if one.is_alive and one.is_serving and not one.is_draining and one.model == MODEL
        ]

    def _watch(self, router: SimDemandRouter, life: ControlLife) -> None:
        if router.is_alive and (router.watch is None or router.watch[0] != life.name):
            router.watch = (life.name, life.watch(router.router_id))
            self.checker.router_watches(life, router)

    def _reported(self, life: ControlLife, router: SimDemandRouter, report: DemandReport) -> None:
        self.checker.reported(life, router, report)
        life.report(report)
        scaler: LiveAutoscaler | None = life.scaler
        settings = self.scenario.settings
        if scaler is None or settings is None or settings.is_advice or not report.queued:
            return
        if scaler.is_at_zero(life.state()):
            life.look()

    def crash_router(self) -> None:
        if not self.routers:
            return
        router = self._rng.choice(self.routers)
        router.is_alive = False
        self.routers.remove(router)
        watch = router.watch
        if watch is not None:
            self.to_life(
                lambda life: life.watch_ended(router.router_id, watch[1]) if life.name == watch[0] else None
            )
        self.run.clock.after(RECONNECT_S, self._begin_router)

    # --- operators ------------------------------------------------------------------------------------

    def ordered(self, life: ControlLife, order: Order, decision: Decision) -> None:
        self.run.note(order.who, order.action)
        self.checker.ordered(life, order, decision)
        self.run.counts[f"orders {decision.outcome}"] += 1

    def looked(self, life: ControlLife, state: ClusterState, order: Order | None) -> None:
        self.checker.looked(life, state, order, self.demand)

    def operate(self) -> None:
        """Let an operator order something."""
        life = self.life
        if life is None or life.is_stalled:
            return
        action = self._draw_action(life.state())
        if action is not None:
            life.post(lambda: life.order(Order(action, who="operator")))

    def _draw_action(self, state: ClusterState) -> Action | None:
        rng = self._operator
        replicas = [r for r in state.replicas if r.worker_id is not None]
        pool = rng.choice(state.pools)
        roles = [role for role in Role if pool.count(role)] or [Role.AGGREGATED]
        draw = rng.random()
        if draw < 0.2 and replicas:
            return DrainWorker(rng.choice(replicas).name, is_replaced=rng.random() < 0.7)
        if draw < 0.35 and replicas and len(roles) > 1:
            return SwitchRole(rng.choice(replicas).name, rng.choice((Role.PREFILL, Role.DECODE)))
        if draw < 0.55:
            node = rng.choice(self.nodes).node
            is_drained = any(one.node == node and one.is_drained for one in state.nodes)
            free = sum(not one.is_drained for one in state.nodes)
            return DrainNode(node, is_undone=is_drained) if is_drained or free > 1 else None
        if draw < 0.75:
            surge = rng.choice((0, 1, 2))
            version = Version(f"v{rng.randint(1, 40)}")
            missing = max(rng.choice((0, 1)), int(surge == 0))
            return RollOut(version, pool.model, surge_max=surge, unavailable_max=missing)
        if draw < 0.9:
            return Scale(rng.choice(roles), rng.randint(0 if rng.random() < 0.1 else 1, 4), pool.model)
        return Resize({role: rng.randint(1, 3) for role in roles}, pool.model)
