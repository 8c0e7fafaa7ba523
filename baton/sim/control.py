"""The control plane as far as routers and workers notice it: membership, restarts, drains, roles."""

from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Member, Role
from baton.sim.checkers import Checkers
from baton.sim.client import Ending, SimClient
from baton.sim.model import Model
from baton.sim.network import Network
from baton.sim.node import FINGERPRINTS, MODEL_NAME, SimWorker
from baton.sim.reads import Reads
from baton.sim.router_node import SimRouter
from baton.sim.scenario import Scenario
from baton.sim.store_directory import SimDirectory
from baton.sim.store_node import SimHost, SimStoreNode
from baton.sim.world import World
from baton.worker.events import Drain, SetRole

RECONCILE_S = 0.1


class Slot:
    """One replica: the worker that fills it now, and what is wanted of it."""

    __slots__ = (
        "drain_since_s",
        "first_role",
        "frozen_since_s",
        "incarnation",
        "name",
        "restart_at_s",
        "role",
        "worker",
    )

    def __init__(self, name: str, role: Role) -> None:
        self.name, self.role, self.first_role = name, role, role
        self.incarnation = 0
        self.worker: SimWorker | None = None
        self.restart_at_s = 0.0
        self.frozen_since_s: float | None = None
        self.drain_since_s: float | None = None


class Cluster:
    """All processes of one run, and the control plane over them."""

    __slots__ = (
        "_incarnations",
        "_is_down_until_s",
        "_rng",
        "checkers",
        "directory",
        "hosts",
        "members",
        "model",
        "network",
        "reads",
        "routers",
        "scenario",
        "slots",
        "store_reads",
        "world",
    )

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        *,
        network: Network,
        reads: Reads,
        store_reads: Reads,
        model: Model,
        checkers: Checkers,
    ) -> None:
        """`reads`: between workers' pools. `store_reads`: between store nodes' arenas."""
        self.world, self.scenario = world, scenario
        self.network, self.reads, self.model, self.checkers = network, reads, model, checkers
        self.store_reads = store_reads
        self.directory = SimDirectory(world, network, lease_s=scenario.store_lease_s)
        self.hosts = [SimHost(world, f"h{i}") for i in range(scenario.host_count)]
        self.slots = [Slot(f"{role}-{i}", role) for i, role in enumerate(scenario.roles)]
        self.members: dict[WorkerId, Member] = {}
        self.routers: list[SimRouter] = []
        self._is_down_until_s = 0.0
        self._incarnations = 0
        self._rng = world.stream("control")
        for host in self.hosts:
            self._start_node(host)
        for slot in self.slots:
            self._start(slot)
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
        return self.world.now_s < self._is_down_until_s

    def is_at_rest(self) -> bool:
        """All replicas run, and nobody holds anything."""
        workers = self.workers
        has_store = self.scenario.store_slot_count > 0
        return (
            len(workers) == len(self.slots)
            and len(self.store_nodes) == (len(self.hosts) if has_store else 0)
            and all(node.core.is_idle for node in self.store_nodes)
            and all(worker.core.is_idle for worker in workers)
            and all(router.core.is_idle for router in self.routers)
        )

    def submit(self, client: SimClient) -> None:
        router = self.routers[client.router_index]
        if not router.is_alive:
            self.checkers.ended(client, Ending.REFUSED)
            return
        router.accept_client(client)

    # --- faults do these ----------------------------------------------------------------------------

    def go_down(self, seconds: float) -> None:
        """Nothing is restarted, killed or told until it is back."""
        self._is_down_until_s = max(self._is_down_until_s, self.world.now_s + seconds)

    def come_back(self) -> None:
        self._is_down_until_s = self.world.now_s

    def restart_router(self, index: int, *, after_s: float) -> None:
        self.routers[index].kill()
        self.world.after(after_s, lambda: self._replace_router(index))

    def drain(self, slot: Slot) -> None:
        worker = slot.worker
        if self.is_down or worker is None or not worker.is_alive or slot.drain_since_s is not None:
            return
        slot.drain_since_s = self.world.now_s
        self.world.after(self.network.delay_s(), lambda: worker.post_event(Drain()))
        self._publish()

    def set_role(self, slot: Slot, role: Role) -> None:
        if self.is_down:
            return
        worker = slot.worker
        slot.role = role
        if worker is not None and worker.is_alive:
            self.world.after(self.network.delay_s(), lambda: worker.post_event(SetRole(role)))
            self._publish()

    # --- the loop -----------------------------------------------------------------------------------

    def _reconcile_later(self) -> None:
        self.world.after(RECONCILE_S, self._reconcile)

    def _reconcile(self) -> None:
        self._reconcile_later()
        if self.is_down:
            return
        for host in self.hosts:
            self._reconcile_host(host)
        changes = [self._reconcile_slot(slot) for slot in self.slots]  # all of them: no short cut
        if any(changes):
            self._publish()

    def _reconcile_slot(self, slot: Slot) -> bool:
        """Returns whether the membership changed."""
        worker, now_s = slot.worker, self.world.now_s
        if worker is None:
            if now_s >= slot.restart_at_s:
                self._start(slot)
                return True
            return False
        if worker.is_alive and worker.is_frozen:
            if slot.frozen_since_s is None:
                slot.frozen_since_s = now_s
            if now_s - slot.frozen_since_s > self.scenario.member_lease_s:
                self.world.counts["frozen workers killed"] += 1
                worker.kill(noticed_s=0.0)
        else:
            slot.frozen_since_s = None
        if worker.is_alive and slot.drain_since_s is not None and self._is_drained(slot, worker):
            worker.kill(noticed_s=0.0)
        if not worker.is_alive:
            slot.worker, slot.frozen_since_s, slot.drain_since_s = None, None, None
            slot.restart_at_s = now_s + self.scenario.restart_s
            return True
        return False

    def _reconcile_host(self, host: SimHost) -> None:
        if host.node is not None and not host.node.is_alive:
            host.node = None
            host.restart_at_s = self.world.now_s + self.scenario.restart_s
        if host.node is None and self.world.now_s >= host.restart_at_s:
            self._start_node(host)

    def _start_node(self, host: SimHost) -> None:
        if self.scenario.store_slot_count:
            host.node = SimStoreNode(
                self.world,
                host,
                scenario=self.scenario,
                network=self.network,
                reads=self.store_reads,
                directory=self.directory,
            )

    def _is_drained(self, slot: Slot, worker: SimWorker) -> bool:
        waited_s = self.world.now_s - (slot.drain_since_s or 0.0)
        return waited_s > self.scenario.drain_timeout_s or (waited_s > 0.2 and worker.core.is_idle)

    def _start(self, slot: Slot) -> None:
        slot.incarnation += 1
        slot.worker = SimWorker(
            self.world,
            WorkerId(f"{slot.name}.{slot.incarnation}"),
            slot.role,
            fingerprint=self._fingerprint(slot),
            scenario=self.scenario,
            network=self.network,
            reads=self.reads,
            model=self.model,
            checkers=self.checkers,
            host=self.hosts[self.slots.index(slot) % len(self.hosts)],
        )

    def _fingerprint(self, slot: Slot) -> str:
        """A rolling upgrade reaches some replicas when they start again."""
        is_new = "upgrade" in self.scenario.faults and slot.incarnation > 1 and self._rng.random() < 0.5
        self.world.counts["workers upgraded"] += is_new
        return FINGERPRINTS[is_new]

    def _new_router(self, index: int) -> SimRouter:
        self._incarnations += 1
        return SimRouter(
            self.world,
            RouterId(f"router-{index}.{self._incarnations}"),
            scenario=self.scenario,
            network=self.network,
            reads=self.reads,
            checkers=self.checkers,
        )

    def _replace_router(self, index: int) -> None:
        self.routers[index] = self._new_router(index)
        if self.is_down:  # the new router learns who is there when the directory answers again
            self.world.at(self._is_down_until_s, self._publish)
        else:
            self._publish()

    def _publish(self) -> None:
        """Routers learn of the membership, each in its own time."""
        members: dict[WorkerId, Member] = {}
        for slot in self.slots:
            if slot.worker is not None:
                worker_id = slot.worker.worker_id
                members[worker_id] = Member(
                    worker_id=worker_id,
                    role=slot.role,
                    address=f"sim:{worker_id}",
                    model=MODEL_NAME,
                    fingerprint=slot.worker.fingerprint,
                    is_draining=slot.drain_since_s is not None,
                )
        self.members = members
        for router in self.routers:
            self._tell(router, members)

    def _tell(self, router: SimRouter, members: dict[WorkerId, Member]) -> None:
        """Views of one router arrive in order: a later one replaces it, an overtaken one is skipped."""

        def arrive() -> None:
            if self.members is members:
                router.set_members(members)

        self.world.after(2 * self.network.delay_s(), lambda: router.post(arrive))
