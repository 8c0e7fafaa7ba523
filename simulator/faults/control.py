"""The control plane in virtual time: the production reconciler over simulated workers. It may be killed."""

from collections import Counter
from collections.abc import Mapping
from typing import assert_never

from baton.core.budgets import Ask
from baton.core.ids import RouterId, WorkerId, replica_name
from baton.core.messages import Member, Role
from baton.core.operate import FIRST_VERSION, Pool
from control_plane.reconcile import Reconciler
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
from simulator.faults.budget_place import BudgetPlace, RemoteBudgetPlace
from simulator.faults.checkers import Checkers
from simulator.faults.client import Ending, SimClient
from simulator.faults.model import Model
from simulator.faults.network import Network
from simulator.faults.node import FINGERPRINTS, SimWorker
from simulator.faults.reads import SimReads
from simulator.faults.router_node import SimRouter
from simulator.faults.run_context import RunContext
from simulator.faults.scenario import MODEL_NAME, Scenario
from simulator.faults.slot import Slot
from simulator.faults.store_directory import SimDirectory
from simulator.faults.store_node import SimHost, SimStoreNode
from worker.events import Drain, SetRole, WorkerEvent

RECONCILE_S = 0.1
SWITCH_LOOK_S = 0.05
"""Time between two looks at a worker that switches roles, to see whether it is idle."""


class Cluster:
    """All processes of one run, and the control plane over them."""

    __slots__ = (
        "_desired",
        "_incarnations",
        "_is_down_until_s",
        "_is_forgetful",
        "_lives",
        "_reconciler",
        "_reported",
        "_rng",
        "_shares_budgets",
        "budgets",
        "checkers",
        "directory",
        "hosts",
        "members",
        "model",
        "network",
        "reads",
        "routers",
        "run",
        "scenario",
        "slots",
        "store_reads",
    )

    def __init__(
        self,
        run: RunContext,
        scenario: Scenario,
        *,
        network: Network,
        reads: SimReads,
        store_reads: SimReads,
        model: Model,
        checkers: Checkers,
    ) -> None:
        """Start everything. `reads` go between workers' pools, `store_reads` between store nodes' arenas."""
        self.run, self.scenario = run, scenario
        self.network, self.reads, self.model, self.checkers = network, reads, model, checkers
        self.store_reads = store_reads
        self.directory = SimDirectory(run, network, lease_s=scenario.store_lease_s)
        self.hosts = [SimHost(run, f"h{i}") for i in range(scenario.host_count)]
        self.slots: list[Slot] = []
        self.members: dict[WorkerId, Member] = {}
        self.routers: list[SimRouter] = []
        self._is_down_until_s = 0.0
        self._is_forgetful = False
        """The control plane was killed: what it knew of workers is gone."""
        self._incarnations = self._lives = 0
        self._rng = run.stream("control")
        self._reported: dict[WorkerId, tuple[Role, bool, bool]] = {}
        """The last report to the reconciler about each worker: its role, whether it drains, whether it is
        silent."""
        self.budgets = BudgetPlace(lambda: run.clock.now_s, lambda: self.is_down)
        self._shares_budgets = scenario.router_count > 1 or self._rng.random() < 0.3
        self._desired = Counter(scenario.roles)
        self._reconciler = self._new_reconciler()
        for host in self.hosts:
            self._start_node(host)
        self._feed_reconciler(self._set_desired())
        for index in range(scenario.router_count):
            self.routers.append(self._new_router(index))
        self._publish()
        self._reconcile_later()

    # --- what is there ------------------------------------------------------------------------------

    @property
    def workers(self) -> list[SimWorker]:
        return [slot.worker for slot in self.slots if slot.worker is not None and slot.worker.is_alive]

    @property
    def store_nodes(self) -> list[SimStoreNode]:
        return [host.node for host in self.hosts if host.node is not None and host.node.is_alive]

    @property
    def is_down(self) -> bool:
        return self.run.clock.now_s < self._is_down_until_s

    def is_at_rest(self) -> bool:
        """All replicas run, and nobody holds anything."""
        workers = self.workers
        has_store = self.scenario.store_slot_count > 0
        return (
            len(workers) == self._desired.total()
            and self._reconciler.is_settled
            and len(self.store_nodes) == (len(self.hosts) if has_store else 0)
            and all(node.core.is_idle for node in self.store_nodes)
            and all(worker.core.is_idle and worker.ranks.is_ready for worker in workers)
            and all(router.core.is_idle for router in self.routers)
        )

    def submit(self, client: SimClient) -> None:
        router = self.routers[client.router_index]
        if not router.is_alive:
            self.checkers.ended(client, Ending.REFUSED)
            return
        router.accept_client(client)

    def close(self) -> None:
        """Let the coroutines of all routers end."""
        for router in self.routers:
            if router.is_alive:
                router.close()

    # --- faults do these ----------------------------------------------------------------------------

    def crash_host(self, host: SimHost) -> None:
        """End all processes of a machine at once: its workers, its store node and its routers."""
        for index, slot in enumerate(self.slots):
            if self._host_of(index) is host and slot.worker is not None and slot.worker.is_alive:
                slot.worker.kill(noticed_s=self._rng.choice((0.3, 2.0)))
        if host.node is not None and host.node.is_alive:
            host.node.kill(noticed_s=0.3)
        for index, router in enumerate(self.routers):
            if self._host_of(index) is host and router.is_alive:
                self.restart_router(index, after_s=self._rng.uniform(0.05, 1.0))

    def host_of(self, worker_id: WorkerId) -> SimHost | None:
        """Return the machine of a worker that runs."""
        slot = self._slot_of(worker_id)
        return None if slot is None else self._host_of(self.slots.index(slot))

    def _host_of(self, index: int) -> SimHost:
        """Return the machine of a slot or a router, by its position."""
        return self.hosts[index % len(self.hosts)]

    def go_down(self, seconds: float) -> None:
        """The control plane restarts, kills and tells nothing until it is back. It was killed, or it could
        not be heard."""
        self._is_down_until_s = max(self._is_down_until_s, self.run.clock.now_s + seconds)
        self._is_forgetful |= self._rng.random() < 0.5

    def come_back(self) -> None:
        self._is_down_until_s = self.run.clock.now_s

    def restart_router(self, index: int, *, after_s: float) -> None:
        self.routers[index].kill()
        self.run.clock.after(after_s, lambda: self._replace_router(index))

    def drain(self, slot: Slot) -> None:
        if not self.is_down and slot.worker is not None:
            self._feed_reconciler(DrainWanted(slot.worker.worker_id, "by order"))

    def set_role(self, slot: Slot, role: Role) -> None:
        """Want one fewer of the role that the worker has and one more of the other, so that this very worker
        switches."""
        state = next((r for r in self._reconciler.status() if r.name == slot.name), None)
        if self.is_down or state is None or state.role is role:
            return
        self._desired = Counter(self._desired) - Counter([state.role]) + Counter([role])
        self._feed_reconciler(self._set_desired({slot.name: role}))

    def _set_desired(self, roles: Mapping[str, Role] | None = None) -> SetDesired:
        return SetDesired((Pool(MODEL_NAME, dict(self._desired)),), roles=roles or {})

    def _new_reconciler(self) -> Reconciler:
        self._lives += 1
        restart_s = self.scenario.restart_s
        policy = RestartPolicy(
            backoff_s=restart_s,
            backoff_max_s=2 * restart_s,
            start_timeout_s=10.0,
            drain_timeout_s=self.scenario.drain_timeout_s,
            stable_s=1.0,
        )
        return Reconciler(policy=policy, life=f"{self._lives}x")

    # --- the loop -----------------------------------------------------------------------------------

    def _reconcile_later(self) -> None:
        self.run.clock.after(RECONCILE_S, self._reconcile)

    def _reconcile(self) -> None:
        self._reconcile_later()
        if self.is_down:
            return
        if self._is_forgetful:
            self._is_forgetful = False
            self._start_anew()
        for host in self.hosts:
            self._reconcile_host(host)
        for slot in list(self.slots):
            self._observe(slot)
        self._feed_reconciler(ReconcileTick())

    def _start_anew(self) -> None:
        """Begin another life of the control plane. It learns from the workers who is there, and remembers
        orders only. Workers that do not answer are killed."""
        self.run.counts["control planes started anew"] += 1
        self._reconciler = self._new_reconciler()
        self._reported.clear()
        for slot in self.slots:
            worker, slot.drain_since_s = slot.worker, None
            if worker is None or not worker.is_alive or worker.is_frozen:
                self._forget_worker(slot)
                continue
            status = worker.core.status()
            self._feed_reconciler(Adopted(worker.worker_id, MODEL_NAME, status.role, FIRST_VERSION.name))
            if status.is_draining:  # nobody waits for its end any more
                self._forget_worker(slot)
                self._feed_reconciler(ReplicaExited(worker.worker_id, "it was on its way out"))
        self._feed_reconciler(self._set_desired())

    def _forget_worker(self, slot: Slot) -> None:
        if slot.worker is not None and slot.worker.is_alive:
            slot.worker.kill(noticed_s=0.0)
        slot.worker, slot.frozen_since_s, slot.drain_since_s = None, None, None

    def _observe(self, slot: Slot) -> None:
        """Tell the reconciler what directory and platform know of a replica."""
        worker, now_s = slot.worker, self.run.clock.now_s
        if worker is None:
            return
        if worker.is_alive and slot.drain_since_s is not None and self._is_drained(slot, worker):
            worker.kill(noticed_s=0.0)
        if not worker.is_alive:
            self._forget_worker(slot)
            self._reported.pop(worker.worker_id, None)
            self._feed_reconciler(ReplicaExited(worker.worker_id, "it died"))
            self._publish()
            return
        if not worker.ranks.is_ready:
            return
        if worker.is_frozen:
            since_s = slot.frozen_since_s = slot.frozen_since_s or now_s
            if now_s - since_s > self.scenario.member_lease_s:
                self.run.counts["frozen workers killed"] += 1
                self._feed_reconciler(LeaseLapsed(worker.worker_id))
            elif now_s - since_s > self.scenario.member_lease_s / 2:
                self._report_status(slot, worker, is_silent=True)
            return
        slot.frozen_since_s = None
        self._report_status(slot, worker, is_silent=False)

    def _report_status(self, slot: Slot, worker: SimWorker, *, is_silent: bool) -> None:
        status = worker.core.status()
        news = (status.role, status.is_draining, is_silent)
        if self._reported.get(worker.worker_id) == news:
            return
        self._reported[worker.worker_id] = news
        if is_silent:
            self._feed_reconciler(MemberSilent(worker.worker_id))
        else:
            self._feed_reconciler(MemberSeen(self._member(slot, worker)))
        self._publish()

    # --- what the reconciler wants ------------------------------------------------------------------

    def _feed_reconciler(self, event: ReconcileEvent) -> None:
        for action in self._reconciler.handle(event, now_s=self.run.clock.now_s):
            self._perform(action)

    def _perform(self, action: ReconcileAction) -> None:
        if isinstance(action, StartReplica):
            self._start(action)
            return
        slot = self._slot_of(action.worker_id)
        worker = slot.worker if slot is not None else None
        if slot is None or worker is None or not worker.is_alive:
            return
        match action:
            case SwitchReplicaRole(_, role):
                slot.switch_count += 1
                number, patience_s = slot.switch_count, self.scenario.drain_timeout_s
                self._post(worker, Drain())
                self._finish_switch(slot, worker, role, number, self.run.clock.now_s + patience_s)
            case DrainReplica():
                slot.drain_since_s = self.run.clock.now_s
                self._post(worker, Drain())
                self._publish()
            case KillReplica():
                worker.kill(noticed_s=0.0)
            case _:
                assert_never(action)

    def _finish_switch(self, slot: Slot, worker: SimWorker, role: Role, number: int, until_s: float) -> None:
        """Do in the worker what `worker.role_switch` does, which needs no control plane any more."""

        def look() -> None:
            if slot.worker is not worker or slot.switch_count != number or slot.drain_since_s is not None:
                return
            is_drained = worker.core.status().is_draining and worker.core.is_idle
            if is_drained or self.run.clock.now_s >= until_s:
                self.run.counts["running workers that switched roles"] += 1
                worker.post_event(SetRole(role, resumes=True))
            else:
                self._finish_switch(slot, worker, role, number, until_s)

        self.run.clock.after(SWITCH_LOOK_S, look)

    def _post(self, worker: SimWorker, event: WorkerEvent) -> None:
        self.run.clock.after(self.network.delay_s(), lambda: worker.post_event(event))

    def _slot_of(self, worker_id: WorkerId) -> Slot | None:
        return next((s for s in self.slots if s.worker is not None and s.worker.worker_id == worker_id), None)

    def _reconcile_host(self, host: SimHost) -> None:
        if host.node is not None and not host.node.is_alive:
            host.node = None
            host.restart_at_s = self.run.clock.now_s + self.scenario.restart_s
        if host.node is None and self.run.clock.now_s >= host.restart_at_s:
            self._start_node(host)

    def _start_node(self, host: SimHost) -> None:
        if self.scenario.store_slot_count:
            host.node = SimStoreNode(
                self.run,
                host,
                scenario=self.scenario,
                network=self.network,
                reads=self.store_reads,
                directory=self.directory,
            )

    def _is_drained(self, slot: Slot, worker: SimWorker) -> bool:
        waited_s = self.run.clock.now_s - (slot.drain_since_s or 0.0)
        return waited_s > self.scenario.drain_timeout_s or (waited_s > 0.2 and worker.core.is_idle)

    def _start(self, start: StartReplica) -> None:
        name = replica_name(start.worker_id)
        slot = next((slot for slot in self.slots if slot.name == name), None)
        if slot is None:
            slot = Slot(name, start.role)
            self.slots.append(slot)
        slot.incarnation += 1
        index = self.slots.index(slot)
        slot.worker = SimWorker(
            self.run,
            start.worker_id,
            start.role,
            fingerprint=self._fingerprint(slot),
            scenario=self.scenario,
            network=self.network,
            reads=self.reads,
            model=self.model,
            checkers=self.checkers,
            host=self._host_of(index),
            shape=slot.next_shape(self.scenario.worker_shapes, index),
        )
        self.run.counts["workers of several ranks"] += len(slot.worker.memory.places) > 1
        self._publish()

    def _fingerprint(self, slot: Slot) -> str:
        """Draw which weights a replica starts with. A rolling upgrade reaches some replicas when they start
        again."""
        is_new = "upgrade" in self.scenario.faults and slot.incarnation > 1 and self._rng.random() < 0.5
        self.run.counts["workers upgraded"] += is_new
        return FINGERPRINTS[is_new]

    def _new_router(self, index: int) -> SimRouter:
        self._incarnations += 1
        return SimRouter(
            self.run,
            RouterId(f"router-{index}.{self._incarnations}"),
            scenario=self.scenario,
            network=self.network,
            reads=self.reads,
            checkers=self.checkers,
            directory=self,
            budgets=self._way_to_budgets() if self._shares_budgets else None,
        )

    def _way_to_budgets(self) -> RemoteBudgetPlace:
        timeout_s = self.scenario.store.directory_timeout_s
        return RemoteBudgetPlace(self.budgets, self.network, timeout_s=timeout_s)

    def owed_s(self, tenant: str) -> float | None:
        """Return how long until the tenant's budget of tokens is whole. None: several places count."""
        limit = self.scenario.tenants[tenant].tokens_per_minute
        if self.budgets.was_away or self._incarnations > len(self.routers) or not self._shares_budgets:
            return None
        ask = Ask(tenant, "audit", 0.0, 0, tokens_per_minute=limit)
        return self.budgets.ledger.take(ask, now_s=self.run.clock.now_s).tokens_left_s

    def router_named(self, name: str) -> SimRouter | None:
        return next((router for router in self.routers if router.name == name), None)

    def _replace_router(self, index: int) -> None:
        self.routers[index] = self._new_router(index)
        if self.is_down:  # the new router learns who is there when the directory answers again
            self.run.clock.at(self._is_down_until_s, self._publish)
        else:
            self._publish()

    def _member(self, slot: Slot, worker: SimWorker) -> Member:
        status = worker.core.status()
        return Member(
            worker_id=worker.worker_id,
            role=status.role,
            address=f"sim:{worker.worker_id}",
            model=MODEL_NAME,
            fingerprint=worker.fingerprint,
            is_draining=status.is_draining or slot.drain_since_s is not None,
            is_suspect=self._reported.get(worker.worker_id, (None, None, False))[2],
        )

    def _publish(self) -> None:
        """Tell the routers the membership, each in its own time."""
        members: dict[WorkerId, Member] = {}
        for slot in self.slots:
            if (worker := slot.worker) is not None and worker.is_alive and worker.ranks.is_ready:
                members[worker.worker_id] = self._member(slot, worker)
        self.members = members
        for router in self.routers:
            self._inform(router, members)

    def _inform(self, router: SimRouter, members: dict[WorkerId, Member]) -> None:
        """Send one router a view. Views arrive in order: a later one replaces it, an overtaken one is
        skipped."""

        def arrive() -> None:
            if self.members is members:
                router.set_members(members, [other.name for other in self.routers if other.is_alive])

        self.run.clock.after(2 * self.network.delay_s(), lambda: router.post(arrive))
