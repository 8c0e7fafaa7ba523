"""The cluster in virtual time: production routers, modelled workers, and the requests that come to them."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

import msgspec

from baton.core.ids import BlockHash, RequestId, SequenceId, WorkerId
from baton.core.messages import Role, WorkerMessage
from baton.core.sampling import SamplingParams
from loadgen.records import ErrorKind, RequestOutcome
from router.decisions.core import RouterCore
from router.decisions.events import (
    Deliver,
    Failed,
    FailureKind,
    Finished,
    FromWorker,
    Note,
    RouterAction,
    RouterEvent,
    Submit,
    Tick,
    ToWorker,
    WorkerJoined,
    WorkerLost,
    WorkerUpdated,
)
from router.decisions.hedging import submitted_name
from router.decisions.status import RouterStatus
from simulator.clock import VirtualClock
from simulator.fleet.interface import FleetServices, FleetWorker
from simulator.fleet.observed import Observed
from simulator.fleet.spec import FleetSpec, FleetWorkerSpec
from simulator.fleet.stats import NEVER, RequestStats
from simulator.fleet.store import FleetWorkerStore, HolderCounts, HostStore
from simulator.fleet.worker import MacroWorker
from simulator.fleet.workload import FleetRequest, PromptHasher, TraceHashes

TICK_AFTER_S = 1e-6
IDLE_S, IDLE_SCALED_S = 30.0, 3600.0
"""The cluster changes no more after so long without a request; one that is scaled has gone down by then."""
LEAD_S, LEFT_OUT_LEAST_S = 10.0, 60.0
"""Time resumes so long before the next request; skipping less than the second figure is not worth it."""
REFUSALS = (FailureKind.QUEUE_FULL, FailureKind.NO_CAPACITY, FailureKind.UNMET)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request under way."""

    request: FleetRequest
    hashes: list[BlockHash]
    first_s: float = NEVER
    last_s: float = NEVER
    generated: int = 0
    cached: int = -1
    computed: int = 0
    attempts: int = 0
    workers: tuple[WorkerId, ...] = ()


@dataclass(slots=True)
class PoolSample:
    """Load of the pools at one instant."""

    at_s: float
    prefill_busy: float
    """Share of the time since the last sample in which workers that prefill were computing."""
    decode_share: float
    """Share of their blocks that workers which decode hold."""
    prefill_tokens: int
    """Prompt tokens accepted and not computed."""
    decoding: int
    """Sequences in decode batches."""
    queued: int
    """Sequences that wait at the routers."""


Observer = Callable[["Fleet"], bool]
"""A function that looks at every sample; it returns False to stop the run."""


def timings_of(finished: Finished) -> dict[str, float] | None:
    """Return the timings that a live answer would report; None when the router does not know them."""
    if finished.latency_breakdown is None:
        return None
    timings: dict[str, float] = msgspec.structs.asdict(finished.latency_breakdown)
    served = finished.served
    return timings if served is None else timings | served.predictions()


class MakeWorker(Protocol):
    def __call__(
        self,
        worker_id: WorkerId,
        spec: FleetWorkerSpec,
        clock: VirtualClock,
        fleet: FleetServices,
        *,
        hop_s: float,
    ) -> FleetWorker: ...


class Cell:
    """One router and its workers."""

    def __init__(self, fleet: "Fleet", number: int) -> None:
        spec = fleet.spec
        self._fleet, self._clock = fleet, fleet.clock
        self.core = RouterCore(config=spec.router, rng=Random(f"{spec.seed}/place/{number}"), now_s=0.0)
        self._armed_s: float | None = None
        self._version = 0
        self._clock.recurring.add(self._tick)

    def feed(self, event: RouterEvent) -> None:
        perform = self._fleet.perform
        for action in self.core.handle(event, now_s=self._clock.now_s):
            perform(action)
        due_s = self.core.next_tick_s
        if due_s is not None and (self._armed_s is None or due_s < self._armed_s):
            self._armed_s = due_s
            self._version += 1
            self._clock.at(due_s + TICK_AFTER_S, self._tick, self._version)

    def _tick(self, version: int) -> None:
        if version == self._version:
            self._armed_s = None
            self.feed(Tick())


class Fleet:
    """The cluster, which is `FleetServices` to its workers. `run` feeds it requests; `stats` says what became
    of them."""

    def __init__(
        self,
        spec: FleetSpec,
        *,
        trace_block_tokens: float = 0.0,
        make_worker: "MakeWorker" = MacroWorker,
    ) -> None:
        self.spec = spec
        self._make_worker = make_worker
        self.clock = VirtualClock()
        self.stats = RequestStats()
        self.samples: list[PoolSample] = []
        self.submitted = self.met = 0
        self.prompt_tokens_computed = self.prompt_tokens_lost = 0
        """Prompt tokens that workers computed, and how many of them for requests that had failed by then."""
        self._namer = PromptHasher(
            trace_block_tokens=trace_block_tokens, block_tokens=spec.workers[0][0].block_tokens
        )
        self._live: dict[SequenceId, LiveRequest] = {}
        self._workers: dict[WorkerId, FleetWorker] = {}
        self._cell_of: dict[WorkerId, Cell] = {}
        self._cells = [Cell(self, number) for number in range(spec.cells)]
        self._requests: Iterator[FleetRequest] = iter(())
        self._hosts: dict[tuple[Role, int], HostStore] = {}
        self._numbers: Counter[Role] = Counter()
        self._phases = Random(f"{spec.seed}/heartbeats")
        self._directory = HolderCounts()
        self._busy_s: dict[WorkerId, float] = {}
        """Busy time of each worker at the last sample."""
        self._gone: dict[WorkerId, FleetWorker] = {}
        self._lost: set[WorkerId] = set()
        self.observed: Observed | None = None
        """Counts for an autoscaler, where there is one."""
        self._has_more = False
        self._busy_until_s = 0.0
        self._observer: Observer | None = None
        self.is_stopped = False
        self._build()

    @property
    def workers(self) -> list[FleetWorker]:
        return list(self._workers.values())

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def late_count(self) -> int:
        """Requests under way whose first token has missed its objective, whether it has come or not."""
        now_s = self.clock.now_s
        return sum(
            (now_s if live.first_s != live.first_s else live.first_s) - live.request.at_s > ttft_s
            for live in self._live.values()
            if (ttft_s := self.spec.slo_classes.get(live.request.slo_class, (0.0, 0.0))[0])
        )

    @property
    def queued_count(self) -> int:
        """Sequences without a place, at all routers."""
        return sum(cell.core.queued_count for cell in self._cells)

    @property
    def unplaced_tokens(self) -> int:
        """Prompt tokens of requests that were never placed."""
        return sum(live.request.input_tokens for live in self._live.values() if not live.workers)

    def router_statuses(self) -> list[RouterStatus]:
        return [cell.core.status() for cell in self._cells]

    def check(self) -> None:
        """Raises AssertionError if the routers' accounts disagree."""
        for cell in self._cells:
            cell.core.check()

    def _build(self) -> None:
        for kind, count in self.spec.workers:
            for _ in range(count):
                self.add(kind)
        self.clock.recurring |= {self._sample, self._hear}
        self.clock.after(self.spec.sample_s, self._sample)

    def add(self, kind: FleetWorkerSpec) -> WorkerId:
        """Add a worker, which serves from now on."""
        number = self._numbers[kind.role]
        self._numbers[kind.role] += 1
        worker_id = WorkerId(f"{kind.role}-{number}.0")
        worker = self._make_worker(worker_id, kind, self.clock, self, hop_s=self.spec.hop_s)
        cell = self._cells[number % len(self._cells)]
        self._workers[worker_id], self._cell_of[worker_id] = worker, cell
        cell.feed(WorkerJoined(worker.hello(), f"{worker_id}:1"))
        self._stock(worker, number)
        worker.begin(self.spec.heartbeat_s, phase_s=self._phases.random() * self.spec.heartbeat_s)
        return worker_id

    def update(self, worker_id: WorkerId, role: Role, *, is_draining: bool) -> None:
        """Tell a router what the directory says of a worker."""
        self._cell_of[worker_id].feed(WorkerUpdated(worker_id, role, is_draining))

    def remove(self, worker_id: WorkerId) -> None:
        """Remove an idle worker."""
        self._gone[worker_id] = self._workers.pop(worker_id)
        self._cell_of[worker_id].feed(WorkerLost(worker_id, "it was drained"))

    def lose(self, worker_id: WorkerId, reason: str) -> None:
        """Lose a worker with all that it holds. Its router hears so, and nothing of what it said last."""
        worker = self._gone[worker_id] = self._workers.pop(worker_id)
        self._lost.add(worker_id)
        assert isinstance(worker, MacroWorker)
        worker.lose()
        self._cell_of[worker_id].feed(WorkerLost(worker_id, reason))

    def _stock(self, worker: FleetWorker, number: int) -> None:
        """Give a worker its host's store: a host has `workers_per_host` workers of one role."""
        store = self.spec.store
        if not store.host_bytes or not isinstance(worker, MacroWorker):
            return
        block_bytes = worker.spec.kv_token_bytes * worker.spec.block_tokens
        host = (worker.spec.role, number // store.workers_per_host)
        if host not in self._hosts:
            self._hosts[host] = HostStore(store, block_bytes, self._directory)
        worker.store = FleetWorkerStore(
            self._hosts[host],
            self.clock,
            worker.engine,
            worker.cache,
            block_tokens=worker.spec.block_tokens,
            block_bytes=block_bytes,
        )

    # --- the clock ------------------------------------------------------------------------------

    def run(self, requests: Iterator[FleetRequest], *, observer: Observer | None = None) -> None:
        """Run until all requests have ended, or the observer stops it."""
        self._requests, self._observer = requests, observer
        self._has_more = True
        self.clock.at(0.0, self._next, None)
        self.clock.run(is_over=lambda: self.is_stopped or not (self._has_more or self._live))

    def _next(self, request: FleetRequest | None) -> None:
        if request is not None:
            self._submit(request)
        following = next(self._requests, None)
        if following is None:
            self._has_more = False
        else:
            self.clock.at(following.at_s, self._next, following)

    def _sample(self) -> None:
        tokens = held = blocks = decoding = prefilling = 0
        busy_s = 0.0
        for worker in self._workers.values():
            now = worker.usage()
            before_s = self._busy_s.get(worker.worker_id, 0.0)
            self._busy_s[worker.worker_id] = now.busy_s
            if worker.spec.role.prefills:
                prefilling += 1
                tokens += now.waiting_tokens
                busy_s += now.busy_s - before_s
            if worker.spec.role.decodes:
                held += now.held_blocks
                blocks += worker.spec.block_count
                decoding += now.decoding
        busy = busy_s / max(1, prefilling) / self.spec.sample_s
        self.samples.append(
            PoolSample(self.clock.now_s, busy, held / max(1, blocks), tokens, decoding, self.queued_count)
        )
        self.clock.after(self.spec.sample_s, self._sample)
        self._skip_idle_time()
        if self._observer is not None and not self._observer(self):
            self.is_stopped = True

    def _skip_idle_time(self) -> None:
        """Skip time without requests. A trace may have hours, or years, between two requests, and heartbeats
        in them show nothing."""
        now_s = self.clock.now_s
        if self._live:
            self._busy_until_s = now_s
        elif now_s - self._busy_until_s >= (IDLE_S if self.observed is None else IDLE_SCALED_S):
            self.clock.skip_idle_time(lead_s=LEAD_S, least_s=LEFT_OUT_LEAST_S)

    # --- requests -------------------------------------------------------------------------------

    def _submit(self, request: FleetRequest) -> None:
        seq_id = SequenceId(f"{request.number}/0")
        hashes = self._namer.hashes_of(request)
        self._live[seq_id] = LiveRequest(request, hashes)
        if self.observed is not None:
            self.observed.arrived(request)
        self.submitted += 1
        ttft_s, tpot_s = self.spec.slo_classes.get(request.slo_class, (0.0, 0.0))
        now_s = self.clock.now_s
        submit = Submit(
            seq_id=seq_id,
            request_id=RequestId(str(request.number)),
            prompt=range(request.input_tokens),
            sampling=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
            salt=b"",
            deadline_s=now_s + self.spec.router.request_timeout_s,
            ttft_slo_s=ttft_s,
            tpot_slo_s=tpot_s,
            slo_class=request.slo_class,
            refuse_late=self.spec.refuses_late,
            tenant=request.tenant,
            fairness_key=request.tenant,
            arrived_s=now_s,
            hashes=TraceHashes(hashes),
        )
        self._cell_for(request).feed(submit)

    def _cell_for(self, request: FleetRequest) -> Cell:
        """Choose a cell. Turns of one conversation go to one cell: they have their second block in common, if
        they have one."""
        if len(self._cells) == 1:
            return self._cells[0]
        ids = request.hash_ids
        key = ids[1] if len(ids) > 1 else request.number
        return self._cells[hash((request.copy, key)) % len(self._cells)]

    def perform(self, action: RouterAction) -> None:
        match action:
            case ToWorker(worker_id, message):
                self.clock.after(self.spec.hop_s, self.worker(worker_id).on_message, message)
            case Deliver(seq_id, first_index, tokens, cached):
                live = self._live[seq_id]
                if first_index == 0:
                    live.first_s = self.clock.now_s
                    live.cached = cached
                    if self.observed is not None:
                        self.observed.started(live.request, cached, live.first_s)
                live.last_s = self.clock.now_s
                live.generated = first_index + len(tokens)
            case Finished(seq_id):
                live = self._live.pop(seq_id)
                self._over(live, RequestOutcome.COMPLETED, None, "", timings_of(action))
            case Failed(seq_id, kind, message):
                is_refusal = kind in REFUSALS
                outcome = RequestOutcome.REFUSED if is_refusal else RequestOutcome.FAILED
                error = ErrorKind.OVERLOADED if is_refusal else ErrorKind.HTTP
                if kind is FailureKind.DEADLINE:
                    error = ErrorKind.TIMEOUT
                self._over(self._live.pop(seq_id), outcome, error, f"{kind}: {message}")
            case Note(seq_id, what, _, worker_ids):
                if what in ("placed", "fallback"):
                    live = self._live[seq_id]
                    live.attempts += 1
                    live.workers = worker_ids

    def _over(
        self,
        live: LiveRequest,
        outcome: RequestOutcome,
        error: ErrorKind | None,
        detail: str,
        timings: dict[str, float] | None = None,
    ) -> None:
        self.met += outcome is RequestOutcome.COMPLETED and self._meets(live)
        if self.observed is not None:
            self.observed.over(live.request, live.first_s, live.last_s, live.generated)
        self.stats.add(
            live.request,
            outcome=outcome,
            error=error,
            detail=detail,
            first_s=live.first_s,
            last_s=live.last_s if live.generated > 1 else NEVER,
            ended_s=self.clock.now_s,
            generated=live.generated,
            cached=live.cached,
            computed=live.computed,
            served_by=tuple(live.workers),
            attempts=live.attempts,
            timings=timings,
        )

    def _meets(self, live: LiveRequest) -> bool:
        ttft_s, tpot_s = self.spec.slo_classes.get(live.request.slo_class, (0.0, 0.0))
        if ttft_s and live.first_s - live.request.at_s > ttft_s:
            return False
        gaps = live.generated - 1
        return not tpot_s or gaps < 1 or (live.last_s - live.first_s) / gaps <= tpot_s

    # --- surroundings of workers ----------------------------------------------------------------

    def send_to_router(self, worker: FleetWorker, message: WorkerMessage) -> None:
        event = FromWorker(worker.worker_id, message)
        self.clock.after(self.spec.hop_s, self._hear, event)

    def _hear(self, event: FromWorker) -> None:
        if event.worker_id not in self._lost:
            self._cell_of[event.worker_id].feed(event)

    def worker(self, worker_id: WorkerId) -> FleetWorker:
        """Return a worker, even one that has left: what was sent before still arrives."""
        return self._workers.get(worker_id) or self._gone[worker_id]

    def hashes_of(self, seq_id: SequenceId) -> list[BlockHash]:
        live = self._live.get(submitted_name(seq_id))
        return [] if live is None else live.hashes

    def prompt_computed(self, seq_id: SequenceId, tokens: int) -> None:
        self.prompt_tokens_computed += tokens
        live = self._live.get(submitted_name(seq_id))
        if live is None:
            self.prompt_tokens_lost += tokens
        else:
            live.computed += tokens
