"""Everything a worker decides, pure: events and the time go in, actions come out.

`WorkerCore` dispatches, and its parts decide: the scheduler which tokens run, the lease book who may read our
blocks, the receiver how the KV of a decode phase gets here, the outbox what routers are told.
"""

from collections import Counter
from collections.abc import Iterable, MutableSequence, Set
from typing import assert_never

from baton.config import EngineConfig, StoreConfig, TransferConfig
from baton.core.ids import RouterId, SeqKey, WorkerId
from baton.core.messages import (
    CancelSequence,
    FailureReason,
    KVRefused,
    KVReleased,
    KVRequest,
    LoadReport,
    Phase,
    RefusalReason,
    ResyncBlocks,
    Role,
    RouterMessage,
    SequenceJoined,
    SequenceRefused,
    StartSequence,
    WorkerHello,
)
from baton.core.steps import StepResult
from decode_worker.receiver import GaveUp, KVReceiver, NoFreeBlocks, Ready, ReceiverAction, Send
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Progress, Sequence
from engine.scheduling.step_time import StepWork
from kv_transfer.read import BlockRead, ReadDone, ReadSettled
from prefill_worker.handovers import Handovers
from worker.core_attempts import Attempt, Attempts, Epochs
from worker.core_progress import Phases
from worker.core_starts import closed_by, preparation_s, refusal_of, sequence_of
from worker.core_status import WorkerCounts, load_report
from worker.core_store import StoreClient
from worker.events import (
    CopyDone,
    Drain,
    FromOwner,
    FromReader,
    FromRouter,
    FromStore,
    OwnerLost,
    PreparationBegan,
    PreparationEnded,
    ReaderLost,
    RouterJoined,
    RouterLost,
    RunStep,
    SetParked,
    SetRole,
    StepDone,
    StoreJoined,
    StoreLost,
    ToOwner,
    ToReader,
    WorkerAction,
    WorkerEvent,
    WorkerTick,
)
from worker.outbox import Outbox
from worker.phase_clock import PhaseClock

STEP_S_SMOOTHING = 0.2
"""The weight of the newest step in the reported step time."""


class WorkerCore:
    """One worker's decisions. Feed it every event, perform its actions in order, and call it again (with
    Tick) no later than `next_tick_s`. It is deterministic in its events and their times."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        role: Role,
        model: str,
        fingerprint: str,
        block_tokens: int,
        block_bytes: int,
        block_count: int,
        max_model_tokens: int,
        engine: EngineConfig,
        transfer: TransferConfig,
        store: StoreConfig | None = None,
        router_grace_s: float,
        heartbeat_s: float,
        generations: MutableSequence[int],
        now_s: float,
        host: str = "",
        measured: Iterable[tuple[StepWork, float]] = (),
        floor_s: float = 0.0,
    ) -> None:
        """`measured` is what steps cost when the worker timed itself. floor_s: see `StepCosts`."""
        self._worker_id, self._model, self._fingerprint = worker_id, model, fingerprint
        self._role = role
        self._is_draining = self._is_parked = False
        self._block_tokens, self._block_bytes, self._host = block_tokens, block_bytes, host
        self._engine = engine
        # A sequence that fills the pool ends there as it would at the end of the context.
        self._max_tokens = min(max_model_tokens, block_count * block_tokens)
        self._waiting_max = engine.waiting_sequences_max
        self._router_grace_s, self._heartbeat_s = router_grace_s, heartbeat_s
        self._heartbeat_at_s = now_s
        self._step_s = 0.0
        self._pool = BlockPool(block_count, generations)
        self._cache = PrefixCache(self._pool)
        self._scheduler = Scheduler(self._cache, engine, block_tokens=block_tokens, block_bytes=block_bytes)
        self._scheduler.times.begin(measured, floor_s=floor_s)
        self._handovers = Handovers(
            self._pool, lease_s=transfer.lease_s, early_requests_max=self._waiting_max
        )
        self._receiver = KVReceiver(
            self._cache,
            transfer,
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            waiting_max=self._waiting_max,
            keep_free=lambda: self._scheduler.keep_free,
        )
        self._attempts = Attempts()
        self._epochs = Epochs(lambda key: self._attempts.get(key) is not None or self._handovers.knows(key))
        self._grace_end_s: dict[RouterId, float] = {}
        self._out = Outbox(self._cache)
        self._phases = Phases(self._attempts, self._scheduler, self._handovers, self._out)
        self._store = StoreClient(
            self._cache, self._scheduler, store or StoreConfig(), block_tokens=block_tokens
        )

    # --- what others may know -------------------------------------------------------------------

    @property
    def next_tick_s(self) -> float | None:
        """The time by which `handle` wants to be called. None means only when something happens."""
        heartbeat = [self._heartbeat_at_s] if self._out.router_count else []
        parts = (self._attempts, self._handovers, self._receiver, self._store)
        due = (*heartbeat, *self._grace_end_s.values(), *(part.next_tick_s for part in parts))
        return min((at_s for at_s in due if at_s is not None), default=None)

    @property
    def is_idle(self) -> bool:
        """No block is held by a sequence, a lease, a read or a copy, and nobody waits for an answer."""
        nothing_runs = self._scheduler.is_empty and self._receiver.is_idle and self._store.is_idle
        return nothing_runs and self._handovers.count == 0 and self._attempts.is_empty

    def adapters_in_use(self) -> set[str]:
        """Adapters of live attempts, and of cancelled ones that a step under way still computes."""
        return self._attempts.adapters() | {s.adapter for s in self._scheduler.sequences() if s.adapter}

    @property
    def live_keys(self) -> Set[SeqKey]:
        return self._attempts.keys()

    @property
    def waiting_keys(self) -> frozenset[SeqKey]:
        """Attempts that are accepted, and wait for a seat or for blocks."""
        return self._scheduler.waiting_keys

    def status(self) -> WorkerCounts:
        return WorkerCounts(
            role=self._role,
            is_draining=self._is_draining,
            free_blocks=self._pool.free_count,
            held_blocks=self._pool.held_count,
            quarantined_blocks=self._receiver.quarantined_count,
            running_count=self._scheduler.running_count,
            waiting_count=self._scheduler.waiting_count,
            attempt_count=len(self._attempts),
            lease_count=self._handovers.count,
            receiver_count=self._receiver.count,
            reads_in_flight=self._receiver.reads_in_flight,
            router_count=self._out.router_count,
            preemption_count=self._scheduler.preemption_count,
            swap_count=self._scheduler.swap_count,
            drafted_count=self._scheduler.drafted_count,
            accepted_count=self._scheduler.accepted_count,
            expired_lease_count=self._handovers.expired_count,
            store=self._store.status(),
            is_parked=self._is_parked,
        )

    def check(self) -> None:
        """Assert that every account balances: each reference to a pool's block has exactly one holder."""
        for part in (self._pool, self._cache, self._scheduler, self._handovers, self._receiver, self._store):
            part.check()
        holders = (self._handovers, self._receiver, self._scheduler, self._store)
        shares = Counter(block for holder in holders for block in holder.held_blocks())
        assert len(shares) == self._pool.held_count, "blocks held by nobody"
        assert all(self._pool.ref_count(block) == count for block, count in shares.items())
        live = sum(not seq.is_dropped for seq in self._scheduler.sequences())
        assert live + self._receiver.count == len(self._attempts)
        assert not self.is_idle or self._pool.held_count == 0

    # --- events ---------------------------------------------------------------------------------

    def handle(self, event: WorkerEvent, *, now_s: float) -> list[WorkerAction]:
        """What falls due by `now_s` happens first, then the event, then whatever can start now."""
        if isinstance(event, RouterJoined):
            self._out.leave(event.router_id)  # its old session; nothing may go out before the new hello
        self._store.at(now_s)
        self._on_time(now_s)
        self._dispatch(event, now_s)
        self._out.flush_outputs()
        self._start_work(now_s)
        if not self._scheduler.is_stepping:
            self._out.flush_blocks()
        return self._out.collect()

    def _dispatch(self, event: WorkerEvent, now_s: float) -> None:
        match event:
            case StepDone(result):
                self._on_step(result, now_s)
            case FromRouter(router_id, message):
                if self._out.has(router_id):  # else it came from a session that broke
                    self._on_router(router_id, message, now_s)
                self._phases.prepared(message, now_s)
            case PreparationBegan(key, phase):
                self._on_preparation(key, phase, now_s)
            case PreparationEnded(key, reason):
                self._attempts.preparing.discard(key)
                self._phases.tell_readers(self._handovers.close(key, reason, now_s=now_s))
            case FromReader(reader, message):
                self._on_reader(reader, message, now_s)
            case FromOwner(source, message):
                self._do_receiver(self._receiver.on_message(source, message, now_s=now_s), now_s=now_s)
            case OwnerLost(source, message):
                self._do_receiver(self._receiver.owner_lost(source, message), now_s=now_s)
            case ReadDone():
                self._do_receiver(self._receiver.read_done(event, now_s=now_s), now_s=now_s)
            case ReadSettled(read_id):
                self._do_receiver(self._receiver.read_settled(read_id), now_s=now_s)
            case RouterJoined(router_id):
                self._on_router_joined(router_id, now_s)
            case RouterLost(router_id):
                if self._out.has(router_id):
                    self._out.leave(router_id)
                    self._grace_end_s[router_id] = now_s + self._router_grace_s
            case SetRole(role, resumes):
                self._role, self._is_draining = role, self._is_draining and not resumes
                self._out.tell_all(self._report())
            case Drain():
                self._is_draining = True
                self._out.tell_all(self._report())
            case SetParked(is_parked):
                self._is_parked = is_parked
                self._out.tell_all(self._report())
            case StoreJoined(welcome):
                self._store.joined(welcome)
            case StoreLost():
                self._store.lost()
            case FromStore(message):
                self._out.extend(self._store.on_message(message))
            case CopyDone():
                self._out.extend(self._store.copied(event))
            case ReaderLost() | WorkerTick():
                pass  # the leases of a lost reader run on: a one-sided read may still be under way
            case _:
                assert_never(event)

    def _on_time(self, now_s: float) -> None:
        next_s = self.next_tick_s
        if next_s is None or next_s > now_s:
            return
        for router_id in [r for r, end_s in self._grace_end_s.items() if end_s <= now_s]:
            del self._grace_end_s[router_id]
            self._cancel_all_of(router_id, "its router is lost", now_s)
        for attempt in self._attempts.overdue(now_s):
            self._cancel(attempt.key, "deadline over", now_s)
            self._phases.fail(attempt, FailureReason.DEADLINE, "the request's time is up")
        self._phases.tell_readers(self._handovers.tick(now_s=now_s))
        self._do_receiver(self._receiver.tick(now_s=now_s), now_s=now_s)
        if self._heartbeat_at_s <= now_s:
            self._heartbeat_at_s = now_s + self._heartbeat_s
            self._out.tell_all(self._report())

    def _start_work(self, now_s: float) -> None:
        """Start what can run. The scheduler comes first: the receiver must leave free what it lacks."""
        self._advance_loads(now_s)
        while self._scheduler.can_plan and (plan := self._scheduler.plan(now_s=now_s)) is not None:
            for item in plan.items:  # blocks found in the cache at admission can be read at once
                attempt = self._attempts.get(item.key)
                if attempt is None or attempt.sequence is None:
                    continue
                if attempt.start.phase is Phase.PREFILL:
                    self._phases.announce(attempt.sequence, now_s)
            self._out.flush_blocks()
            self._out.add(RunStep(plan))
        self._look_again()
        self._advance_loads(now_s)  # the loads of sequences just admitted
        self._out.extend(self._store.flush())
        self._do_receiver(self._receiver.admit(now_s=now_s), now_s=now_s)
        self._phases.look_at_loads(now_s)

    def _advance_loads(self, now_s: float) -> None:
        self._out.extend(self._store.advance())
        for seq in self._store.take_arrived():
            if seq.phase is Phase.PREFILL:
                self._phases.announce(seq, now_s)

    def _look_again(self) -> None:
        """Look up preempted sequences again: what they computed may have been stored meanwhile."""
        for seq in self._scheduler.take_preempted():
            if not seq.block_ids and not seq.swap_slots:
                self._out.extend(self._store.find(seq))

    # --- routers --------------------------------------------------------------------------------

    def _on_router_joined(self, router_id: RouterId, now_s: float) -> None:
        # A router counts what ran under its old session as lost, and sends it again with a higher epoch.
        self._cancel_all_of(router_id, "its router joined anew", now_s)
        self._grace_end_s.pop(router_id, None)
        if self._out.router_count == 0:
            self._heartbeat_at_s = now_s + self._heartbeat_s
        hello = WorkerHello(
            worker_id=self._worker_id,
            role=self._role,
            fingerprint=self._fingerprint,
            model=self._model,
            block_tokens=self._block_tokens,
            block_count=self._pool.block_count,
            max_model_tokens=self._max_tokens,
            costs=self._scheduler.times.seen_costs,
            block_bytes=self._block_bytes,
            step_tokens_max=self._engine.step_tokens_max,
            batch_sequences_max=self._engine.batch_sequences_max,
            tpot_slo_s=self._engine.tpot_slo_s,
            chunk_tokens_min=self._engine.chunk_tokens_min,
            host=self._host,
        )
        self._out.join(router_id, hello, self._report())

    def _on_router(self, router_id: RouterId, message: RouterMessage, now_s: float) -> None:
        match message:
            case StartSequence():
                self._on_start(router_id, message, now_s)
            case CancelSequence(seq_id, epoch):
                if epoch >= self._epochs.highest(seq_id):  # a start that comes after it starts nothing
                    self._see(SeqKey(seq_id, epoch), is_start=True, now_s=now_s)
                self._cancel(SeqKey(seq_id, epoch), "cancelled", now_s)
            case ResyncBlocks():
                self._out.send_snapshot(router_id)
            case _:
                assert_never(message)

    def _on_start(self, router_id: RouterId, start: StartSequence, now_s: float) -> None:
        key = SeqKey(start.seq_id, start.epoch)
        if key.epoch < self._epochs.highest(key.seq_id):
            reason = f"epoch {self._epochs.highest(key.seq_id)} is known"
            self._out.tell(router_id, SequenceRefused(*key, RefusalReason.STALE_EPOCH, reason))
            return
        if self._epochs.was_started(key) or self._handovers.knows(key):
            return
        self._see(key, is_start=True, now_s=now_s)
        waiting = None if start.phase is Phase.DECODE else self._scheduler.waiting_count
        limits = {"waiting_max": self._waiting_max, "tokens_max": self._max_tokens}
        closed = closed_by(is_draining=self._is_draining, is_parked=self._is_parked)
        closed = None if key in self._attempts.preparing else closed
        refusal = refusal_of(start, closed=closed, waiting=waiting, **limits)
        if refusal is not None:
            self._out.tell(router_id, refusal)
            self._phases.tell_readers(self._handovers.close(key, refusal.message, now_s=now_s))
            return
        deadline_s = now_s + start.time_left_s
        attempt = Attempt(key, router_id, start, deadline_s=deadline_s, clock=PhaseClock(now_s))
        self._attempts.add(attempt)
        if start.phase is Phase.DECODE:
            assert start.source is not None
            actions = self._receiver.start(key, start.source, start.tokens, start.cache_root, now_s=now_s)
            self._do_receiver(actions, now_s=now_s)
            return
        attempt.sequence = self._sequence(start, list(start.tokens))
        self._scheduler.add(attempt.sequence, now_s=now_s)
        self._out.extend(self._store.find(attempt.sequence))
        self._phases.watch(attempt)
        if start.phase is Phase.PREFILL:
            # The decode worker makes ready what the sequence needs as well, and may take longer.
            unread_s = preparation_s(start, self._engine.prepare_s)
            self._phases.tell_readers(self._handovers.open(key, unread_s=unread_s, now_s=now_s))

    def _on_preparation(self, key: SeqKey, phase: Phase, now_s: float) -> None:
        if not self._is_draining:
            self._attempts.preparing.add(key)
        if phase is Phase.PREFILL and not self._epochs.is_stale(key):
            self._see(key, is_start=False, now_s=now_s)
            self._phases.tell_readers(self._handovers.prepare(key, now_s=now_s))

    def _see(self, key: SeqKey, *, is_start: bool, now_s: float) -> None:
        """Note the epoch of a message. A higher epoch ends the attempt before it."""
        known = self._epochs.highest(key.seq_id)
        if 0 <= known < key.epoch:
            self._cancel(SeqKey(key.seq_id, known), f"epoch {key.epoch} came", now_s)
        self._epochs.observe(key, is_start=is_start)

    # --- ways out -------------------------------------------------------------------------------

    def _cancel(self, key: SeqKey, reason: str, now_s: float) -> None:
        """Free what no reader, no read and no running step needs of an attempt, if it is known."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._attempts.pop(key)
            if attempt.sequence is not None:
                self._scheduler.remove(attempt.sequence)
            self._do_receiver(self._receiver.cancel(key), now_s=now_s)
        self._phases.tell_readers(self._handovers.close(key, reason, now_s=now_s))

    def _cancel_all_of(self, router_id: RouterId, reason: str, now_s: float) -> None:
        for attempt in self._attempts.of(router_id):
            self._cancel(attempt.key, reason, now_s)

    # --- prefill: who reads from us -------------------------------------------------------------

    def _on_reader(self, reader: WorkerId, message: KVRequest | KVReleased, now_s: float) -> None:
        key = SeqKey(message.seq_id, message.epoch)
        match message:
            case KVRequest():
                self._on_request(reader, key, message, now_s)
            case KVReleased():
                self._handovers.released(reader, key, now_s=now_s)
            case _:
                assert_never(message)

    def _on_request(self, reader: WorkerId, key: SeqKey, request: KVRequest, now_s: float) -> None:
        if key.epoch < self._epochs.highest(key.seq_id):
            refused = KVRefused(*key, f"epoch {self._epochs.highest(key.seq_id)} is known")
            self._out.add(ToReader(reader, refused))
            return
        self._see(key, is_start=False, now_s=now_s)
        if self._handovers.knows(key):
            self._phases.tell_readers(self._handovers.request(reader, request, now_s=now_s))
        elif self._epochs.was_started(key):
            self._out.add(ToReader(reader, KVRefused(*key, "over, or not a prefill phase")))
        else:
            self._phases.tell_readers(self._handovers.request_early(reader, request, now_s=now_s))

    # --- decode: what we read -------------------------------------------------------------------

    def _do_receiver(self, actions: list[ReceiverAction], *, now_s: float) -> None:
        for action in actions:
            match action:
                case Send(owner, message):
                    self._out.add(ToOwner(owner, message))
                case BlockRead():
                    self._out.add(action)
                case Ready():
                    self._on_ready(action, now_s)
                case GaveUp(key, reason, detail):
                    self._phases.fail(self._attempts.pop(key), reason, detail)
                case NoFreeBlocks(key, reason):
                    refused = SequenceRefused(*key, RefusalReason.NO_ROOM, reason)
                    self._out.tell(self._attempts.pop(key).router_id, refused)
                case _:
                    assert_never(action)

    def _on_ready(self, ready: Ready, now_s: float) -> None:
        """Let a sequence whose KV has arrived join the running batch. The router gets the first token and
        its facts from here too, and drops what it has: nothing is missing, whomever it hears first."""
        attempt = self._attempts.get(ready.key)
        assert attempt is not None
        seq = attempt.sequence = self._sequence(attempt.start, list(attempt.start.tokens))
        seq.block_ids, seq.hashes = ready.block_ids, ready.hashes
        seq.computed_count, seq.committed_count = len(seq.tokens), len(ready.hashes)
        seq.cached_token_count = ready.cached_token_count
        tokens = seq.extend((ready.first_token,))
        joined = SequenceJoined(*ready.key, ready.transferred_bytes, ready.transfer_s, ready.handover_s)
        self._out.tell(attempt.router_id, joined)
        self._scheduler.join(seq, now_s=now_s)
        logprobs = () if ready.first_logprobs is None else (ready.first_logprobs,)
        self._phases.emit(attempt, Progress(seq, tokens, logprobs), ready.prompt_logprobs, now_s)

    # --- steps ----------------------------------------------------------------------------------

    def _on_step(self, result: StepResult, now_s: float) -> None:
        weight = STEP_S_SMOOTHING if self._step_s else 1.0
        self._step_s += weight * (result.elapsed_s - self._step_s)
        for done in self._scheduler.finish_step(result):
            self._phases.progressed(done, now_s, step_s=result.elapsed_s)

    # --- parts ----------------------------------------------------------------------------------

    def _sequence(self, start: StartSequence, tokens: list[int]) -> Sequence:
        return sequence_of(start, tokens, block_tokens=self._block_tokens, tokens_max=self._max_tokens)

    def _report(self) -> LoadReport:
        return load_report(
            self._scheduler,
            role=self._role,
            is_draining=self._is_draining,
            is_parked=self._is_parked,
            free_blocks=self._pool.free_count,
            incoming_count=self._receiver.count,
            step_s=self._step_s,
        )
