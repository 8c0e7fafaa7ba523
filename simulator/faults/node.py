"""The worker process around the production `WorkerCore`: its memory, its GPU, its sessions, its timer.

The rules are those of the asyncio process: messages to a lost router are dropped; a session to a KV owner is
opened when first needed, and `OwnerLost` says that it broke or could not be opened.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import cast

from baton.core.geometry import fingerprint as kv_fingerprint
from baton.core.ids import RouterId, SeqKey, WorkerId
from baton.core.messages import (
    CancelSequence,
    FailureReason,
    KVGrant,
    KVRequest,
    OwnerMessage,
    PeerRef,
    Phase,
    ReaderMessage,
    Role,
    RouterMessage,
    SequenceFailed,
    StartSequence,
)
from baton.core.shape import Shape
from baton.core.steps import StepPlan, StepResult
from engine.scheduling.overlap import StepOverlap
from kv_transfer.read import BlockRead
from simulator.faults.checkers import Checkers
from simulator.faults.memory import DeviceMemory
from simulator.faults.model import Model
from simulator.faults.network import Network, SimProcess, SimSession
from simulator.faults.preparation import SlowPreparation
from simulator.faults.ranks import RequestPoint, SimRanks, places_of_shape
from simulator.faults.reads import Generations, SimReads
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import GEOMETRY, MODEL_NAME, Scenario
from simulator.faults.store_link import LinkedHost, SimStoreLink
from worker.core import WorkerCore
from worker.events import (
    CopyFromStore,
    CopyToStore,
    FromOwner,
    FromReader,
    FromRouter,
    OwnerLost,
    ReaderLost,
    RouterJoined,
    RouterLost,
    RunStep,
    StepDone,
    ToOwner,
    ToReader,
    ToRouter,
    ToStore,
    WorkerAction,
    WorkerEvent,
    WorkerTick,
)

FINGERPRINTS = tuple(
    kv_fingerprint(model=MODEL_NAME, weights_digest=weights, geometry=GEOMETRY, wire_version=1)
    for weights in ("old", "new")
)
"""Fingerprints before and after an upgrade. KV never moves from one to the other."""
TICK_EPSILON_S = 1e-6
"""A tick comes this much after its instant, so that rounding of clocks never makes it early."""
TICKS_PER_MS_MAX = 200
WAIT_S = 0.02
"""Time after which a step looks again for a rank that stands still."""


class CoreTimer:
    """A timer that calls back when a core's `next_tick_s` has come, on that process's own clock."""

    __slots__ = ("_armed_for_s", "_process", "_spins", "_spins_since_s", "_version")

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._armed_for_s: float | None = None
        self._version = 0
        self._spins, self._spins_since_s = 0, 0.0

    def arm(self, due_s: float | None, fire: Callable[[], None]) -> None:
        """Arm the timer for `due_s` on the process's clock, if that is earlier than what it is armed for."""
        if due_s is None:
            return
        run = self._process.run
        at_s = max(self._process.local_clock.virtual_s(due_s), run.clock.now_s) + TICK_EPSILON_S
        if self._armed_for_s is not None and self._armed_for_s <= at_s:
            return
        self._armed_for_s = at_s
        self._version += 1
        version = self._version
        run.clock.at(at_s, lambda: self._process.post(lambda: self._fire(version, fire)))

    def _fire(self, version: int, fire: Callable[[], None]) -> None:
        if version != self._version:
            return
        self._armed_for_s = None
        self._count_spins()
        fire()

    def _count_spins(self) -> None:
        now_s = self._process.run.clock.now_s
        if now_s - self._spins_since_s > 0.001:
            self._spins, self._spins_since_s = 0, now_s
        self._spins += 1
        if self._spins > TICKS_PER_MS_MAX:
            raise Violation(
                6, f"{self._process.name} wants to be called again and again: next_tick_s is stuck"
            )


class SimWorker(SimProcess):
    """One life of a worker process."""

    __slots__ = (
        "_checkers",
        "_compute_rng",
        "_connecting",
        "_device_free_s",
        "_model",
        "_network",
        "_owner_sessions",
        "_preparation",
        "_reader_sessions",
        "_reads",
        "_results",
        "_router_sessions",
        "_scenario",
        "_steps",
        "_timer",
        "core",
        "fingerprint",
        "generations",
        "is_sick",
        "memory",
        "on_decode",
        "on_grant",
        "on_stranger",
        "ranks",
        "step_slowness",
        "store",
        "worker_id",
    )

    def __init__(
        self,
        run: RunContext,
        worker_id: WorkerId,
        role: Role,
        *,
        fingerprint: str,
        scenario: Scenario,
        network: Network,
        reads: SimReads,
        model: Model,
        checkers: Checkers,
        host: LinkedHost | None = None,
        shape: Shape,
    ) -> None:
        """Start the process. `host` is where it looks for a store node. The process is the leader of the
        ranks of `shape`."""
        super().__init__(run, worker_id)
        self.worker_id, self.fingerprint = worker_id, fingerprint
        self._scenario, self._network, self._reads = scenario, network, reads
        self._model, self._checkers = model, checkers
        self._compute_rng: random.Random = run.stream(f"gpu/{worker_id}")
        self.memory = DeviceMemory(scenario.block_count, places_of_shape(shape))
        self.ranks = SimRanks(self, shape)
        self.generations = Generations(scenario.block_count)
        self.step_slowness = 1.0
        self.is_sick = False
        """The worker fails whatever it is told to start."""
        self._strike_nobody()
        self._timer = CoreTimer(self)
        self._steps: deque[tuple[StepPlan, list[list[int]]]] = deque()
        """Steps under way, each with the generations of its items' blocks when it was planned."""
        self._device_free_s = 0.0
        """The virtual instant at which the last of them is done."""
        self._router_sessions: dict[RouterId, SimSession] = {}
        self._reader_sessions: dict[WorkerId, SimSession] = {}
        self._owner_sessions: dict[WorkerId, SimSession] = {}
        self._connecting: dict[WorkerId, list[ReaderMessage]] = {}
        self._results: deque[StepResult] = deque()
        self.core = WorkerCore(
            worker_id=worker_id,
            role=role,
            model=MODEL_NAME,
            fingerprint=fingerprint,
            block_tokens=scenario.block_tokens,
            block_bytes=GEOMETRY.block_bytes,
            block_count=scenario.block_count,
            max_model_tokens=scenario.max_model_tokens,
            engine=scenario.engine,
            transfer=scenario.transfer,
            store=scenario.store,
            router_grace_s=scenario.router_grace_s,
            heartbeat_s=scenario.heartbeat_s,
            generations=self.generations,
            now_s=self.local_clock.now_s(),
        )
        self._preparation = SlowPreparation(self, scenario)
        self.store = SimStoreLink(self, host)
        reads.register(self)
        self._arm()

    def _strike_nobody(self) -> None:
        """Set the hooks of faults that strike when it is worst."""
        self.on_grant: Callable[[], None] | None = None
        """A call that happens once, as the next grant of a KV owner arrives and before it is read."""
        self.on_decode: Callable[[RouterId, StartSequence], None] | None = None
        """A call that happens once, as a router gives it a decode phase."""
        self.on_stranger: Callable[[WorkerId, str], None] | None = None
        """A call that happens once, after a reader asked for KV of a sequence that nobody started here.
        Reader and sequence are its arguments."""

    @property
    def process(self) -> SimProcess:
        return self

    @property
    def block_bytes(self) -> int:
        return GEOMETRY.block_bytes

    @property
    def copy_block_s(self) -> float:
        return self._scenario.copy_block_s * self.step_slowness

    @property
    def is_computing(self) -> bool:
        return bool(self._steps)

    # --- events in ----------------------------------------------------------------------------------

    def post_event(self, event: WorkerEvent) -> None:
        self.post(lambda: self.feed(event))

    def feed(self, event: WorkerEvent) -> None:
        if not isinstance(event, WorkerTick):
            self.run.note(self.name, event)
            self._checkers.workers.heard(event)
            if isinstance(event, FromReader):
                self._checkers.observe_reader_message(self, event.reader, event.message)
        actions = self.core.handle(event, now_s=self.local_clock.now_s())
        if isinstance(event, FromRouter) and isinstance(event.message, StartSequence):
            self._checkers.observe_start(self, event.router_id, event.message)
            self.ranks.reached(RequestPoint.QUEUED)
            if self.on_decode is not None and event.message.phase is Phase.DECODE:
                strike, self.on_decode = self.on_decode, None
                strike(event.router_id, event.message)
        for action in actions:
            self._perform(action)
        self._arm()
        self._checkers.after_worker_event(self)

    def _arm(self) -> None:
        self._timer.arm(self.core.next_tick_s, self._tick)

    def _tick(self) -> None:
        self.feed(WorkerTick())

    # --- actions out --------------------------------------------------------------------------------

    def _perform(self, action: WorkerAction) -> None:
        match action:
            case ToRouter(router_id, message):
                self._checkers.observe_worker_message(self, message)
                session = self._router_sessions.get(router_id)
                if session is not None:
                    session.send(0, message)
            case ToReader(reader, message):
                self.run.note(f"{self.name} -> {reader}", message)
                self._checkers.observe_owner_message(self, reader, message)
                session = self._reader_sessions.get(reader)
                if session is not None:
                    session.send(0, message)
                if isinstance(message, KVGrant):
                    self.ranks.reached(RequestPoint.TRANSFER)
            case ToOwner(source, message):
                self._checkers.workers.requested(self, message)
                self.run.note(f"{self.name} -> {source.worker_id}", message)
                self._to_source(source, message)
            case BlockRead():
                self.run.note(self.name, action)
                self._checkers.read_starts(self, action)
                self.ranks.reached(RequestPoint.TRANSFER)
                self._reads.start(self, action)
            case RunStep(plan):
                self._run(plan)
            case ToStore(message):
                self.run.note(self.name, action)
                self.store.send(message)
            case CopyToStore() | CopyFromStore():
                self._checkers.copy_starts(self, action)
                self.store.copy(action)

    def _to_source(self, source: PeerRef, message: ReaderMessage) -> None:
        peer_id = source.worker_id
        session = self._owner_sessions.get(peer_id)
        if session is not None and session.is_open:
            session.send(1, message)
        elif peer_id in self._connecting:
            self._connecting[peer_id].append(message)
        else:
            self._connecting[peer_id] = [message]
            self.run.clock.after(
                2 * self._network.delay_s(), lambda: self.post(lambda: self._connect(source))
            )

    def _connect(self, source: PeerRef) -> None:
        peer = self._reads.workers.get(source.worker_id)
        messages = self._connecting.pop(source.worker_id, [])
        is_cut_off = self._network.is_cut_off(source.worker_id) or self._network.is_cut_off(self.name)
        if not isinstance(peer, SimWorker) or not peer.is_alive or peer.is_frozen or is_cut_off:
            gone = OwnerLost(source.worker_id, "cannot connect")
            self.run.clock.after(self._scenario.connect_timeout_s / 4, lambda: self.post_event(gone))
            return
        if peer.fingerprint != self.fingerprint:
            raise Violation(7, f"{self.name} is told to pull from {peer.name}, which runs other weights")
        session = self._network.open(ReaderEnd(self, peer.worker_id), OwnerEnd(peer, self.worker_id))
        self._owner_sessions[source.worker_id] = session
        peer.accept_reader(self.worker_id, session)
        for message in messages:
            session.send(1, message)

    # --- sessions -----------------------------------------------------------------------------------

    def accept_router(self, router_id: RouterId, session: SimSession) -> None:
        """Accept a router's connection. An older session of it may not have been noticed broken yet."""
        old = self._router_sessions.get(router_id)
        if old is not None and self._compute_rng.random() < 0.5:
            self.feed(RouterLost(router_id))
        self._router_sessions[router_id] = session
        self._preparation.router_lost(router_id)
        self.feed(RouterJoined(router_id))

    def on_message(self, session: SimSession, message: object) -> None:
        """Handle a message of the router that opened `session`."""
        router_id = RouterId(session.ends[0].process.name)
        if self._router_sessions.get(router_id) is not session:
            return
        if self.is_sick and isinstance(message, StartSequence):
            self._fail(router_id, session, message)
            return
        told = cast(RouterMessage, message)
        if not self._preparation.holds_back(router_id, told):
            self.feed(FromRouter(router_id, told))

    def _fail(self, router_id: RouterId, session: SimSession, start: StartSequence) -> None:
        """Fail a start, as a worker does that cannot make ready what the sequence needs
        (`worker.preparation`). The attempt before it ends, and this one is over."""
        self.feed(FromRouter(router_id, CancelSequence(start.seq_id, start.epoch)))
        failed = SequenceFailed(start.seq_id, start.epoch, FailureReason.INTERNAL, "sick")
        self._checkers.observe_worker_message(self, failed)
        session.send(0, failed)

    def on_break(self, session: SimSession, reason: str) -> None:
        router_id = RouterId(session.ends[0].process.name)
        if self._router_sessions.get(router_id) is session:
            del self._router_sessions[router_id]
            self._checkers.workers.router_lost(self, router_id)
            self._preparation.router_lost(router_id)
            self.feed(RouterLost(router_id))

    def router_session(self, router_id: RouterId) -> SimSession | None:
        """The session that the worker believes to have with a router."""
        return self._router_sessions.get(router_id)

    def accept_reader(self, reader: WorkerId, session: SimSession) -> None:
        """Accept a reader's session. An older one that is not known to be broken is replaced, so that its
        break is no news."""
        self._reader_sessions[reader] = session

    def on_owner_break(self, source: WorkerId, session: SimSession, reason: str) -> None:
        if self._owner_sessions.get(source) is session:
            del self._owner_sessions[source]
            if self._compute_rng.random() < 0.5:
                self._reads.give_up(self, source)
            self.feed(OwnerLost(source, reason))

    def on_reader_break(self, reader: WorkerId, session: SimSession) -> None:
        if self._reader_sessions.get(reader) is session:
            del self._reader_sessions[reader]
            self.feed(ReaderLost(reader))

    # --- the GPU ------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> None:
        """Begin a step when the one before it is done, whatever the process does meanwhile."""
        if len(self._steps) >= StepOverlap(self._scenario.engine).steps_max:
            raise Violation(0, f"{self.name}: a step too many in flight: {plan}")
        self._checkers.step_planned(self, plan)
        self._steps.append((plan, [[self.generations[b] for b in item.block_ids] for item in plan.items]))
        elapsed_s = self._scenario.step_base_s * self.step_slowness
        context_tokens = sum(item.first_position for item in plan.items)
        elapsed_s += plan.token_count * self._scenario.step_token_s + context_tokens * 1e-6
        elapsed_s += (len(plan.swap_out) + len(plan.swap_in)) * self._scenario.swap_block_s
        followed = self.ranks.follow(plan)
        self.ranks.planned(plan, self._model.is_last)
        start_s = max(self.run.clock.now_s, self._device_free_s)
        self._device_free_s = start_s + elapsed_s
        self.run.clock.at(
            start_s + elapsed_s * self._compute_rng.random(),
            lambda: self._compute(plan, followed, elapsed_s),
        )
        self.run.clock.at(self._device_free_s, lambda: self.post(self._finish_step))

    def _compute(self, plan: StepPlan, followed: tuple[StepPlan, ...], elapsed_s: float) -> None:
        """Compute a step. The kernels run whether or not the process is frozen. They wait for every rank, and
        for the step before."""
        if not self.is_alive:
            return
        if not self.ranks.can_compute or plan.step_number != self.memory.step_number + 1:
            self.run.clock.after(WAIT_S, lambda: self._compute(plan, followed, elapsed_s))
            return
        sampled = self._model.execute(plan, self.memory, self.name, followed=followed)
        self._results.append(StepResult(plan.step_number, sampled, elapsed_s))

    def _finish_step(self) -> None:
        if not self._results:
            self.run.clock.after(WAIT_S, lambda: self.post(self._finish_step))
            return
        plan, generations = self._steps.popleft()
        result = self._results.popleft()
        assert result.step_number == plan.step_number, "a step ends after it was computed"
        self._checkers.step_used(self, plan, generations)
        self.feed(StepDone(result))

    def freeze(self, *, stops_clock: bool = False) -> None:
        super().freeze(stops_clock=stops_clock)
        if not stops_clock:  # a suspended machine stops all ranks, and their clocks
            self.ranks.leader_stopped()

    def kill(self, *, noticed_s: float) -> None:
        """End the process, and with it its memory and everything it had said and not sent."""
        self.die()
        self.ranks.end()
        self.store.process_died()
        self._reads.reader_died(self)
        self._network.process_died(self, noticed_s=noticed_s)


class ReaderEnd:
    """The reader's end of a session between two workers."""

    __slots__ = ("_source", "_worker")

    def __init__(self, worker: SimWorker, source: WorkerId) -> None:
        self._worker, self._source = worker, source

    @property
    def process(self) -> SimProcess:
        return self._worker

    def on_message(self, session: SimSession, message: object) -> None:
        worker, strike = self._worker, self._worker.on_grant
        if strike is not None and isinstance(message, KVGrant):
            worker.on_grant = None
            strike()
        worker.post_event(FromOwner(self._source, cast(OwnerMessage, message)))

    def on_break(self, session: SimSession, reason: str) -> None:
        self._worker.on_owner_break(self._source, session, reason)


class OwnerEnd:
    """The owner's end of a session between two workers."""

    __slots__ = ("_reader", "_worker")

    def __init__(self, worker: SimWorker, reader: WorkerId) -> None:
        self._worker, self._reader = worker, reader

    @property
    def process(self) -> SimProcess:
        return self._worker

    def on_message(self, session: SimSession, message: object) -> None:
        worker, strike = self._worker, self._worker.on_stranger
        request = cast("ReaderMessage", message)
        is_strange = SeqKey(request.seq_id, request.epoch) not in worker.core.live_keys
        worker.feed(FromReader(self._reader, request))
        if strike is not None and is_strange and isinstance(request, KVRequest):
            worker.on_stranger = None
            strike(self._reader, request.seq_id)

    def on_break(self, session: SimSession, reason: str) -> None:
        self._worker.on_reader_break(self._reader, session)
