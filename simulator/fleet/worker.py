"""A modelled worker: what it says to its router and how KV leaves and enters it, around `MacroEngine`."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import cast

from baton.core.costs import PhaseTimings, StepCosts
from baton.core.geometry import blocks_for
from baton.core.ids import BlockHash, BlockId, SeqKey, WorkerId
from baton.core.messages import (
    BlockEvents,
    CancelSequence,
    LoadReport,
    Phase,
    RefusalReason,
    ResyncBlocks,
    Role,
    RouterMessage,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StartSequence,
    StepOutput,
    WorkerHello,
    WorkerMessage,
)
from baton.core.sampling import FinishReason
from engine.scheduling.block_pool import BlockPool, OutOfBlocks
from engine.scheduling.prefix_cache import PrefixCache
from simulator.clock import VirtualClock
from simulator.fleet.engine import MacroEngine
from simulator.fleet.interface import FleetServices, LoadingStore, WorkerUsage
from simulator.fleet.links import KVFlow, NetworkPort
from simulator.fleet.sequence import MacroSequence
from simulator.fleet.spec import FleetWorkerSpec

TOKEN = 0


@dataclass(slots=True, eq=False)
class Pull:
    """A decode phase whose KV is not all here."""

    key: SeqKey
    start: StartSequence
    hashes: list[BlockHash]
    source: WorkerId
    reader: "MacroWorker"
    block_ids: list[BlockId] = field(default_factory=list[BlockId])
    held_count: int = 0
    flow: KVFlow | None = None
    last_grant_s: float = 0.0
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Handover:
    """A prefill phase, from the request for its KV to the release."""

    seq: MacroSequence | None = None
    pull: Pull | None = None
    offered_tokens: int = 0
    is_computed: bool = False


class MacroWorker:
    def __init__(
        self,
        worker_id: WorkerId,
        spec: FleetWorkerSpec,
        clock: VirtualClock,
        fleet: FleetServices,
        *,
        hop_s: float,
    ) -> None:
        self.worker_id, self.spec = worker_id, spec
        self._clock, self._fleet, self._hop_s = clock, fleet, hop_s
        self.pool = BlockPool(spec.block_count, [0] * spec.block_count)
        self.cache = PrefixCache(self.pool)
        self.engine = MacroEngine(
            clock,
            self.cache,
            self,
            costs=spec.costs,
            engine=spec.engine,
            block_tokens=spec.block_tokens,
        )
        self.sender, self.receiver = NetworkPort(spec.send_bytes_s), NetworkPort(spec.receive_bytes_s)
        self.store: LoadingStore | None = None
        self._sequences: dict[SeqKey, MacroSequence] = {}
        """Sequences in the engine."""
        self._handovers: dict[SeqKey, Handover] = {}
        self._waiting: deque[Pull] = deque()
        """Decode phases without blocks."""
        self._pulls: dict[SeqKey, Pull] = {}
        """Pulls of all decode phases that have not joined."""
        self._outputs: list[SequenceOutput] = []
        self._event_number = 0
        self._heartbeat_s = 0.0
        self._is_draining = self._has_ended = False
        self._tokens_max = min(spec.max_model_tokens, spec.block_count * spec.block_tokens)

    # --- what it says of itself -----------------------------------------------------------------

    def hello(self) -> WorkerHello:
        spec = self.spec
        return WorkerHello(
            worker_id=self.worker_id,
            role=spec.role,
            fingerprint="simulated",
            model="simulated",
            block_tokens=spec.block_tokens,
            block_count=spec.block_count,
            max_model_tokens=self._tokens_max,
            costs=spec.costs,
            block_bytes=int(spec.kv_token_bytes * spec.block_tokens),
            step_tokens_max=spec.engine.step_tokens_max,
            batch_sequences_max=spec.engine.batch_sequences_max,
            tpot_slo_s=spec.engine.tpot_slo_s,
            chunk_tokens_min=spec.engine.chunk_tokens_min,
            host=self.worker_id,
        )

    def begin(self, heartbeat_s: float, *, phase_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._send(self.report())
        self.send_snapshot()
        self._clock.recurring |= {self._beat, self.on_message}
        self._clock.after(phase_s, self._beat)

    def _beat(self) -> None:
        if self._has_ended:
            return
        self._send(self.report())
        self._clock.after(self._heartbeat_s, self._beat)

    def usage(self) -> WorkerUsage:
        engine = self.engine
        return WorkerUsage(engine.busy_s, engine.waiting_tokens, engine.decoding_count, self.pool.held_count)

    def report(self) -> LoadReport:
        engine = self.engine
        return LoadReport(
            role=self.spec.role,
            is_draining=self._is_draining,
            free_blocks=self.pool.free_count,
            running_count=engine.running_count,
            waiting_count=engine.waiting_count + len(self._pulls),
            waiting_tokens=engine.waiting_tokens,
            step_s=engine.step_s,
            costs=self.spec.costs,
            decoding_count=engine.decoding_count,
            context_tokens=engine.context_tokens,
            tokens_per_step=1.0,
            incoming_count=len(self._pulls),
        )

    def drain(self) -> None:
        """Drain: the router hears of it, so that nothing new comes."""
        self._is_draining = True
        self._send(self.report())

    def take_role(self, role: Role) -> None:
        """Switch the role of an idle worker after a drain: from now on it serves as `role`. Weights and
        cached blocks stay."""
        assert self.is_idle, f"{self.worker_id} still has sequences"
        self.spec = replace(self.spec, role=role)
        self._is_draining = False
        self._send(self.report())

    def end(self) -> None:
        self._has_ended = True

    def set_costs(self, costs: StepCosts) -> None:
        """Take other costs, which the router hears of with the next report."""
        self.spec = replace(self.spec, costs=costs)
        self.engine.set_costs(costs)

    def lose(self) -> None:
        """End as a process does whose machine is gone. What others lent it comes back when leases end."""
        self.end()
        self.engine.stop()
        for pull in list(self._pulls.values()):
            self._end_pull(pull)
        for handover in self._handovers.values():
            if handover.pull is not None and handover.pull.flow is not None:
                handover.pull.flow.stop()

    @property
    def is_idle(self) -> bool:
        return not self._sequences and not self._handovers and not self._pulls

    # --- router ---------------------------------------------------------------------------------

    def on_message(self, message: RouterMessage) -> None:
        if self._has_ended:
            return
        match message:
            case StartSequence():
                self._start(message)
            case CancelSequence(seq_id, epoch):
                self._cancel(SeqKey(seq_id, epoch))
            case ResyncBlocks():
                self.send_snapshot()

    def send_snapshot(self) -> None:
        self.cache.collect_changes()
        self._send(BlockEvents(self._event_number, self.cache.snapshot(), is_snapshot=True))
        self._event_number += 1

    def _send(self, message: WorkerMessage) -> None:
        if self._has_ended:
            return
        self._fleet.send_to_router(self, message)

    def _start(self, start: StartSequence) -> None:
        key = SeqKey(start.seq_id, start.epoch)
        if len(start.tokens) >= self._tokens_max:
            self._send(SequenceRefused(*key, RefusalReason.TOO_LONG, "longer than this worker can hold"))
        elif start.phase is Phase.DECODE:
            self._start_pull(key, start)
        elif self.engine.waiting_count >= self.spec.engine.waiting_sequences_max:
            self._send(SequenceRefused(*key, RefusalReason.NO_ROOM, "too many wait"))
            self._refuse_pull(key)
        else:
            seq = self._sequence(key, start)
            self._sequences[key] = seq
            if start.phase is Phase.PREFILL:
                self._handovers.setdefault(key, Handover()).seq = seq
            if self.store is not None:
                self.store.find(seq)
            self.engine.add(seq)

    def _sequence(self, key: SeqKey, start: StartSequence) -> MacroSequence:
        count = len(start.tokens)
        end = min(start.prompt_token_count + start.sampling.max_tokens, self._tokens_max)
        return MacroSequence(
            key=key,
            phase=start.phase,
            start=start,
            hashes=self._hashes_of(start),
            known_count=count,
            end_count=max(end, count + 1),
            prompt_count=start.prompt_token_count,
            priority=start.priority,
            fairness_key=start.fairness_key,
            tpot_slo_s=start.tpot_slo_s,
        )

    def _hashes_of(self, start: StartSequence) -> list[BlockHash]:
        return self._fleet.hashes_of(start.seq_id)

    def _cancel(self, key: SeqKey) -> None:
        pull = self._pulls.get(key)
        if pull is not None:
            self._end_pull(pull)
            self._pool_grew()
            return
        handover = self._handovers.pop(key, None)
        seq = self._sequences.pop(key, None)
        if handover is not None and handover.pull is not None and handover.pull.flow is not None:
            handover.pull.flow.stop()
        if seq is None:
            return
        if handover is not None and handover.is_computed:
            self.pool.release(seq.block_ids)
            self._pool_grew()
        else:
            self._count_prompt(seq)
            self.engine.remove(seq)

    def _count_prompt(self, seq: MacroSequence) -> None:
        self._fleet.prompt_computed(seq.seq_id, seq.prompt_steps_tokens)
        seq.prompt_steps_tokens = 0

    # --- the engine -----------------------------------------------------------------------------

    def admitted(self, seq: MacroSequence) -> None:
        self.committed(seq)

    def committed(self, seq: MacroSequence) -> None:
        if seq.phase is Phase.PREFILL:
            self._offer(self._handovers.get(seq.key))

    def sampled(self, seq: MacroSequence) -> None:
        is_over = seq.known_count >= seq.end_count
        if seq.phase is Phase.PREFILL:
            handover = self._handovers[seq.key]
            handover.is_computed = True
            self._emit(seq, seq.known_count, FinishReason.LENGTH if is_over else None)
            self._offer(handover)
            self._count_prompt(seq)
            self._store_prompt(seq)
            return
        self._store_prompt(seq)
        if not is_over:
            self._emit(seq, seq.known_count, None)

    def _store_prompt(self, seq: MacroSequence) -> None:
        if self.store is not None:
            self.store.committed(seq.hashes, seq.committed_count)

    def second_token(self, seq: MacroSequence) -> None:
        if seq.known_count + 1 < seq.end_count:
            self._emit(seq, seq.known_count + 1, None)

    def finished(self, seq: MacroSequence) -> None:
        del self._sequences[seq.key]
        self._count_prompt(seq)
        self._emit(seq, seq.end_count, FinishReason.LENGTH)

    def _emit(self, seq: MacroSequence, known_count: int, finish: FinishReason | None) -> None:
        """Tell the router the tokens that it does not have."""
        sent_count = seq.start.generated_count if seq.reported_count is None else seq.reported_count
        is_first = seq.reported_count is None and seq.first_step_s is not None
        seq.reported_count = known_count - seq.prompt_count
        self._outputs.append(
            SequenceOutput(
                *seq.key,
                sent_count,
                (TOKEN,) * (seq.reported_count - sent_count),
                finish,
                cached_token_count=seq.cached_count if is_first else None,
                timings=self._timings(seq) if is_first else None,
            )
        )

    def _timings(self, seq: MacroSequence) -> PhaseTimings:
        assert seq.first_step_s is not None
        begun_s = seq.first_step_s
        waited_s = max(0.0, begun_s - seq.arrived_s)
        computing_s = self._clock.now_s - begun_s
        return PhaseTimings(waited_s, seq.load_s, max(0.0, computing_s - seq.load_s))

    def step_ended(self) -> None:
        if self._outputs:
            outputs, self._outputs = tuple(self._outputs), []
            self._send(StepOutput(outputs))

    def planned(self) -> None:
        self._admit_pulls()
        self.flush_blocks()

    def flush_blocks(self) -> None:
        changes = self.cache.collect_changes()
        if changes is not None:
            self._send(BlockEvents(self._event_number, changes.stored, changes.removed))
            self._event_number += 1

    # --- prefill: what others read --------------------------------------------------------------

    def asked(self, pull: Pull) -> None:
        """Hear that a decode worker reserved blocks and wants the rest."""
        if pull.is_over or self._has_ended:
            return
        handover = self._handovers.setdefault(pull.key, Handover())
        handover.pull = pull
        reader = pull.reader
        pull.flow = KVFlow(self._clock, self.sender, reader.receiver, lambda: reader.drained(pull))
        self._offer(handover)

    def _offer(self, handover: Handover | None) -> None:
        """Make what is committed and was not offered readable now."""
        if handover is None or handover.pull is None or handover.seq is None:
            return
        seq, pull = handover.seq, handover.pull
        held = pull.held_count * self.spec.block_tokens
        ready = (
            len(pull.start.tokens) if handover.is_computed else seq.committed_count * self.spec.block_tokens
        )
        before = max(handover.offered_tokens, held)
        handover.offered_tokens = max(ready, handover.offered_tokens)
        size = max(0, ready - before) * self.spec.kv_token_bytes
        if size or handover.is_computed:
            grant = (pull, size, handover.is_computed)
            self._clock.after(self._hop_s, pull.reader.granted, grant)

    def released(self, key: SeqKey) -> None:
        """Hear that all was read."""
        handover = self._handovers.pop(key, None)
        seq = self._sequences.pop(key, None)
        if handover is None or seq is None:
            return
        self.pool.release(seq.block_ids)
        self._pool_grew()

    def _refuse_pull(self, key: SeqKey) -> None:
        self._handovers.pop(key, None)

    # --- decode: what is read -------------------------------------------------------------------

    def _start_pull(self, key: SeqKey, start: StartSequence) -> None:
        assert start.source is not None
        pull = Pull(key, start, self._hashes_of(start), start.source.worker_id, self)
        self._pulls[key] = pull
        if len(self._waiting) >= self.spec.engine.waiting_sequences_max:
            self._turn_away(pull)
            return
        self._waiting.append(pull)
        self._admit_pulls()
        if not pull.block_ids:
            self._clock.after(self.spec.transfer.receive_wait_s, self._lost_patience, pull)

    def _lost_patience(self, pull: Pull) -> None:
        if not pull.is_over and not pull.block_ids:
            self._turn_away(pull)

    def _turn_away(self, pull: Pull) -> None:
        self._end_pull(pull)
        self._send(SequenceRefused(*pull.key, RefusalReason.NO_ROOM, "no blocks for its KV"))

    def _admit_pulls(self) -> None:
        while self._waiting:
            pull = self._waiting[0]
            tokens = len(pull.start.tokens)
            need = blocks_for(tokens + 1, self.spec.block_tokens)
            hashes = pull.hashes[: tokens // self.spec.block_tokens]
            try:
                got = self.cache.reserve(hashes, need, keep_free=self.engine.keep_free)
            except OutOfBlocks:
                return
            self._waiting.popleft()
            pull.block_ids, pull.held_count = got.blocks, got.cached_count
            self._clock.after(self._hop_s, self._peer(pull.source).asked, pull)

    def granted(self, grant: tuple[Pull, float, bool]) -> None:
        """Hear that the owner makes so many bytes more readable; with the last of them comes the first
        token."""
        pull, size, is_last = grant
        if pull.is_over or pull.flow is None:
            return
        pull.last_grant_s = self._clock.now_s
        pull.flow.offer(size, is_last=is_last)

    def drained(self, pull: Pull) -> None:
        """Hear that all KV of a sequence is here."""
        if pull.is_over:
            return
        pull.is_over = True
        del self._pulls[pull.key]
        self._clock.after(self._hop_s, self._peer(pull.source).released, pull.key)
        seq = self._sequence(pull.key, pull.start)
        full = min(len(pull.start.tokens) // self.spec.block_tokens, len(seq.hashes))
        for i in range(pull.held_count, full):
            self.cache.insert(seq.hashes[i], pull.block_ids[i])
        seq.block_ids, seq.committed_count = pull.block_ids, full
        seq.computed_count = seq.known_count
        seq.known_count += 1
        self._sequences[pull.key] = seq
        flow = pull.flow
        moved, busy_s = (0.0, 0.0) if flow is None else (flow.moved_bytes, flow.busy_s)
        handover_s = self._clock.now_s - pull.last_grant_s
        self._send(SequenceJoined(*pull.key, int(moved), busy_s, handover_s))
        self._emit(seq, seq.known_count, None)
        outputs, self._outputs = tuple(self._outputs), []
        self._send(StepOutput(outputs))
        self.flush_blocks()
        self.engine.join(seq)

    def _end_pull(self, pull: Pull) -> None:
        pull.is_over = True
        del self._pulls[pull.key]
        if pull in self._waiting:
            self._waiting.remove(pull)
        if pull.flow is not None:
            pull.flow.stop()
        if pull.block_ids:
            self.pool.release(pull.block_ids)
            self._clock.after(self._hop_s, self._peer(pull.source).unread, pull.key)

    def unread(self, key: SeqKey) -> None:
        """Hear that the decode worker gave up. What is computed is held no longer; what is not goes on until
        the router cancels it."""
        handover = self._handovers.get(key)
        if handover is None:
            return
        if handover.is_computed:
            self.released(key)
        elif handover.seq is None:
            del self._handovers[key]
        else:
            handover.pull = None

    def _peer(self, worker_id: WorkerId) -> "MacroWorker":
        return cast("MacroWorker", self._fleet.worker(worker_id))

    def _pool_grew(self) -> None:
        if self.engine.is_head_blocked:
            self.engine.look_again()
        self._admit_pulls()
