"""A host and its store node: the production `NodeCore` over a simulated arena, disk and network."""

import random
from collections.abc import Callable
from typing import cast

import msgspec

from baton.core.ids import NodeId, WorkerId
from baton.core.store import BlocksGrant, NodeRef, NodeToNode, StoreHello, WorkerToStore
from kv_store.node.core import NodeCore
from kv_store.node.events import (
    DropStoreClient,
    ForgetHost,
    ForgetSsd,
    FromPeer,
    FromStoreClient,
    LookUp,
    NodeAction,
    NodeEvent,
    OpenSizeClass,
    Publish,
    ReadSsd,
    SizeClassOpened,
    StoreClientJoined,
    StoreClientLost,
    StorePeerLost,
    StoreTick,
    ToPeer,
    ToStoreClient,
    WriteSsd,
)
from kv_transfer.read import BlockRead, ReadEvent, ReadSettled
from simulator.faults.memory import DeviceMemory
from simulator.faults.network import Network, SimProcess, SimSession
from simulator.faults.node import CoreTimer
from simulator.faults.reads import Generations, SimReads
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import GEOMETRY, Scenario
from simulator.faults.store_checks import StoreChecker
from simulator.faults.store_directory import SimDirectory
from simulator.faults.store_disk import SimDisk
from simulator.faults.store_link import LocalSession

SPACE = GEOMETRY.block_bytes
"""The one block size of a simulated cluster."""
LOOK_EVERY = 8
"""Events of one node between two looks at what its tenants have."""


class SimHost:
    """A machine: its disk, its store node of the moment, and the workers that look for it."""

    __slots__ = ("disk", "incarnation", "name", "node", "restart_at_s")

    def __init__(self, run: RunContext, name: str) -> None:
        self.name = name
        self.disk = SimDisk(run, name)
        self.node: SimStoreNode | None = None
        self.incarnation = 0
        self.restart_at_s = 0.0


class SimStoreNode(SimProcess):
    """One life of a store node process. It looks like a worker to reads of its arena (`reads.PoolOwner`)."""

    __slots__ = (
        "_checker",
        "_directory",
        "_disk",
        "_event_count",
        "_has_scanned",
        "_network",
        "_peer_sessions",
        "_reads",
        "_rng",
        "_scenario",
        "_timer",
        "_wanted",
        "arena",
        "core",
        "generations",
        "memory",
        "node_id",
        "on_grant",
        "sessions",
        "worker_id",
    )

    def __init__(
        self,
        run: RunContext,
        host: SimHost,
        *,
        scenario: Scenario,
        network: Network,
        reads: SimReads,
        directory: "SimDirectory",
    ) -> None:
        host.incarnation += 1
        name = f"store-{host.name}.{host.incarnation}"
        super().__init__(run, name)
        self.node_id, self.worker_id = NodeId(name), WorkerId(name)
        self._scenario, self._network, self._reads, self._disk = scenario, network, reads, host.disk
        self._directory = directory
        self._has_scanned = False
        self._event_count = 0
        self._rng: random.Random = run.stream(f"store/{name}")
        self._timer = CoreTimer(self)
        self.sessions: list[LocalSession] = []
        self._peer_sessions: dict[NodeId, SimSession] = {}
        self._wanted: dict[int, BlockRead] = {}
        """Reads of peers under way."""
        self.generations = Generations(scenario.store_slot_count)
        self.arena = self.memory = DeviceMemory(scenario.store_slot_count)
        self.on_grant: Callable[[], None] | None = None
        """A call that happens once, as the next grant of a peer arrives and before it is read."""
        self.core = NodeCore(
            self.ref,
            scenario.store,
            make_generations=self._table,
            now_s=self.local_clock.now_s(),
        )
        self._checker = StoreChecker(self, self.core, lease_s=scenario.store.lease_s)
        reads.register(self)
        self._check_reuse()
        directory.joins(self)
        if self._disk.slots:
            self._scan_disk()
        self._arm()

    @property
    def process(self) -> SimProcess:
        return self

    @property
    def ref(self) -> NodeRef:
        return NodeRef(self.node_id, f"sim:{self.node_id}")

    # --- events in, actions out ---------------------------------------------------------------------

    def feed(self, event: NodeEvent) -> None:
        if not isinstance(event, StoreTick):
            self.run.note(self.name, event)
        for action in self.core.handle(event, now_s=self.local_clock.now_s()):
            self._perform(action)
        self._arm()
        self.audit()
        self._event_count += 1
        if not self._event_count % LOOK_EVERY:
            config = self._scenario.store
            self._checker.tenants(int(config.host_bytes * config.tenant_share_max))

    def audit(self) -> None:
        """Check invariant 3: free + held = all, in every tier."""
        try:
            self.core.check()
        except AssertionError as error:
            raise Violation(3, f"{self.name}'s accounts: {error}") from error

    def _check_reuse(self) -> None:
        """Check invariant 3 whenever a slot is given out: no copy of a worker that is alive touches it."""
        told = self.generations.on_rise
        assert told is not None

        def rises(slot: int) -> None:
            told(slot)
            for session in self.sessions:
                if session.is_open and session.worker.store.copies_with(self.arena, slot):
                    raise Violation(
                        3, f"{self.name} gives out slot {slot}, which {session.worker.name} copies"
                    )

        self.generations.on_rise = rises

    def _open(self, action: OpenSizeClass) -> None:
        if action.size_class != SPACE or action.slot_count > self._scenario.store_slot_count:
            raise Violation(0, f"{self.name} opens {action}")
        if action.ssd_slot_count and not self._has_scanned:
            self._scan_disk()

    def _scan_disk(self) -> None:
        self._has_scanned = True
        opened = SizeClassOpened(SPACE, tuple(self._disk.recovered()))
        self.run.counts["blocks recovered from SSD"] += len(opened.recovered)
        self.run.clock.after(self._disk.seconds(), lambda: self.post(lambda: self.feed(opened)))

    def _table(self, size_class: int, slot_count: int) -> Generations:
        assert slot_count <= len(self.generations)
        return self.generations

    def _arm(self) -> None:
        self._timer.arm(self.core.next_tick_s, lambda: self.feed(StoreTick()))

    def _perform(self, action: NodeAction) -> None:
        run = self.run
        match action:
            case OpenSizeClass():
                self._open(action)
            case DropStoreClient():
                raise Violation(0, f"{self.name}: {action}")
            case ToStoreClient(worker_id, message):
                session = self._session_of(worker_id)
                if session is not None:
                    session.to_worker(message)
            case ToPeer(_, peer, message):
                self._checker.said(peer.node_id, message)
                self._to_peer(peer, message)
            case ReadSsd():
                seconds = self._disk.seconds()
                run.clock.after(seconds, lambda: self.post(lambda: self._read_ends(action, seconds)))
            case WriteSsd():
                seconds = self._disk.seconds()
                self._disk.begin_write(action, self.arena)
                run.clock.after(seconds, lambda: self.post(lambda: self._write_ends(action.op_id, seconds)))
            case ForgetSsd(_, ssd_slot):
                self._disk.forget(ssd_slot)
            case ForgetHost(_, slot):
                self.arena.forget(slot)
            case BlockRead():
                self._read_peer(action)
            case LookUp():
                self._directory.look_up(self, action)
            case Publish(changes):
                self._directory.on_changes(self, changes)

    # --- workers of this host -----------------------------------------------------------------------

    def _session_of(self, worker_id: WorkerId) -> LocalSession | None:
        return next((s for s in self.sessions if s.worker.worker_id == worker_id), None)

    def on_worker_message(self, session: LocalSession, message: WorkerToStore) -> None:
        if isinstance(message, StoreHello):
            self.feed(StoreClientJoined(message))
        else:
            self.feed(FromStoreClient(session.worker.worker_id, message))

    def on_worker_closed(self, session: LocalSession) -> None:
        self.sessions.remove(session)
        self.feed(StoreClientLost(session.worker.worker_id))

    # --- the disk -----------------------------------------------------------------------------------

    def _read_ends(self, read: ReadSsd, seconds: float) -> None:
        self.feed(self._disk.read(read, self.arena, seconds))

    def _write_ends(self, op_id: int, seconds: float) -> None:
        self.feed(self._disk.end_write(op_id, seconds))

    # --- peers --------------------------------------------------------------------------------------

    def _to_peer(self, peer: NodeRef, message: NodeToNode) -> None:
        session = self._peer_sessions.get(peer.node_id)
        if session is not None and session.is_open:
            session.send(0 if session.ends[0].process is not self else 1, message)
            return
        delay_s = 2 * self._network.delay_s()
        self.run.clock.after(delay_s, lambda: self.post(lambda: self._connect(peer, message)))

    def _connect(self, peer: NodeRef, message: NodeToNode) -> None:
        other = self._reads.workers.get(WorkerId(peer.node_id))
        is_cut_off = self._network.is_cut_off(peer.node_id) or self._network.is_cut_off(self.name)
        session = self._peer_sessions.get(peer.node_id)
        if session is not None and session.is_open:
            session.send(0 if session.ends[0].process is not self else 1, message)
        elif not isinstance(other, SimStoreNode) or not other.is_alive or other.is_frozen or is_cut_off:
            lost = StorePeerLost(SPACE, peer.node_id, "cannot connect")
            self.run.clock.after(
                self._scenario.connect_timeout_s / 4, lambda: self.post(lambda: self.feed(lost))
            )
        else:
            session = self._network.open(StoreNodeEnd(self, other), StoreNodeEnd(other, self))
            self._peer_sessions[peer.node_id] = other._peer_sessions[self.node_id] = session
            session.send(1, message)

    def on_peer_message(self, peer: "SimStoreNode", message: NodeToNode) -> None:
        strike = self.on_grant
        if strike is not None and isinstance(message, BlocksGrant):
            self.on_grant = None
            strike()
            self.post(lambda: self.on_peer_message(peer, message))
            return
        self._checker.heard(peer.node_id, message)
        self.feed(FromPeer(SPACE, peer.ref, message))

    def on_peer_break(self, peer: "SimStoreNode", session: SimSession, reason: str) -> None:
        if self._peer_sessions.get(peer.node_id) is session:
            del self._peer_sessions[peer.node_id]
            if self._rng.random() < 0.5:
                self._reads.give_up(self, peer.worker_id)
            self.feed(StorePeerLost(SPACE, peer.node_id, reason))

    def _read_peer(self, read: BlockRead) -> None:
        self._wanted[read.read_id] = read
        self._reads.start(self, read)

    def post_event(self, event: ReadEvent) -> None:
        self.post(lambda: self._on_read_event(event))

    def _on_read_event(self, event: ReadEvent) -> None:
        if isinstance(event, ReadSettled):
            self.feed(event)
            return
        read = self._wanted.pop(event.read_id)
        pairs = enumerate(zip(read.local_blocks, read.checksums, strict=True))
        is_well = not event.error
        bad = tuple(
            i for i, (slot, sum_) in pairs if is_well and sum_ and self.arena.checksum_of(slot) != sum_
        )
        counts = self.run.counts
        counts["corrupt blocks noticed after a fetch"] += len(bad)
        counts["blocks fetched from a peer"] += 0 if event.error else len(read.local_blocks) - len(bad)
        self.feed(msgspec.structs.replace(event, corrupt=bad, seconds=0.001))

    def flip_bit(self, rng: random.Random) -> bool:
        """Flip one bit of one block at rest in the arena. What is being written has no checksum yet, and is
        left alone."""
        writing = {slot for session in self.sessions for slot in session.worker.store.slots_being_written()}
        full = [slot for slot in self.arena.written_blocks if slot not in writing]
        if not full:
            return False
        self.arena.flip(rng.choice(full))
        return True

    # --- ends ---------------------------------------------------------------------------------------

    def kill(self, *, noticed_s: float) -> None:
        """End the process, as SIGKILL does. The arena stays mapped by workers, and nobody finds it again; the
        disk stays."""
        self.die()
        self._disk.node_died()
        for session in self.sessions:
            session.close()
        self._reads.reader_died(self)
        self._network.process_died(self, noticed_s=noticed_s)


class StoreNodeEnd:
    """The end that `node` has of a session with `peer`."""

    __slots__ = ("_node", "_peer")

    def __init__(self, node: SimStoreNode, peer: SimStoreNode) -> None:
        self._node, self._peer = node, peer

    @property
    def process(self) -> SimProcess:
        return self._node

    def on_message(self, session: SimSession, message: object) -> None:
        self._node.on_peer_message(self._peer, cast("NodeToNode", message))

    def on_break(self, session: SimSession, reason: str) -> None:
        self._node.on_peer_break(self._peer, session, reason)
