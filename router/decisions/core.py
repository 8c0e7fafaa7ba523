"""The router's decisions: events in, actions out.

The core owns every live sequence (`Flow`), the admission queue, and all that is known about workers. It has
no IO and no clock, so the asyncio driver and the simulators run the same object.

Each event is handled in three steps. The event itself is applied, then the timers that are due, and then the
admission queue is scanned if capacity may have come free. Actions that free room thus come before actions
that use it.
"""

from collections.abc import Iterable
from math import inf
from random import Random
from typing import assert_never

import msgspec

from baton.config.router import RouterConfig, SloConfig
from baton.core.demand import DemandReport
from baton.core.hashing import root_hash
from baton.core.ids import RouterId, SequenceId, WorkerId
from baton.core.messages import (
    BlockEvents,
    LoadReport,
    Phase,
    RefusalReason,
    ResyncBlocks,
    SequenceFailed,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StepOutput,
    WorkerHello,
    WorkerMessage,
)
from router.decisions.cluster.worker import WorkerView
from router.decisions.demand import RequestCounter, demand_of
from router.decisions.events import (
    ClientGone,
    Failed,
    FromWorker,
    LatencyBreakdown,
    Note,
    PeerLost,
    PeerUpdated,
    RouterAction,
    RouterEvent,
    Served,
    Submit,
    Tick,
    ToWorker,
    WorkerJoined,
    WorkerLost,
    WorkerUpdated,
)
from router.decisions.failure_handling import FailureHandling
from router.decisions.flow import Flow
from router.decisions.migration import MIGRATIONS_AT_ONCE, ends_sooner_here, keeps_weights, movable
from router.decisions.placement.interface import NoPlace, Placement
from router.decisions.placing import Placing
from router.decisions.prefix_index import PrefixIndex
from router.decisions.request_state import RequestState
from router.decisions.status import RouterStatus, router_status
from router.decisions.timers import Timers
from router.decisions.waiting import Waiting

NO_CLASSES = SloConfig()


class RouterCore:
    def __init__(
        self,
        *,
        config: RouterConfig,
        rng: Random,
        now_s: float,
        slo: SloConfig = NO_CLASSES,
        configured_workers: int = 0,
    ) -> None:
        """`configured_workers` is how many workers the model is to have; 0: that is not known."""
        self._config, self._configured_workers = config, configured_workers
        self._placing = Placing(config=config, rng=rng)
        self._cluster = self._placing.cluster
        self._index = self._placing.index
        self._failures = FailureHandling(config, self._cluster)
        self._hedging = self._failures.hedging
        self._placing.suspended = self._failures.suspended
        self.peers = self._placing.peers
        """The loads of other routers. Reports may be read from it between events, since that decides
        nothing."""
        self._flows: dict[SequenceId, Flow] = {}
        self._waiting = Waiting(
            config=config,
            slo=slo,
            placing=self._placing,
            flows=self._flows,
            start=self._start,
            settle=self._settle,
        )
        self._timers = Timers()
        self._arrivals = 0
        self._requests = RequestCounter()
        self._now_s = self._began_s = now_s

    # --- public interface ------------------------------------------------------------------------------

    def handle(self, event: RouterEvent, *, now_s: float) -> list[RouterAction]:
        assert now_s >= self._now_s, "time went backwards"
        self._now_s = now_s
        if not isinstance(event, Submit):  # A placement does not wait for what expires: a tick is due for it.
            self._index.expire(now_s)
        self.peers.expire(now_s)
        actions = self._on_event(event)
        for seq_id in self._timers.take_due(now_s):
            actions += self._on_timer(self._flows[seq_id])
        if self._waiting.is_due(now_s):
            actions += self._waiting.scan(now_s=now_s)
        return self._without_superseded(actions) if self._hedging.was_ever_used else actions

    @property
    def next_tick_s(self) -> float | None:
        """Return when the next Tick is due; None if no timer is set."""
        found = self._timers.next_s
        for other in (self._index.next_tick_s, self.peers.next_tick_s, self._waiting.next_tick_s):
            if other is not None and (found is None or other < found):
                found = other
        return found

    @property
    def index(self) -> PrefixIndex:
        return self._index

    @property
    def has_open_breakers(self) -> bool:
        return self._failures.breakers.any_open

    @property
    def is_idle(self) -> bool:
        return not self._flows

    @property
    def queued_count(self) -> int:
        """Number of sequences that wait for placement."""
        return len(self._waiting)

    def progress_of(self, seq_id: SequenceId) -> tuple[LatencyBreakdown | None, Served | None]:
        """Return what `Finished` will carry, as far as it is known."""
        flow = self._flows.get(self._hedging.serving_attempt_of(seq_id))
        return (None, None) if flow is None else (flow.clock.latency_breakdown(), flow.served)

    def is_computing(self, seq_id: SequenceId) -> bool:
        """Whether workers have the client's sequence now."""
        flow = self._flows.get(self._hedging.serving_attempt_of(seq_id))
        return flow is not None and bool(flow.phases)

    def status(self) -> RouterStatus:
        return router_status(
            self._placing,
            self._failures,
            self._config,
            queued=self.queued_count,
            live=len(self._flows),
            now_s=self._now_s,
        )

    def demand(self, router_id: RouterId, *, now_s: float) -> DemandReport:
        """Return the report by which the autoscaler decides how many workers there shall be."""
        flows, up_s = self._flows.values(), now_s - self._began_s
        return demand_of(router_id, self._requests, self._cluster, flows, up_s=up_s, now_s=now_s)

    def check(self) -> None:
        """Raise AssertionError if the accounts disagree. The cost grows with all that the router holds."""
        self._placing.check()
        self._waiting.check()
        self._failures.check()
        for flow in self._flows.values():
            assert (flow.state is RequestState.QUEUED) == (not flow.phases)
            assert not flow.is_over
        self._placing.check_against(self._flows)
        if self.is_idle:
            assert self._timers.next_s is None
            assert self._failures.breakers.is_idle
            assert self._hedging.is_idle
            assert self._requests.is_idle

    # --- events -----------------------------------------------------------------------------------

    def _on_event(self, event: RouterEvent) -> list[RouterAction]:
        match event:
            case Submit():
                return self._submit(event)
            case ClientGone(seq_id, is_answered):
                return self._on_client_gone(seq_id, is_answered=is_answered)
            case WorkerJoined(hello, address):
                actions = self._lose(hello.worker_id, "a new session began")
                self._placing.join(hello, address)
                self._waiting.wants_scan = True
                return actions
            case WorkerLost(worker_id, reason):
                return self._lose(worker_id, reason)
            case WorkerUpdated(worker_id, role, is_draining, is_suspect):
                if (worker := self._cluster.get(worker_id)) is not None:
                    worker.update(role, is_draining=is_draining, is_suspect=is_suspect)
                    self._waiting.wants_scan = True
                return []
            case FromWorker(worker_id, message):
                worker = self._cluster.get(worker_id)
                return [] if worker is None else self._from_worker(worker, message)
            case PeerUpdated(update):
                self.peers.on_update(update, now_s=self._now_s)
                self._waiting.wants_scan = True
                return []
            case PeerLost(router_id):
                self.peers.lost(router_id)
                self._waiting.wants_scan = True
                return []
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
            retries=self._failures.retries,
        )
        self._flows[seq_id] = flow
        self._requests.submitted(flow)
        if flow.next_tick_s(self._now_s) <= self._now_s:
            actions = self._on_tick(flow)
        else:
            actions = self._waiting.arrive(flow, now_s=self._now_s)
        self._settle(flow)
        return actions

    def _on_client_gone(self, seq_id: SequenceId, *, is_answered: bool) -> list[RouterAction]:
        name = self._hedging.serving_attempt_of(seq_id)
        other = self._hedging.other_attempt_of(name)
        actions = self._cancel(name, is_answered=is_answered)
        return actions if other is None else [*actions, *self._cancel(other)]

    def _cancel(self, name: SequenceId, *, is_answered: bool = False) -> list[RouterAction]:
        flow = self._flows.get(name)
        if flow is None:
            return []
        if is_answered:
            self._failures.answered(flow, now_s=self._now_s)
        actions = flow.on_client_gone(now_s=self._now_s, is_answered=is_answered)
        self._settle(flow)
        return actions

    def _lose(self, worker_id: WorkerId, reason: str) -> list[RouterAction]:
        worker = self._cluster.get(worker_id)
        if worker is None:
            return []
        self._failures.lost(worker, reason, self._now_s)
        actions: list[RouterAction] = []
        for seq_id in list(worker.load.reservations):
            flow = self._flows[seq_id]
            is_planned = worker.is_leaving
            actions += flow.on_worker_lost(worker_id, reason, now_s=self._now_s, is_planned=is_planned)
            self._settle(flow)
        assert not worker.load.reservations
        self._placing.lose(worker_id)
        # Without this worker some sequence may be placed otherwise, for instance aggregated instead of as a
        # pair.
        self._waiting.wants_scan = True
        return actions

    def _from_worker(self, worker: WorkerView, message: WorkerMessage) -> list[RouterAction]:
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
                worker.on_report(message, now_s=self._now_s)
                self._failures.reported(worker, message, self._now_s)
                self._waiting.wants_scan = True
                return self._migrate_from(worker)
            case WorkerHello():
                return []  # the session's adapter turns a hello into WorkerJoined
            case _:
                assert_never(message)

    def _on_output(self, worker_id: WorkerId, output: SequenceOutput) -> list[RouterAction]:
        flow = self._flows.get(output.seq_id)
        if flow is None:
            return []
        # A backup attempt is over by then: the first token decides between two attempts.
        if (delivered := flow.on_next(worker_id, output, now_s=self._now_s)) is not None:
            self._waiting.generated(flow, len(delivered.tokens))
            return [delivered]
        state, count = flow.state, len(flow.generated)
        self._placing.on_output(worker_id, output)
        actions = flow.on_output(worker_id, output, now_s=self._now_s)
        self._waiting.generated(flow, len(flow.generated) - count)
        if not count and flow.generated:
            self._settle_objectives(self._requests.on_first_token(flow, now_s=self._now_s))
        if flow.state not in (state, RequestState.QUEUED):
            self._failures.advanced(flow, worker_id, state, now_s=self._now_s)
        if self._hedging.other_attempt_of(flow.name) is not None and (flow.generated or flow.is_over):
            actions = [*self._decide(flow), *actions]
        if flow.state is not state:
            self._settle(flow)
        return actions

    def _settle_objectives(self, seq_ids: Iterable[SequenceId]) -> None:
        """Keep the sequences from being late or refused by a TTFT objective that no longer hangs on them."""
        for seq_id in seq_ids:
            other = self._flows.get(self._hedging.serving_attempt_of(seq_id))
            if other is not None:
                other.submit = msgspec.structs.replace(other.submit, ttft_slo_s=0.0, refuse_late=False)

    def _on_sequence_message(
        self, worker: WorkerView, message: SequenceJoined | SequenceRefused | SequenceFailed
    ) -> list[RouterAction]:
        flow = self._flows.get(message.seq_id)
        if flow is None:
            return []
        match message:
            case SequenceJoined():
                self._placing.on_joined(worker, message)
                actions = flow.on_joined(worker.worker_id, message, now_s=self._now_s)
                if actions:
                    self._failures.breakers.worked(worker.worker_id, flow.name, now_s=self._now_s)
            case SequenceFailed():
                sources = [w for w, phase in flow.phases.items() if phase is Phase.PREFILL]
                is_planned = self._failures.is_planned(message, sources)
                actions = flow.on_failed(worker.worker_id, message, now_s=self._now_s, is_planned=is_planned)
                if actions:
                    self._failures.failed(worker, message, sources, self._now_s)
            case SequenceRefused(reason=reason):
                actions = flow.on_refused(worker.worker_id, message, now_s=self._now_s)
                if actions:
                    self._failures.refused(worker, message, self._now_s)
                if actions and reason in (RefusalReason.NO_ROOM, RefusalReason.DRAINING):
                    worker.refused(is_draining=reason is RefusalReason.DRAINING)
        self._settle(flow)
        return actions

    # --- time -------------------------------------------------------------------------------------

    def _on_timer(self, flow: Flow) -> list[RouterAction]:
        actions = self._on_tick(flow)
        if flow.state is RequestState.PREFILLING and flow.hedge_at_s <= self._now_s:
            actions += self._hedge(flow)
        self._settle(flow)
        return actions

    def _on_tick(self, flow: Flow) -> list[RouterAction]:
        is_over = flow.is_wait_over(self._now_s) and self._now_s < flow.submit.deadline_s
        hint_s = self._waiting.hint_s(flow, now_s=self._now_s) if is_over else 0.0
        return flow.on_tick(now_s=self._now_s, retry_after_s=hint_s, waits_for=self._waits_for())

    def _waits_for(self) -> str:
        """Return what sequences without a place wait for. A cluster that is starting says so."""
        ready, wanted = len(self._cluster), self._configured_workers
        reason = self._waiting.waits_for
        return reason if ready >= wanted else f"starting, {ready} of {wanted} workers ready ({reason})"

    # --- accounts ---------------------------------------------------------------------------------

    def _settle(self, flow: Flow) -> None:
        """Make the accounts follow what the flow became."""
        seq_id = flow.name
        if flow.is_backup and flow.state is RequestState.QUEUED:
            flow.on_client_gone(now_s=self._now_s)  # a lost backup attempt holds nothing and is not retried
        if self._placing.settle(flow, now_s=self._now_s):
            self._waiting.wants_scan = True
        self._failures.breakers.left(seq_id, flow.phases)
        self._waiting.settle(flow, now_s=self._now_s)
        if flow.is_over:
            if self._is_last_attempt(flow):
                self._settle_objectives(self._requests.ended(flow, now_s=self._now_s))
            self._timers.drop(seq_id)
            del self._flows[seq_id]
            if (other := self._hedging.ended(seq_id)) is not None and self._flows[other].is_backup:
                self._flows[other].become_primary()
                self._hedging.takes_over(other, flow.submit.seq_id)
            return
        self._timers.set(seq_id, flow.next_tick_s(self._now_s))

    def _is_last_attempt(self, flow: Flow) -> bool:
        """Whether a sequence has ended with this attempt, so that no other attempt serves its client."""
        if self._hedging.other_attempt_of(flow.name) is not None:
            return False
        return self._hedging.serving_attempt_of(flow.submit.seq_id) == flow.name

    # --- placement --------------------------------------------------------------------------------

    def _start(self, flow: Flow, placement: Placement) -> list[RouterAction]:
        facts = placement.prefill.facts
        self._placing.take(flow, placement, now_s=self._now_s)
        self._failures.started(flow, placement, is_first=not flow.was_placed, now_s=self._now_s)
        return flow.start(
            placement.phases,
            source=None if placement.decode is None else self._cluster[placement.prefill.worker_id].peer,
            fingerprint=facts.fingerprint,
            cache_root=root_hash(facts.fingerprint, flow.submit.salt),
            reason=placement.reason,
            is_fallback=placement.is_fallback,
            now_s=self._now_s,
            forecast=placement.forecast,
        )

    # --- backup attempts and migration ------------------------------------------------------------------

    def _hedge(self, flow: Flow) -> list[RouterAction]:
        """Start a backup attempt for a sequence whose first token is overdue, if a worker has room now."""
        flow.hedge_at_s = inf
        hedging = self._hedging
        if self.queued_count or not hedging.has_credit or hedging.other_attempt_of(flow.name) is not None:
            return []
        backup = flow.make_backup(hedging.new_name(flow.submit.seq_id), now_s=self._now_s)
        found = self._placing.find(backup, now_s=self._now_s)
        if not self._is_worth_it(flow, found):
            self._placing.forget(backup)
            return []
        assert not isinstance(found, NoPlace)
        self._failures.overdue(flow, self._now_s)
        hedging.began(flow.name, backup.name)
        self._flows[backup.name] = backup
        actions = self._start(backup, found)
        self._settle(backup)
        reason = f"no first token within {self._now_s - flow.placed_s:.3f} s of placement"
        return [Note(flow.submit.seq_id, "hedged", reason, tuple(found.phases)), *actions]

    def _is_worth_it(self, flow: Flow, found: Placement | NoPlace) -> bool:
        if isinstance(found, NoPlace) or found.prefill.worker_id in flow.phases:
            return False
        # Otherwise every worker is busy, and a backup attempt would be no faster.
        return found.forecast is None or found.forecast.ttft_s <= self._now_s - flow.placed_s

    def _decide(self, winner: Flow) -> list[RouterAction]:
        """Cancel the other attempt, because `winner` produced a token or ended first."""
        hedging, seq_id = self._hedging, winner.submit.seq_id
        other = hedging.other_attempt_of(winner.name)
        assert other is not None
        loser = self._flows[other]
        tokens = sum(self._cluster[w].load.reservations[other].tokens for w in loser.phases)
        what = "hedge_won" if winner.is_backup else "hedge_lost"
        hedging.decided(winner.name, seq_id, wasted_tokens=tokens)
        winner.become_primary()
        note = Note(seq_id, what, f"attempt {winner.name} produced output first", tuple(winner.phases))
        return [note, *self._cancel(other)]

    def _without_superseded(self, actions: list[RouterAction]) -> list[RouterAction]:
        """Drop failures that clients must not see: an attempt failed while the other goes on, or both
        failed."""
        kept: list[RouterAction] = []
        failed: set[SequenceId] = set()
        for action in actions:
            if isinstance(action, Failed):
                server = self._flows.get(self._hedging.serving_attempt_of(action.seq_id))
                if server is not None or action.seq_id in failed:
                    continue
                failed.add(action.seq_id)
            kept.append(action)
        return kept

    def _migrate_from(self, worker: WorkerView) -> list[RouterAction]:
        """Move streams of a draining or parked worker to other workers, a few per load report."""
        if not self._failures.departures.is_time_to_migrate(worker, self._now_s):
            return []
        actions, moved = list[RouterAction](), 0
        for flow in movable(worker, self._flows):
            found = self._placing.find(flow, now_s=self._now_s)
            if isinstance(found, NoPlace) or not keeps_weights(flow, found):
                break
            if ends_sooner_here(flow, worker, found):
                continue
            why = "parked" if worker.is_parked else "draining"
            actions += flow.migrate(worker.worker_id, why, now_s=self._now_s)
            actions += self._start(flow, found)
            self._settle(flow)
            moved += 1
            if moved == MIGRATIONS_AT_ONCE:
                break
        return actions
