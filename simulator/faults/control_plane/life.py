"""One life of the control plane: the production cores, wired as `control_plane.plane` wires them."""

import random
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, assert_never

from baton.core.demand import DemandReport
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Member
from baton.core.operate import ClusterState, Decision, NodeState, Order, RouterState
from baton.core.sharing import RouterMember
from control_plane import membership as mb
from control_plane import reconcile_events as ev
from control_plane.autoscaler.live import LiveAutoscaler
from control_plane.orders import ControlRecord, Orders
from control_plane.reconcile import Reconciler
from simulator.clock import VirtualClock
from simulator.faults.control_plane.scenario import MODEL, ControlScenario

PAUSE_S = 0.25
"""A timer later than this means that the process was held up, as for `baton.wire.core_driver`."""
REPORTS_PER_INTERVAL = 3

Event = TypeVar("Event")
Action = TypeVar("Action")
Event_contra = TypeVar("Event_contra", contravariant=True)


class TickedCore(Protocol[Event_contra, Action]):
    """A core of the control plane."""

    @property
    def next_tick_s(self) -> float | None: ...

    def handle(self, event: Event_contra, *, now_s: float) -> list[Action]: ...


class LifeDriver(Generic[Event, Action]):
    """The driver of one core: events in order, and ticks by a timer that stands still with the process."""

    __slots__ = (
        "_clock",
        "_core",
        "_due_s",
        "_events",
        "_handled",
        "_is_handling",
        "_paused",
        "_perform",
        "_tick",
    )

    def __init__(
        self,
        core: TickedCore[Event, Action],
        *,
        clock: Callable[[], float],
        tick: Event,
        perform: Callable[[Action], None],
        handled: Callable[[Event, list[Action]], None],
        paused: Callable[[float], Event] | None = None,
    ) -> None:
        self._core, self._clock, self._tick, self._perform = core, clock, tick, perform
        self._handled, self._paused = handled, paused
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._due_s: float | None = None

    def post(self, event: Event) -> None:
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        while self._events:
            one = self._events.popleft()
            actions = self._core.handle(one, now_s=self._clock())
            for action in actions:
                self._perform(action)
            self._handled(one, actions)
        self._is_handling = False

    @property
    def due_s(self) -> float | None:
        return self._core.next_tick_s

    def on_timer(self, late_s: float) -> None:
        if self._paused is not None and late_s > PAUSE_S:
            self.post(self._paused(late_s))
        due_s = self._core.next_tick_s
        if due_s is not None and due_s <= self._clock():
            self.post(self._tick)


class Outside(Protocol):
    """What the control plane acts upon, and who looks at it."""

    scenario: ControlScenario
    nodes: tuple[NodeState, ...]

    def remember(self, record: ControlRecord) -> None: ...

    def perform(self, life: "ControlLife", action: ev.ReconcileAction) -> None: ...

    def reconciled(
        self, life: "ControlLife", event: ev.ReconcileEvent, actions: list[ev.ReconcileAction]
    ) -> None: ...

    def membership_changed(self, life: "ControlLife", event: mb.MembershipEvent) -> None: ...

    def ordered(self, life: "ControlLife", order: Order, decision: Decision) -> None: ...

    def looked(self, life: "ControlLife", state: ClusterState, order: Order | None) -> None: ...


class ControlLife:
    """A control plane process from its start to its kill."""

    def __init__(
        self,
        outside: Outside,
        clock: VirtualClock,
        rng: random.Random,
        *,
        name: str,
        record: ControlRecord | None,
    ) -> None:
        self._outside, self._virtual, self._rng = outside, clock, rng
        scenario = outside.scenario
        self.name = name
        self._origin_s = rng.uniform(0.0, 5000.0)
        self.began_s = clock.now_s
        self.is_alive = True
        self.stalled_until_s = 0.0
        self._inbox: deque[Callable[[], None]] = deque()
        self._watches = 0
        self._armed_s: dict[int, float] = {}
        self.book = mb.ClusterMembership(name, scenario.member_lease_s, scenario.member_suspect_s)
        self.reconciler = Reconciler(policy=scenario.policy, life=name)
        self.orders = Orders()
        self.scaler = (
            LiveAutoscaler(scenario.settings, model=MODEL, now_s=self.now_s())
            if scenario.settings is not None
            else None
        )
        self._membership: LifeDriver[mb.MembershipEvent, mb.MembershipChange] = LifeDriver(
            self.book,
            clock=self.now_s,
            tick=mb.MembershipTick(),
            perform=self._on_membership,
            handled=lambda event, _: outside.membership_changed(self, event),
            paused=mb.DirectoryPaused,
        )
        self._replication: LifeDriver[ev.ReconcileEvent, ev.ReconcileAction] = LifeDriver(
            self.reconciler,
            clock=self.now_s,
            tick=ev.ReconcileTick(),
            perform=self._on_replication,
            handled=self._on_reconciled,
        )
        self._record = record

    # --- time -----------------------------------------------------------------------------------------

    def now_s(self) -> float:
        return self._origin_s + self._virtual.now_s

    @property
    def is_stalled(self) -> bool:
        return self._virtual.now_s < self.stalled_until_s

    @property
    def was_stalled_lately(self) -> bool:
        """What arrived meanwhile may not have been looked at before what was due."""
        return self.stalled_until_s > 0.0 and self._virtual.now_s - self.stalled_until_s < PAUSE_S

    def stall(self, span_s: float) -> None:
        """Hold the process up. What arrives meanwhile waits."""
        self.stalled_until_s = max(self.stalled_until_s, self._virtual.now_s + span_s)
        self._virtual.at(self.stalled_until_s, self._resume)

    def _resume(self) -> None:
        if not self.is_alive or self.is_stalled:
            return
        if self._rng.random() < 0.5:  # the loop looks at its timers before it reads its sockets, or after
            self._fire()
        inbox, self._inbox = self._inbox, deque()
        for call in inbox:
            self.post(call)
        self._fire()

    def post(self, call: Callable[[], None]) -> None:
        """Let the process handle something as soon as it runs."""
        if not self.is_alive:
            return
        if self.is_stalled:
            self._inbox.append(call)
            return
        call()
        self._arm()

    def kill(self) -> None:
        self.is_alive = False
        self._inbox.clear()

    def _arm(self) -> None:
        for number, driver in enumerate((self._membership, self._replication)):
            due_s = driver.due_s
            if due_s is not None and due_s < self._armed_s.get(number, float("inf")):
                self._armed_s[number] = due_s
                self._virtual.at(due_s - self._origin_s + 1e-4, self._fire)

    def _fire(self) -> None:
        if not self.is_alive or self.is_stalled:
            return
        for number, driver in enumerate((self._membership, self._replication)):
            planned_s = self._armed_s.get(number)
            if planned_s is not None and planned_s <= self.now_s():
                del self._armed_s[number]
                driver.on_timer(max(0.0, self.now_s() - planned_s))
        self._arm()

    # --- start ----------------------------------------------------------------------------------------

    def begin(self, survivors: list[ev.Adopted], *, away_s: float) -> None:
        for adopted in survivors:
            self._replication.post(adopted)
        self._replication.post(self.orders.begin(self._outside.scenario.pools, self._record))
        self._outside.remember(self.orders.record())
        if self.scaler is not None:
            memory = self.orders.memories.get(MODEL)
            if memory is not None:
                self.scaler.recall(memory, now_s=self.now_s(), away_s=away_s)
        self._arm()

    # --- directory ------------------------------------------------------------------------------------

    def renew(self, member: Member) -> None:
        self._membership.post(mb.LeaseRenewed(member))

    def watch(self, router_id: RouterId) -> int:
        self._watches += 1
        self._membership.post(
            mb.RouterWatchStarted(RouterMember(router_id, f"sim:{router_id}"), self._watches)
        )
        return self._watches

    def watch_ended(self, router_id: RouterId, watch: int) -> None:
        self._membership.post(mb.RouterWatchEnded(router_id, watch))

    def exited(self, worker_id: WorkerId, reason: str) -> None:
        self._membership.post(mb.WorkerLeft(worker_id))
        self._replication.post(ev.ReplicaExited(worker_id, reason))

    def _on_membership(self, change: mb.MembershipChange) -> None:
        match change:
            case mb.Appeared(member) | mb.Updated(member):
                self._replication.post(ev.MemberSeen(member))
            case mb.Suspected(member):
                self._replication.post(ev.MemberSilent(member.worker_id))
            case mb.Lapsed(member):
                self._replication.post(ev.LeaseLapsed(member.worker_id))
            case mb.ViewChanged():
                pass
            case _:
                assert_never(change)

    # --- replicas and orders --------------------------------------------------------------------------

    def _on_replication(self, action: ev.ReconcileAction) -> None:
        if isinstance(action, ev.KillReplica):
            self._membership.post(mb.WorkerLeft(action.worker_id))
        self._outside.perform(self, action)

    def _on_reconciled(self, event: ev.ReconcileEvent, actions: list[ev.ReconcileAction]) -> None:
        if self.orders.progress(self.state(), at_s=self._virtual.now_s):
            self._outside.remember(self.orders.record())
        self._outside.reconciled(self, event, actions)

    def state(self) -> ClusterState:
        avoid = self.orders.avoid
        return ClusterState(
            life=self.name,
            pools=self.orders.pools,
            replicas=tuple(self.reconciler.status(now_s=self.now_s())),
            nodes=tuple(node for node in self._outside.nodes if node.node not in avoid)
            + tuple(
                NodeState(node.node, node.host, is_drained=True)
                for node in self._outside.nodes
                if node.node in avoid
            ),
            is_settled=self.reconciler.is_settled,
            routers=tuple(RouterState(r.router_id, r.address, "") for r in self.book.view.routers),
        )

    def order(self, order: Order) -> None:
        decision, events = self.orders.take(order, self.state(), at_s=self._virtual.now_s)
        self._outside.ordered(self, order, decision)
        for event in events:
            self._replication.post(event)
        self._outside.remember(self.orders.record())

    # --- autoscaler -----------------------------------------------------------------------------------

    def report(self, report: DemandReport) -> None:
        if self.scaler is not None:
            self.scaler.on_report(report, now_s=self.now_s())

    def look(self) -> None:
        """End one interval of the autoscaler."""
        if self.scaler is None:
            return
        state = self.state()
        self.scaler.on_state(state, now_s=self.now_s())
        order = self.scaler.decide(state, now_s=self.now_s())
        self._outside.looked(self, state, order)
        if order is not None:
            self.order(order)
        self.orders.memories = {**self.orders.memories, MODEL: self.scaler.memory(now_s=self.now_s())}
        self._outside.remember(self.orders.record())
