"""What workers owe to requests that are over, late or not begun.

Nobody computes for nothing, no deadline passes without effect, and no queue has more than it may.
"""

from baton.core.ids import RouterId, SeqKey, WorkerId
from baton.core.messages import (
    CancelSequence,
    FailureReason,
    KVRequest,
    Phase,
    ReaderMessage,
    SequenceFailed,
    StartSequence,
    WorkerMessage,
)
from baton.core.steps import StepPlan
from router.decisions.hedging import submitted_name
from simulator.faults.observed_processes import ObservedWorker
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import Scenario
from worker.events import FromRouter, PreparationBegan, WorkerEvent

SLACK_S = 0.001
LOOK_AGAIN_S = 0.25


class _Attempt:
    """An accepted attempt at one worker."""

    __slots__ = ("deadline_s", "router_id", "start", "worker")

    def __init__(self, worker: ObservedWorker, router_id: RouterId, start: StartSequence) -> None:
        self.worker, self.router_id, self.start = worker, router_id, start
        self.deadline_s = worker.local_clock.now_s() + start.time_left_s
        """The deadline on the worker's clock."""


class WorkerChecks:
    """The checks of all workers of a run."""

    __slots__ = (
        "_attempts",
        "_computed",
        "_epochs",
        "_lost_s",
        "_names",
        "_over_s",
        "_run",
        "_scenario",
        "_waiting",
    )

    def __init__(self, run: RunContext, scenario: Scenario) -> None:
        self._run, self._scenario = run, scenario
        self._attempts: dict[tuple[WorkerId, SeqKey], _Attempt] = {}
        self._computed: set[tuple[WorkerId, SeqKey]] = set()
        """Attempts that were in some step."""
        self._epochs: dict[str, tuple[int, float]] = {}
        """The highest epoch that a worker accepted of each sequence, and since when it is known."""
        self._over_s: dict[str, float] = {}
        """Instants at which sequences ended, by the names under which they were submitted."""
        self._lost_s: dict[tuple[WorkerId, RouterId], float] = {}
        """Instants at which workers heard that a router's session broke."""
        self._names: set[str] = set()
        self._waiting: dict[WorkerId, set[SeqKey]] = {}
        """Decode phases whose KV has not been requested yet."""

    @property
    def sequence_count(self) -> int:
        """Sequences that some worker was ever told of, each choice and each backup attempt counted."""
        return len(self._names)

    # --- what happens -------------------------------------------------------------------------------

    def heard(self, event: WorkerEvent) -> None:
        """Take note of what a worker hears: it remembers sequences that were cancelled before they began."""
        match event:
            case FromRouter(_, StartSequence(seq_id=seq_id) | CancelSequence(seq_id=seq_id)):
                self._names.add(seq_id)
            case PreparationBegan(key):
                self._names.add(key.seq_id)
            case _:
                pass

    def started(self, worker: ObservedWorker, router_id: RouterId, start: StartSequence) -> None:
        """Take note of a start, after the worker handled it."""
        key = SeqKey(start.seq_id, start.epoch)
        if key not in worker.core.live_keys or (worker.worker_id, key) in self._attempts:
            return
        attempt = self._attempts[worker.worker_id, key] = _Attempt(worker, router_id, start)
        self._look_at_deadline(attempt, key)
        if start.phase is Phase.DECODE:
            self._waiting.setdefault(worker.worker_id, set()).add(key)
        self._queues_are_bounded(worker)
        if start.epoch > self._epochs.get(key.seq_id, (-1, 0.0))[0]:
            self._epochs[key.seq_id] = (start.epoch, self._run.clock.now_s)
            self._look_at_others(key)

    def ended(self, seq_id: str) -> None:
        """The sequence's router is done with it."""
        self._over_s.setdefault(seq_id, self._run.clock.now_s)
        for (_, key), attempt in list(self._attempts.items()):
            if submitted_name(key.seq_id) == seq_id:
                self._look_later(attempt, key)

    def router_lost(self, worker: ObservedWorker, router_id: RouterId) -> None:
        self._lost_s[worker.worker_id, router_id] = self._run.clock.now_s

    def requested(self, worker: ObservedWorker, message: ReaderMessage) -> None:
        """Take note of a message to a KV owner."""
        if isinstance(message, KVRequest):
            self._waiting.get(worker.worker_id, set()).discard(SeqKey(message.seq_id, message.epoch))

    def said(self, worker: ObservedWorker, message: WorkerMessage) -> None:
        if isinstance(message, SequenceFailed) and message.reason is FailureReason.DEADLINE:
            self._run.counts["deadlines that fired at a worker"] += 1

    def planned(self, worker: ObservedWorker, plan: StepPlan) -> None:
        """Check that a step computes nothing that is late, over or replaced."""
        for item in plan.items:
            key = item.key
            self._computed.add((worker.worker_id, key))
            attempt = self._attempts.get((worker.worker_id, key))
            if attempt is None:
                continue
            late_s = worker.local_clock.now_s() - attempt.deadline_s
            if late_s > SLACK_S:
                raise Violation(
                    6, f"{worker.name} computes {key} {late_s:.3f} s after its deadline", seq_id=key.seq_id
                )
            self._is_still_wanted(attempt, key, "computes")

    # --- queues -------------------------------------------------------------------------------------

    def _queues_are_bounded(self, worker: ObservedWorker) -> None:
        """Check invariant 6: those that wait for a seat, and those that wait for blocks, are bounded. Who was
        preempted waits again, on top."""
        most, worker_id = self._scenario.engine.waiting_sequences_max, worker.worker_id
        fresh = [key for key in worker.core.waiting_keys if (worker_id, key) not in self._computed]
        self._run.counts["workers' queues full"] += len(fresh) == most
        if len(fresh) > most:
            raise Violation(6, f"{len(fresh)} sequences wait at {worker.name}, {most} at most")
        waiting = self._waiting.get(worker_id, set())
        if len(waiting) > most:
            waiting &= worker.core.live_keys
        if len(waiting) > most:
            raise Violation(
                6, f"{len(waiting)} decode phases wait for blocks of {worker.name}, {most} at most"
            )

    # --- deadlines ----------------------------------------------------------------------------------

    def _look_at_deadline(self, attempt: _Attempt, key: SeqKey) -> None:
        worker = attempt.worker
        at_s = worker.local_clock.virtual_s(attempt.deadline_s) + 2 * SLACK_S

        def look() -> None:
            late_s = worker.local_clock.now_s() - attempt.deadline_s
            if key not in worker.core.live_keys:
                return
            if late_s > SLACK_S:
                raise Violation(
                    6, f"{worker.name} holds {key} {late_s:.3f} s after its deadline", seq_id=key.seq_id
                )
            self._look_at_deadline(attempt, key)  # its clock stood still meanwhile

        self._run.clock.at(at_s, lambda: worker.post(look))

    # --- attempts that are over -----------------------------------------------------------------------

    def _look_at_others(self, key: SeqKey) -> None:
        """Look at the attempts that this one replaces."""
        for (_, other), attempt in list(self._attempts.items()):
            if other.seq_id == key.seq_id and other.epoch < key.epoch:
                self._look_later(attempt, other)

    def _look_later(self, attempt: _Attempt, key: SeqKey) -> None:
        """Check in a while that the attempt is over at its worker, whether or not it computes."""
        worker = attempt.worker

        def look() -> None:
            if worker.is_alive and key in worker.core.live_keys:
                self._is_still_wanted(attempt, key, "holds")
                self._look_later(attempt, key)

        if worker.is_alive and key in worker.core.live_keys:
            self._run.counts["attempts that were called off"] += 1
            self._run.clock.after(self._patience_s + LOOK_AGAIN_S, lambda: worker.post(look))

    @property
    def _patience_s(self) -> float:
        return 0.1 + 50 * self._scenario.network_latency_s

    def _is_still_wanted(self, attempt: _Attempt, key: SeqKey, what: str) -> None:
        """Check invariant 6: a worker hears within a bounded time that an attempt was given up, that its
        client has its answer or left, or that its router is gone."""
        since_s = self._over_s.get(submitted_name(key.seq_id))
        epoch, known_s = self._epochs.get(key.seq_id, (key.epoch, 0.0))
        if epoch > key.epoch:
            since_s = known_s if since_s is None else min(since_s, known_s)
        if since_s is None or not self._must_have_heard(attempt, key, since_s):
            return
        late_s = self._run.clock.now_s - since_s
        cause = f"epoch {epoch} is under way" if epoch > key.epoch else "it was over"
        raise Violation(
            6, f"{attempt.worker.name} {what} {key} {late_s:.2f} s after {cause}", seq_id=key.seq_id
        )

    def _must_have_heard(self, attempt: _Attempt, key: SeqKey, since_s: float) -> bool:
        """Whether nothing excuses the worker: no message is under way, and no session broke just now."""
        worker, now_s = attempt.worker, self._run.clock.now_s
        if now_s - max(since_s, worker.runs_since_s) <= self._patience_s:
            return False
        session = worker.router_session(attempt.router_id)
        if session is None:
            lost_s = max(since_s, self._lost_s.get((worker.worker_id, attempt.router_id), since_s))
            return now_s - lost_s > 1.02 * self._scenario.router_grace_s + self._patience_s
        if not session.is_open:
            return False  # the worker has not heard of the break
        return not any(
            isinstance(message, CancelSequence) and message.seq_id == key.seq_id
            for message in session.under_way_to(1)
        )
