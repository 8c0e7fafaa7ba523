"""The faults of a run: the seed decides which of them strikes when, and `stop` ends and heals all of them."""

import random
from collections.abc import Callable, Iterable
from functools import partial

from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role, StartSequence
from simulator.faults.control import Cluster
from simulator.faults.network import SimSession
from simulator.faults.node import SimWorker
from simulator.faults.rank_faults import RankFaults
from simulator.faults.reads import ReadFaults
from simulator.faults.slot import Slot
from simulator.faults.store_faults import StoreFaults

OTHER_ROLE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL, Role.AGGREGATED: Role.PREFILL}
STALL_S = 1.0
"""Time for which a message is held back that is to be lost."""


class Faults:
    """Schedule every enabled fault class a few times between the first arrival and `ends_s`."""

    __slots__ = ("_cluster", "_is_over", "_ranks", "_rng", "_store")

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng: random.Random = cluster.run.stream("faults")
        self._is_over = False
        self._store = StoreFaults(cluster, cluster.run.stream("store faults"), self._span_s)
        self._ranks = RankFaults(cluster, cluster.run.stream("rank faults"))

    @property
    def ends_s(self) -> float:
        return self._cluster.scenario.arrivals_s + 1.0

    def schedule(self) -> None:
        strikes: dict[str, Callable[[], None]] = {
            "worker_crash": self._worker_crash,
            "worker_freeze": self._worker_freeze,
            "worker_suspend": self._worker_suspend,
            "host_crash": self._host_crash,
            "session_break": self._session_break,
            "partition": self._partition,
            "peer_stall": self._peer_stall,
            "slow_network": self._slow_network,
            "slow_worker": self._slow_worker,
            "sick_worker": self._sick_worker,
            "straggler": self._straggler,
            "router_crash": self._router_crash,
            "router_freeze": self._router_freeze,
            "drain": self._drain,
            "reports_lost": self._lose_reports,
            "role_switch": self._switch_role,
            "control_outage": self._control_outage,
            **self._store.strikes(),
        }
        run, enabled = self._cluster.run, self._cluster.scenario.faults
        for name, strike in strikes.items():
            if name in enabled:
                for _ in range(self._rng.choice((1, 2, self._cluster.scenario.strikes_max))):
                    run.clock.at(
                        self._rng.uniform(0.3, self.ends_s), lambda n=name, s=strike: self._strike(n, s)
                    )
        self._ranks.schedule(self.ends_s, self._strike)
        self._enable_reads(enabled)
        if "repeats" in enabled:
            self._cluster.network.repeat_chance = self._rng.choice((0.05, 0.3))
        run.clock.at(self.ends_s, self._stop)

    def _strike(self, name: str, strike: Callable[[], None]) -> None:
        if not self._is_over:
            self._cluster.run.counts[f"fault: {name}"] += 1
            strike()

    def _enable_reads(self, enabled: frozenset[str]) -> None:
        rate = self._cluster.scenario.read_fault_chance or self._rng.choice((0.05, 0.2, 0.5))
        for reads in (self._cluster.reads, self._cluster.store_reads):
            reads.faults.fail = rate if "read_fail" in enabled else 0.0
            reads.faults.hang = rate if "read_hang" in enabled else 0.0
            reads.faults.late = rate if "read_late" in enabled else 0.0

    def _stop(self) -> None:
        """Heal everything; what is dead is restarted by the control plane."""
        self._is_over = True
        cluster = self._cluster
        cluster.come_back()
        self._store.stop()
        self._ranks.stop()
        cluster.network.repeat_chance = 0.0
        cluster.network.slowness = cluster.reads.slowness = 1.0
        cluster.network.cut_off_until_s.clear()
        cluster.reads.faults, cluster.store_reads.faults = ReadFaults(), ReadFaults()
        for slot in cluster.slots:
            cluster.set_role(slot, slot.first_role)
            if slot.worker is not None:
                slot.worker.on_stranger = slot.worker.on_decode = None
                slot.worker.step_slowness = 1.0
                slot.worker.is_sick = False
                self._thaw(slot.worker)
        for router in cluster.routers:
            router.thaw()
            router.reports_lost_until_s.clear()

    # --- victims ------------------------------------------------------------------------------------

    def _slot(self) -> Slot:
        return self._rng.choice(self._cluster.slots)

    def _worker(self) -> SimWorker | None:
        worker = self._slot().worker
        return worker if worker is not None and worker.is_alive else None

    def _span_s(self) -> float:
        """Draw a time: shorter than everybody's patience, about as long, or longer."""
        return self._rng.choice((0.05, 0.4, 0.9, 1.5, 3.0)) * self._rng.uniform(0.7, 1.3)

    # --- strikes ------------------------------------------------------------------------------------

    def _worker_crash(self) -> None:
        worker = self._worker()
        if worker is not None:
            worker.kill(noticed_s=self._rng.choice((0.0, 0.0, 0.3, 2.0)))

    def _host_crash(self) -> None:
        """A machine dies. Either one does at once, or that of the reader which asks an owner for a sequence
        that the owner has not heard of, with the router that is telling the owner: nobody will."""
        if self._rng.random() < 0.3:
            self._cluster.crash_host(self._rng.choice(self._cluster.hosts))
            return
        for worker in self._cluster.workers:
            worker.on_decode = partial(self._owner_hears_late, worker)

    def _owner_hears_late(self, reader: SimWorker, router_id: RouterId, start: StartSequence) -> None:
        """Let the owner of a sequence hear of it long after its reader, if it has not heard of it yet."""
        owner = None if start.source is None else self._worker_named(start.source.worker_id)
        session = None if owner is None else owner.router_session(router_id)
        if owner is None or session is None or not _is_among(start.seq_id, session.under_way_to(1)):
            reader.on_decode = partial(self._owner_hears_late, reader)
            return
        session.stall(1, STALL_S)
        owner.on_stranger = partial(self._stranger_dies, owner)

    def _stranger_dies(self, owner: SimWorker, reader: WorkerId, seq_id: str) -> None:
        host = self._cluster.host_of(reader)
        for index, router in enumerate(self._cluster.routers):
            session = owner.router_session(router.router_id)
            if router.is_alive and session is not None and _is_among(seq_id, session.under_way_to(1)):
                self._cluster.restart_router(index, after_s=self._rng.uniform(0.05, 1.0))
        if host is not None and host is not self._cluster.host_of(owner.worker_id):
            self._cluster.crash_host(host)
        elif (victim := self._worker_named(reader)) is not None:
            victim.kill(noticed_s=0.0)

    def _worker_named(self, worker_id: WorkerId) -> SimWorker | None:
        return next((w for w in self._cluster.workers if w.worker_id == worker_id), None)

    def _worker_freeze(self) -> None:
        worker = self._worker()
        if worker is not None and not worker.is_frozen:
            worker.freeze()
            self._cluster.run.clock.after(self._span_s(), lambda: self._thaw(worker))

    def _worker_suspend(self) -> None:
        """Suspend workers. Their clocks stand still meanwhile, so that afterwards they believe in leases that
        are over. Either one worker is suspended at once, or each worker when it is worst: as its next grant
        arrives, until that lease has ended."""
        if self._rng.random() < 0.5:
            worker = self._worker()
            if worker is not None:
                self._suspend(worker, self._span_s())
            return
        over_s = self._cluster.scenario.transfer.lease_s * self._rng.uniform(1.0, 3.0)
        for slot in self._cluster.slots:
            if (worker := slot.worker) is not None:
                worker.on_grant = partial(self._suspend, worker, over_s)

    def _suspend(self, worker: SimWorker, span_s: float) -> None:
        if worker.is_alive and not worker.is_frozen:
            worker.freeze(stops_clock=True)
            self._cluster.run.clock.after(span_s, lambda: self._thaw(worker))

    def _thaw(self, worker: SimWorker) -> None:
        worker.thaw(mistrust_s=3 * self._cluster.scenario.transfer.lease_s)

    def _session_break(self) -> None:
        session = self._session()
        if session is not None:
            session.break_off("reset", noticed_after_s=(self._noticed_after_s(), self._noticed_after_s()))

    def _noticed_after_s(self) -> float:
        return self._rng.choice((0.0, 0.001, 0.1, 0.7)) * self._rng.random()

    def _session(self) -> SimSession | None:
        sessions = list(self._cluster.network.sessions.values())
        return self._rng.choice(sessions) if sessions else None

    def _partition(self) -> None:
        """One worker is cut off from everybody: its sessions stall, and nobody connects to it."""
        worker = self._worker()
        if worker is None:
            return
        network, span_s = self._cluster.network, self._span_s()
        network.cut_off_until_s[worker.name] = network.run.clock.now_s + span_s
        for session in network.sessions_of(worker):
            session.stall(0, span_s)
            session.stall(1, span_s)

    def _peer_stall(self) -> None:
        """Workers do not hear each other for a while, in one direction longer; the NICs go on."""
        network = self._cluster.network
        towards_s = (self._span_s(), self._span_s())
        for session in network.sessions.values():
            if all(isinstance(end.process, SimWorker) for end in session.ends):
                session.stall(0, towards_s[0])
                session.stall(1, towards_s[1])

    def _slow_network(self) -> None:
        network, reads = self._cluster.network, self._cluster.reads
        network.slowness = self._rng.choice((5.0, 20.0, 50.0))
        reads.slowness = self._rng.choice((1.0, 5.0, 20.0))
        network.run.clock.after(self._span_s(), self._normal_network)

    def _normal_network(self) -> None:
        self._cluster.network.slowness = self._cluster.reads.slowness = 1.0

    def _slow_worker(self) -> None:
        worker = self._worker()
        if worker is not None:
            worker.step_slowness = self._rng.choice((3.0, 20.0))

    def _sick_worker(self) -> None:
        """One worker accepts sequences, and fails each of them at once."""
        worker = self._worker()
        if worker is not None:
            worker.is_sick = True
            self._cluster.run.clock.after(self._span_s(), lambda: setattr(worker, "is_sick", False))

    def _straggler(self) -> None:
        """The steps of one worker take very long for a while."""
        worker = self._worker()
        if worker is not None:
            worker.step_slowness = self._rng.choice((20.0, 100.0))
            self._cluster.run.clock.after(self._span_s(), lambda: setattr(worker, "step_slowness", 1.0))

    def _router_crash(self) -> None:
        index = self._rng.randrange(len(self._cluster.routers))
        if self._cluster.routers[index].is_alive:
            self._cluster.restart_router(index, after_s=self._rng.uniform(0.05, 1.0))

    def _lose_reports(self) -> None:
        """Let the load reports of a worker not arrive, while all else does."""
        worker = self._worker()
        if worker is not None:
            until_s = self._cluster.run.clock.now_s + 1.0 + self._span_s()
            for router in self._cluster.routers:
                router.reports_lost_until_s[worker.name] = until_s

    def _router_freeze(self) -> None:
        router = self._rng.choice(self._cluster.routers)
        if router.is_alive and not router.is_frozen:
            router.freeze()
            self._cluster.run.clock.after(self._span_s(), router.thaw)

    def _drain(self) -> None:
        self._cluster.drain(self._slot())

    def _switch_role(self) -> None:
        slot = self._slot()
        self._cluster.set_role(slot, OTHER_ROLE[slot.role])

    def _control_outage(self) -> None:
        self._cluster.go_down(self._span_s())


def _is_among(seq_id: str, messages: Iterable[object]) -> bool:
    """Return whether one of the messages is about the sequence."""
    return any(getattr(message, "seq_id", None) == seq_id for message in messages)
