"""The router's decisions: events in, actions out.

It owns every live sequence (`Flow`), the line of those that wait, and what is known about workers. No
IO, no clock: the asyncio driver and the simulator run the same object.

Each event is taken in three steps: what it says, what is due by now, and then, if capacity may have
come free, one look along the line. So actions that free come before actions that fill.
"""

from collections.abc import Mapping
from random import Random
from typing import assert_never

import msgspec

from baton.config import RouterConfig
from baton.core.geometry import blocks_for
from baton.core.hashing import root_hash
from baton.core.ids import BlockHash, SequenceId, WorkerId
from baton.core.messages import (
    BlockEvents,
    Leg,
    LoadReport,
    RefusalReason,
    ResyncBlocks,
    Role,
    SequenceFailed,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StepOutput,
    WorkerHello,
)
from router.admission import LOOK_AHEAD, Pace, WaitLine
from router.affinity import Affinity
from router.cluster_view import ClusterView, Worker
from router.events import (
    ClientGone,
    FailureKind,
    FromWorker,
    RouterAction,
    RouterEvent,
    Submit,
    Tick,
    ToWorker,
    WorkerJoined,
    WorkerLost,
    WorkerUpdated,
)
from router.flow import Flow, Phase
from router.policy import make_policy
from router.policy.place import pairable_fingerprints, place
from router.policy.views import NoPlace, Placement, RequestView
from router.prefix_index import PrefixIndex
from router.prompt_hashes import PromptHashes
from router.timers import Timers


class WorkerStatus(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    role: Role
    address: str
    model: str
    fingerprint: str
    is_draining: bool
    is_stale: bool
    """No load report for longer than `worker_silence_s`: assumed busy."""
    in_flight_count: int
    """Sequences of this router that have a leg there."""
    in_flight_tokens: int
    """Prompt tokens sent there and not computed yet."""
    load: float
    free_blocks: int
    block_count: int
    indexed_blocks: int
    """Blocks of its prefix cache that this router knows."""
    is_index_known: bool
    """False: waiting for a snapshot of its prefix cache."""


class RouterStatus(msgspec.Struct, frozen=True):
    queued: int
    """Sequences without a place, those resting between two attempts included."""
    live: int
    workers: tuple[WorkerStatus, ...]
    is_ready: bool
    """A sequence that arrives now can be placed, as soon as there is room."""
    is_prefill_pool_empty: bool
    is_decode_pool_empty: bool
    is_fallback_in_use: bool
    """Pairs are wanted and impossible, and both legs run on whichever worker there is."""

    @property
    def is_degraded(self) -> bool:
        return self.is_prefill_pool_empty or self.is_decode_pool_empty or self.is_fallback_in_use


class RouterCore:
    def __init__(self, *, config: RouterConfig, rng: Random, now_s: float) -> None:
        self._config = config
        self._rng = rng
        self._policy = make_policy(config)
        self._cluster = ClusterView(silence_s=config.worker_silence_s)
        self._index = PrefixIndex()
        self._affinity = Affinity()
        self._flows: dict[SequenceId, Flow] = {}
        self._hashes: dict[SequenceId, PromptHashes] = {}
        self._line = WaitLine(new_max=config.queue_requests_max)
        self._resting: set[SequenceId] = set()
        self._timers = Timers()
        self._pace = Pace()
        self._arrivals = 0
        self._may_place = False
        """Something changed since the last look along the line."""
        self._waits_for = "no worker takes new sequences"
        self._now_s = now_s

    # --- the outside ------------------------------------------------------------------------------

    def handle(self, event: RouterEvent, *, now_s: float) -> list[RouterAction]:
        assert now_s >= self._now_s, "time went backwards"
        self._now_s = now_s
        actions = self._take_in(event)
        for seq_id in self._timers.take_due(now_s):
            actions += self._on_timer(self._flows[seq_id])
        self._index.expire(now_s)
        if self._may_place:
            self._may_place = False
            actions += self._look_along_line()
        return actions

    @property
    def next_tick_s(self) -> float | None:
        """When to send a Tick; None: not before something else happens."""
        times = [t for t in (self._timers.next_s, self._index.next_tick_s) if t is not None]
        return min(times, default=None)

    @property
    def is_idle(self) -> bool:
        return not self._flows

    def status(self) -> RouterStatus:
        views = self._cluster.views(0, avoid=frozenset(), fingerprint="", now_s=self._now_s)
        usable = [v for v in views if not v.is_draining]
        wants_pairs = self._config.disaggregate
        lacks_pairs = wants_pairs and not pairable_fingerprints(usable)
        may_fall_back = self._config.fallback_to_other_pool
        return RouterStatus(
            queued=len(self._line) + len(self._resting),
            live=len(self._flows),
            workers=tuple(self._worker_status(w) for w in self._cluster),
            is_ready=bool(usable) and (not lacks_pairs or may_fall_back),
            is_prefill_pool_empty=not any(v.role.prefills or not wants_pairs for v in usable),
            is_decode_pool_empty=not any(v.role.decodes or not wants_pairs for v in usable),
            is_fallback_in_use=lacks_pairs and may_fall_back and bool(usable),
        )

    def _worker_status(self, worker: Worker) -> WorkerStatus:
        worker_id, hello = worker.worker_id, worker.hello
        return WorkerStatus(
            worker_id=worker_id,
            role=worker.role,
            address=worker.address,
            model=hello.model,
            fingerprint=hello.fingerprint,
            is_draining=worker.is_draining,
            is_stale=self._cluster.is_stale(worker, self._now_s),
            in_flight_count=worker.in_flight.sequences,
            in_flight_tokens=worker.in_flight.tokens,
            load=worker.load,
            free_blocks=max(0, worker.free_blocks),
            block_count=hello.block_count,
            indexed_blocks=self._index.block_count(worker_id),
            is_index_known=self._index.is_known(worker_id),
        )

    def check(self) -> None:
        """Raises AssertionError if the accounts disagree. Costs as much as everything is large."""
        self._cluster.check()
        self._index.check()
        self._line.check()
        assert self._hashes.keys() <= self._flows.keys()
        assert self._resting <= self._flows.keys()
        for seq_id, flow in self._flows.items():
            places = (seq_id in self._line, seq_id in self._resting, bool(flow.legs))
            assert sum(places) == 1, f"{seq_id} is in {places}"
            assert (flow.phase is Phase.QUEUED) == (not flow.legs)
            assert not flow.is_over
        held = {
            (s, w.worker_id): t.leg for w in self._cluster for s, t in w.tickets.items()
        }  # what the accounts say
        assert held == {(s, w): leg for s, f in self._flows.items() for w, leg in f.legs.items()}
        if self.is_idle:
            assert all(w.in_flight.values == (0, 0, 0) for w in self._cluster)
            assert len(self._line) == 0
            assert self._affinity.is_idle
            assert self._timers.next_s is None

    # --- events -----------------------------------------------------------------------------------

    def _take_in(self, event: RouterEvent) -> list[RouterAction]:
        match event:
            case Submit():
                return self._submit(event)
            case ClientGone(seq_id):
                return self._on_client_gone(seq_id)
            case WorkerJoined(hello, address):
                actions = self._lose(hello.worker_id, "a new session began")
                self._cluster.join(hello, address)
                self._index.add_worker(hello.worker_id)
                self._may_place = True
                return actions
            case WorkerLost(worker_id, reason):
                return self._lose(worker_id, reason)
            case WorkerUpdated(worker_id, role, is_draining):
                if (worker := self._cluster.get(worker_id)) is not None:
                    worker.updated(role, is_draining)
                    self._may_place = True
                return []
            case FromWorker(worker_id, message):
                worker = self._cluster.get(worker_id)
                return [] if worker is None else self._from_worker(worker, message)
            case Tick():
                return []
            case _:
                assert_never(event)

    def _submit(self, submit: Submit) -> list[RouterAction]:
        seq_id = submit.seq_id
        assert seq_id not in self._flows, f"{seq_id} was submitted twice"
        self._arrivals += 1
        flow = Flow(
            submit,
            arrival=self._arrivals,
            attempts_max=self._config.attempts_max,
            queue_wait_s=self._config.queue_wait_s,
            now_s=self._now_s,
        )
        self._flows[seq_id] = flow
        actions: list[RouterAction] = []
        if flow.next_tick_s(self._now_s) <= self._now_s:
            actions = self._on_tick(flow)
        elif self._line.may_follow_all():
            actions = self._try_to_place(flow)
        if flow.phase is Phase.QUEUED and not self._line.has_room:
            message = f"{len(self._line)} sequences wait already"
            actions += flow.refuse(
                FailureKind.QUEUE_FULL, message, now_s=self._now_s, retry_after_s=self._retry_after_s
            )
        self._settle(flow)
        return actions

    def _on_client_gone(self, seq_id: SequenceId) -> list[RouterAction]:
        flow = self._flows.get(seq_id)
        if flow is None:
            return []
        actions = flow.on_client_gone(now_s=self._now_s)
        self._settle(flow)
        return actions

    def _lose(self, worker_id: WorkerId, reason: str) -> list[RouterAction]:
        worker = self._cluster.get(worker_id)
        if worker is None:
            return []
        actions: list[RouterAction] = []
        for seq_id in list(worker.tickets):
            flow = self._flows[seq_id]
            actions += flow.on_worker_lost(worker_id, reason, now_s=self._now_s)
            self._settle(flow)
        assert not worker.tickets
        self._cluster.lose(worker_id)
        self._index.remove_worker(worker_id)
        self._affinity.lost(worker_id)
        # Others may be what a sequence waits for now: a whole leg where pairs were possible before.
        self._may_place = True
        return actions

    def _from_worker(
        self,
        worker: Worker,
        message: WorkerHello
        | StepOutput
        | SequenceJoined
        | SequenceRefused
        | SequenceFailed
        | BlockEvents
        | LoadReport,
    ) -> list[RouterAction]:
        match message:
            case StepOutput(outputs):
                actions: list[RouterAction] = []
                for output in outputs:
                    actions += self._on_output(worker.worker_id, output)
                return actions
            case SequenceJoined() | SequenceRefused() | SequenceFailed():
                return self._on_sequence_message(worker, message)
            case BlockEvents():
                if self._index.apply(worker.worker_id, message, now_s=self._now_s):
                    return [ToWorker(worker.worker_id, ResyncBlocks())]
                return []
            case LoadReport():
                worker.heard(message, now_s=self._now_s)
                self._may_place = True
                return []
            case WorkerHello():
                return []  # the session's adapter turns it into WorkerJoined
            case _:
                assert_never(message)

    def _on_output(self, worker_id: WorkerId, output: SequenceOutput) -> list[RouterAction]:
        flow = self._flows.get(output.seq_id)
        if flow is None:
            return []
        phase = flow.phase
        actions = flow.on_output(worker_id, output, now_s=self._now_s)
        if flow.phase is not phase:
            self._settle(flow)
        return actions

    def _on_sequence_message(
        self, worker: Worker, message: SequenceJoined | SequenceRefused | SequenceFailed
    ) -> list[RouterAction]:
        flow = self._flows.get(message.seq_id)
        if flow is None:
            return []
        match message:
            case SequenceJoined():
                actions = flow.on_joined(worker.worker_id, message, now_s=self._now_s)
            case SequenceFailed():
                actions = flow.on_failed(worker.worker_id, message, now_s=self._now_s)
            case SequenceRefused(reason=reason):
                actions = flow.on_refused(worker.worker_id, message, now_s=self._now_s)
                if actions and reason in (RefusalReason.NO_ROOM, RefusalReason.DRAINING):
                    worker.refused(is_draining=reason is RefusalReason.DRAINING)
        self._settle(flow)
        return actions

    # --- time -------------------------------------------------------------------------------------

    @property
    def _retry_after_s(self) -> float:
        return self._pace.retry_after_s(len(self._line))

    def _on_timer(self, flow: Flow) -> list[RouterAction]:
        actions = self._on_tick(flow)
        self._settle(flow)
        return actions

    def _on_tick(self, flow: Flow) -> list[RouterAction]:
        return flow.on_tick(now_s=self._now_s, retry_after_s=self._retry_after_s, waits_for=self._waits_for)

    # --- accounts ---------------------------------------------------------------------------------

    def _settle(self, flow: Flow) -> None:
        """Make the accounts follow what the flow became."""
        seq_id = flow.submit.seq_id
        self._settle_tickets(flow)
        if flow.is_over:
            self._line.remove(seq_id)
            self._resting.discard(seq_id)
            self._timers.drop(seq_id)
            self._hashes.pop(seq_id, None)
            del self._flows[seq_id]
            if flow.was_placed:
                self._affinity.over(flow.submit)
                self._pace.freed(self._now_s)
            return
        self._timers.set(seq_id, flow.next_tick_s(self._now_s))
        if flow.phase is not Phase.QUEUED:
            self._line.remove(seq_id)
        elif flow.rest_until_s > self._now_s:
            self._resting.add(seq_id)
        elif seq_id not in self._line:
            self._resting.discard(seq_id)
            self._line.add(seq_id, arrival=flow.arrival, is_new=not flow.was_placed)
            self._may_place = self._may_place or flow.was_placed

    def _settle_tickets(self, flow: Flow) -> None:
        seq_id = flow.submit.seq_id
        self._may_place = self._cluster.take_back_except(seq_id, flow.legs) or self._may_place
        if flow.is_prefilled:
            for worker_id in flow.legs:
                self._cluster[worker_id].prefilled(seq_id)

    # --- placement --------------------------------------------------------------------------------

    def _look_along_line(self) -> list[RouterAction]:
        """Place those that can be, in order, see `router.admission`."""
        actions: list[RouterAction] = []
        misses = 0
        smallest_miss: dict[bool, int] = {}
        for seq_id in self._line.in_order():
            flow = self._flows[seq_id]
            # Room only shrinks during one look: what is no shorter than a miss is a miss.
            missed_tokens = smallest_miss.get(flow.is_last_token)
            if missed_tokens is None or flow.token_count < missed_tokens:
                actions += self._try_to_place(flow)
                self._settle(flow)
                if flow.phase is not Phase.QUEUED:
                    continue
                smallest_miss[flow.is_last_token] = flow.token_count
            misses += 1
            if misses >= LOOK_AHEAD or self._line.is_starving(seq_id):
                break
        return actions

    def _try_to_place(self, flow: Flow) -> list[RouterAction]:
        """No action: there is no place now."""
        views = self._cluster.views(
            flow.token_count, avoid=flow.avoid, fingerprint=flow.fingerprint, now_s=self._now_s
        )
        views = self._affinity.mark(flow.submit, views)
        found_blocks: dict[tuple[str, int], dict[WorkerId, int]] = {}

        def matched(fingerprint: str, block_tokens: int) -> dict[WorkerId, int]:
            kind = (fingerprint, block_tokens)
            if kind not in found_blocks:
                found_blocks[kind] = self._index.match(self._hashes_of(flow, fingerprint, block_tokens))
            # The last token is computed even when all are cached: sampling needs its logits.
            most = flow.token_count - 1
            return {w: min(most, count * block_tokens) for w, count in found_blocks[kind].items()}

        found = place(
            RequestView(flow.is_last_token, matched),
            views,
            policy=self._policy,
            disaggregate=self._config.disaggregate,
            fallback=self._config.fallback_to_other_pool,
            rng=self._rng,
        )
        if isinstance(found, NoPlace):
            self._waits_for = found.because
            if found.is_final:
                return flow.refuse(FailureKind.TOO_LONG, self._too_long(flow), now_s=self._now_s)
            return []
        blocks = found_blocks.get((found.prefill.fingerprint, found.prefill.block_tokens), {})
        return self._start(flow, found, blocks)

    def _too_long(self, flow: Flow) -> str:
        holds = max((w.hello.max_model_tokens for w in self._cluster), default=0)
        return (
            f"No worker here can hold a sequence of more than {holds} tokens, and this one has "
            f"{flow.token_count}; at least one must be left for the answer."
        )

    def _start(
        self, flow: Flow, placement: Placement, cached_blocks: Mapping[WorkerId, int]
    ) -> list[RouterAction]:
        seq_id, view = flow.submit.seq_id, placement.prefill
        for worker_id, leg in placement.legs.items():
            cached_tokens = cached_blocks.get(worker_id, 0) * view.block_tokens
            self._cluster.issue(
                worker_id,
                seq_id,
                leg=leg,
                tokens=0 if leg is Leg.DECODE else max(1, flow.token_count - cached_tokens),
                blocks=blocks_for(flow.token_count + 1, view.block_tokens),
            )
            if self._policy.uses_prefix:
                hashes = self._hashes_of(flow, view.fingerprint, view.block_tokens)
                news = hashes[cached_blocks.get(worker_id, 0) :]
                self._index.expect(worker_id, news, now_s=self._now_s)
        self._line.went_before(flow.arrival)
        self._affinity.placed(flow.submit, placement.legs, is_first_time=not flow.was_placed)
        return flow.start(
            placement.legs,
            source=None if placement.decode is None else self._cluster[view.worker_id].peer,
            fingerprint=view.fingerprint,
            cache_root=root_hash(view.fingerprint, flow.submit.salt),
            because=placement.because,
            is_fallback=placement.is_fallback,
            now_s=self._now_s,
        )

    def _hashes_of(self, flow: Flow, fingerprint: str, block_tokens: int) -> list[BlockHash]:
        hashes = self._hashes.get(flow.submit.seq_id)
        if hashes is None:
            hashes = self._hashes[flow.submit.seq_id] = PromptHashes(flow.submit.salt)
        return hashes.of(flow.tokens, fingerprint, block_tokens)
