"""The life of one sequence: which worker runs which phase, and which tokens the client has. Pure.

Events go in and actions come out. Placement is decided elsewhere and passed to `start`. `phases` names the
workers that hold something for the sequence right now, and the caller's accounts follow it. Every loss raises
the epoch at once, so late messages of the old attempt are recognised as stale.
"""

from collections.abc import Mapping, Sequence, Set
from math import inf

from baton.core.ids import BlockHash, SequenceId, WorkerId
from baton.core.lifecycle import Lifecycle
from baton.core.messages import (
    CancelSequence,
    FailureReason,
    PeerRef,
    Phase,
    RefusalReason,
    SequenceFailed,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    Task,
)
from baton.core.sampling import FinishReason
from router.decisions.attempts import (
    AttemptAccount,
    PlaceWait,
    backoff_s,
    prefill_is_beside,
    start_messages,
    suspects,
)
from router.decisions.events import (
    Deliver,
    Failed,
    FailureKind,
    Finished,
    Note,
    RetryCause,
    RouterAction,
    Served,
    Submit,
    ToWorker,
)
from router.decisions.latency_breakdown import LatencyClock, served_by
from router.decisions.prediction.forecast import Forecast
from router.decisions.request_state import LEGAL, RequestState
from router.decisions.retry_budgets import WindowBudget
from router.decisions.token_order import TokenOrder


class Flow:
    def __init__(
        self,
        submit: Submit,
        *,
        arrival: int,
        attempts_max: int,
        queue_wait_s: float,
        now_s: float,
        retries: WindowBudget | None = None,
        name: SequenceId | None = None,
    ) -> None:
        self.submit = submit
        self.name = name or submit.seq_id
        """The name that workers know the attempt by. Clients know the submitted one."""
        self.is_backup = False
        """True for a backup attempt beside another flow. Its failures are not reported to the client."""
        self.arrival = arrival
        self.epoch = 0
        self.phases: Mapping[WorkerId, Phase] = {}
        """The workers that hold something for the current attempt."""
        self.avoid: frozenset[WorkerId] = frozenset()
        """Workers of the last, failed attempt, which are used again only if no other is left."""
        self.was_placed = False
        self._fingerprint = ""
        self.rest_until_s = now_s
        """End of the back-off after refused or lost attempts. The sequence is not placed before."""
        self._order = TokenOrder(submit.sampling)
        self.generated = self._order.generated
        """The tokens the client has."""
        self.clock = LatencyClock(now_s)
        self._served = Served(WorkerId(""), WorkerId(""), None, None, 0)
        self._life: Lifecycle[RequestState] = Lifecycle(RequestState.QUEUED, LEGAL, now_s=now_s)
        self.placed_s = now_s
        """When the current attempt began."""
        self.hedge_at_s = inf
        """When a backup attempt is due if no token has come by then."""
        self.submitted_at_s = now_s
        self._wait = PlaceWait(queue_wait_s, now_s)
        self._participants: Mapping[WorkerId, Phase] = {}
        """All workers of the current attempt, including those that hold nothing for it any more."""
        self._has_joined = False
        self._decodes_at: WorkerId | None = None
        """The worker that decodes, once the client has two tokens. Its next tokens change no state."""
        self._source_refusal = ""
        """Why the KV source refused the decode worker, as long as the source itself has not reported a
        reason."""
        self._losses = AttemptAccount(attempts_max, retries)
        self.failure: FailureKind | None = None
        self._cached_token_count: int | None = None

    @property
    def state(self) -> RequestState:
        return self._life.state

    @property
    def arrived_s(self) -> float:
        """When the request came in."""
        return self.submitted_at_s if self.submit.arrived_s is None else self.submit.arrived_s

    def is_wait_over(self, now_s: float) -> bool:
        return self.state is RequestState.QUEUED and self._wait_ends_s <= now_s

    @property
    def is_over(self) -> bool:
        return self._life.is_terminal

    @property
    def is_prefilled(self) -> bool:
        return self.state in (RequestState.HANDING_OVER, RequestState.DECODING)

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that an attempt started now has to compute: the prompt and the tokens generated so
        far."""
        prompt = self.submit.prompt
        return (*prompt, *self.generated) if self.generated else prompt

    @property
    def token_count(self) -> int:
        return len(self.submit.prompt) + len(self.generated)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the workers that generated the tokens so far; empty if there are none."""
        return self._fingerprint if self.generated else ""

    @property
    def is_last_token(self) -> bool:
        """Whether the next token is the last one, so that there is no decode phase."""
        is_embedding = self.submit.task is Task.EMBED
        return is_embedding or self.submit.sampling.max_tokens - len(self.generated) <= 1

    @property
    def cached_tokens(self) -> int:
        return min(self._cached_token_count or 0, len(self.submit.prompt))

    @property
    def _wait_ends_s(self) -> float:
        return self._wait.ends_s(is_running=bool(self.generated))

    def next_tick_s(self, now_s: float) -> float:
        """Return when `on_tick` is due, or when the back-off of a queued sequence ends."""
        if self.state is RequestState.PREFILLING:
            return min(self.submit.deadline_s, max(now_s, self.hedge_at_s))
        if self.state is not RequestState.QUEUED:
            return self.submit.deadline_s
        ends_s = min(self.submit.deadline_s, self._wait_ends_s)
        return min(ends_s, self.rest_until_s) if self.rest_until_s > now_s else ends_s

    @property
    def served(self) -> Served:
        """The workers that served the sequence so far."""
        return self._served

    # --- decisions of the router ------------------------------------------------------------------

    def start(
        self,
        phases: Mapping[WorkerId, Phase],
        *,
        source: PeerRef | None,
        fingerprint: str,
        cache_root: BlockHash,
        reason: str,
        is_fallback: bool,
        now_s: float,
        forecast: Forecast | None = None,
    ) -> list[RouterAction]:
        """Begin an attempt at the workers of all phases. `source` is the prefill worker of a pair."""
        self._life.to(RequestState.PREFILLING, now_s=now_s, cause=reason)
        self.phases, self._participants = phases, phases
        self.was_placed, self._fingerprint = True, fingerprint
        self.clock.placed(now_s)
        is_begun = self.clock.has_first_token
        self._served = served_by(self._served, phases, forecast, now_s - self.arrived_s, is_begun=is_begun)
        note = "fallback" if is_fallback else "placed"
        waited_s = now_s - self._wait.since_s
        actions: list[RouterAction] = [self._note(note, reason, tuple(phases), seconds=waited_s)]
        actions += start_messages(
            self.submit,
            name=self.name,
            epoch=self.epoch,
            phases=phases,
            tokens=self.tokens,
            sampling=self._order.sampling,
            source=source,
            cache_root=cache_root,
            now_s=now_s,
        )
        return actions

    def refuse(
        self, kind: FailureKind, message: str, *, now_s: float, retry_after_s: float = 1.0
    ) -> list[RouterAction]:
        """End the sequence with a failure, whatever its state."""
        was_computing, actions = bool(self._participants), self._cancel_attempt()
        self.failure = kind
        self._life.to(RequestState.FAILED, now_s=now_s, cause=message)
        return [*actions, Failed(self.submit.seq_id, kind, message, retry_after_s, was_computing)]

    # --- events -----------------------------------------------------------------------

    def on_tick(self, *, now_s: float, retry_after_s: float, waits_for: str) -> list[RouterAction]:
        if self.submit.deadline_s <= now_s:
            return self.refuse(FailureKind.DEADLINE, "the request's deadline passed", now_s=now_s)
        if self.is_wait_over(now_s):
            message = self._wait.explain(waits_for)
            retry_after_s = self._wait.retry_after_s(retry_after_s)
            return self.refuse(FailureKind.NO_CAPACITY, message, now_s=now_s, retry_after_s=retry_after_s)
        return []

    def on_client_gone(self, *, now_s: float, is_answered: bool = False) -> list[RouterAction]:
        actions = self._cancel_attempt()
        end = RequestState.DONE if is_answered else RequestState.CANCELLED
        self._life.to(end, now_s=now_s, cause="answered" if is_answered else "client gone")
        return actions

    def on_next(self, worker_id: WorkerId, output: SequenceOutput, *, now_s: float) -> Deliver | None:
        """Do what `on_output` does, if the sequence decodes and the output is its next tokens and no more.
        Nothing changes and None is returned if there is more to it."""
        is_next = worker_id == self._decodes_at and output.epoch == self.epoch
        if not is_next or not self._order.accept_next(output):
            return None
        self._wait.since_s = now_s
        return Deliver(self.submit.seq_id, output.first_index, output.tokens, self.cached_tokens)

    def on_output(self, worker_id: WorkerId, output: SequenceOutput, *, now_s: float) -> list[RouterAction]:
        """Take in tokens from a worker. The client gets each token exactly once and in order.

        Tokens may be repeated (the decode worker repeats the first one), may come from either worker first,
        and may precede a missing one.
        """
        phase = self._participants.get(worker_id)
        if phase is None or output.epoch != self.epoch:
            return []
        if self._cached_token_count is None and output.cached_token_count is not None:
            self._cached_token_count = output.cached_token_count
        first_index = len(self.generated)
        if output.timings is not None:
            self.clock.on_timings(output.timings)
        reason = self._order.accept(output)
        if self._order.holds_too_many:
            return self._lost(
                None, {worker_id}, RetryCause.TOKENS_MISSING, "earlier tokens are missing", now_s=now_s
            )
        if output.tokens:
            self._advance(phase, now_s=now_s)
        actions: list[RouterAction] = []
        if len(self.generated) > first_index:
            actions += self._delivered(worker_id, first_index, now_s=now_s)
            if first_index and phase is not Phase.PREFILL:
                self._decodes_at = worker_id
        if reason is not None:
            has_ended = output.finish is not None and phase is not Phase.PREFILL
            actions += self._finish(reason, worker_id if has_ended else None, now_s=now_s)
        elif self._source_refusal and output.tokens:
            cause = RetryCause.SOURCE_REFUSED
            actions += self._lost(None, {worker_id}, cause, self._source_refusal, now_s=now_s)
        return actions

    def on_joined(self, worker_id: WorkerId, joined: SequenceJoined, *, now_s: float) -> list[RouterAction]:
        if joined.epoch != self.epoch or self.phases.get(worker_id) is not Phase.DECODE or self._has_joined:
            return []
        self._has_joined = True
        self._advance(Phase.DECODE, now_s=now_s)
        note = self._note(
            "joined",
            "all KV has arrived",
            tuple(self._participants),
            seconds=joined.handover_s,
            bytes_moved=joined.transferred_bytes,
        )
        return [note]

    def on_refused(
        self, worker_id: WorkerId, refused: SequenceRefused, *, now_s: float
    ) -> list[RouterAction]:
        if refused.epoch != self.epoch or worker_id not in self.phases:
            return []
        reason = f"{refused.reason}: {refused.message}" if refused.message else str(refused.reason)
        note = self._note("refused", reason, (worker_id,))
        match refused.reason:
            case RefusalReason.TOO_LONG | RefusalReason.UNSUPPORTED if not self.generated:
                self._forget_holder(worker_id)
                kind = FailureKind(refused.reason)
                message = refused.message if kind is FailureKind.UNSUPPORTED else ""
                return [note, *self.refuse(kind, message or reason, now_s=now_s)]
            case RefusalReason.STALE_EPOCH:
                cause = RetryCause.STALE_EPOCH
                return [note, *self._lost(worker_id, {worker_id}, cause, reason, now_s=now_s)]
            case RefusalReason.TOO_LONG | RefusalReason.UNSUPPORTED:
                # Another worker served the sequence before, so it is this worker that lacks something.
                self._wait.is_displaced = False
                self._wait.refusals += 1
            case RefusalReason.NO_ROOM | RefusalReason.BUSY:
                self._wait.refusals += 1
            case RefusalReason.DRAINING:
                pass  # the router knows it now, so the sequence need not rest
        self._wait.last_refusal = f"{worker_id} refused it, {reason}"
        # A refusal is not counted as a loss. It is bounded by the wait for a place, which goes on.
        return [note, *self._requeue(worker_id, {worker_id}, reason, self._wait.refusals, now_s=now_s)]

    def on_failed(
        self, worker_id: WorkerId, failed: SequenceFailed, *, now_s: float, is_planned: bool = False
    ) -> list[RouterAction]:
        """Handle a failed phase. The failure of a prefill worker is ignored once decode has all it needs.

        `is_planned`: it failed because its KV source is draining.
        """
        if failed.epoch != self.epoch or worker_id not in self.phases:
            return []
        reason = f"{failed.reason}: {failed.message}" if failed.message else str(failed.reason)
        if failed.reason is FailureReason.DEADLINE:
            self._forget_holder(worker_id)
            return self.refuse(FailureKind.DEADLINE, reason, now_s=now_s)
        may_explain = self.state is RequestState.PREFILLING and prefill_is_beside(worker_id, self.phases)
        if failed.reason is FailureReason.SOURCE_REFUSED and may_explain:
            self._forget_holder(worker_id)
            self._source_refusal = reason
            return []
        cause = RetryCause.DRAINED if is_planned else RetryCause(failed.reason)
        suspected = suspects(self.phases, worker_id, failed.reason)
        return self._lost(worker_id, suspected, cause, reason, now_s=now_s)

    def on_worker_lost(
        self, worker_id: WorkerId, reason: str, *, now_s: float, is_planned: bool = False
    ) -> list[RouterAction]:
        """Handle the end of a worker's session. `is_planned`: the worker was draining."""
        if worker_id not in self.phases:
            return []
        cause = RetryCause.DRAINED if is_planned else RetryCause.WORKER_LOST
        return self._lost(worker_id, {worker_id}, cause, f"{worker_id} lost: {reason}", now_s=now_s)

    # --- backup attempts and migration --------------------------------------------------------------

    def make_backup(self, name: SequenceId, *, now_s: float) -> "Flow":
        """Return a backup attempt, while this one has produced no token. A lost backup is not retried."""
        assert not self.generated
        backup = Flow(
            self.submit,
            arrival=self.arrival,
            attempts_max=self._losses.attempts_max,
            queue_wait_s=self._wait.limit_s,
            now_s=now_s,
            retries=self._losses.budget,
            name=name,
        )
        backup.is_backup = True
        backup._losses.count = self._losses.count
        backup.submitted_at_s = self.submitted_at_s
        backup.clock = self.clock.fork()
        backup.clock.lost(now_s)
        backup._served = self._served
        backup.avoid = frozenset(self.phases)
        return backup

    def become_primary(self) -> None:
        """Let this attempt serve the client from now on."""
        self.is_backup = False

    def migrate(self, worker_id: WorkerId, why: str, *, now_s: float) -> list[RouterAction]:
        """Leave a worker that is draining or parked. Nothing is counted or charged, since the cluster chose
        it. The caller begins the next attempt in the same event."""
        reason = f"{worker_id} is {why}"
        note = self._note("migrated", reason, tuple(self._participants))
        return [note, *self._displace(None, {worker_id}, reason, now_s=now_s)]

    # --- tokens -----------------------------------------------------------------------------------

    def _advance(self, phase: Phase, *, now_s: float) -> None:
        self._wait.got_on(now_s)
        if phase is Phase.PREFILL:
            if self.state is RequestState.PREFILLING:
                self._life.to(RequestState.HANDING_OVER, now_s=now_s, cause="first token from prefill")
            return
        if self.state is not RequestState.DECODING:
            self._life.to(RequestState.DECODING, now_s=now_s, cause=f"{phase} has everything")
            if phase is Phase.DECODE:
                self.clock.decodes(now_s)
            self.phases = {w: held for w, held in self.phases.items() if held is not Phase.PREFILL}

    def _delivered(self, worker_id: WorkerId, first_index: int, *, now_s: float) -> list[RouterAction]:
        tokens = tuple(self.generated[first_index:])
        self.clock.delivered(len(self.generated), now_s)
        extras = self._order.take_extras(first_index)
        actions: list[RouterAction] = [
            Deliver(self.submit.seq_id, first_index, tokens, self.cached_tokens, *extras)
        ]
        if first_index == 0:
            waited_s = now_s - self.submitted_at_s
            phase = str(self._participants[worker_id])
            actions.append(self._note("first_token", phase, (worker_id,), seconds=waited_s))
        return actions

    def _finish(self, reason: FinishReason, ended_at: WorkerId | None, *, now_s: float) -> list[RouterAction]:
        if ended_at is not None:
            self._forget_holder(ended_at)
        actions = self._cancel_attempt()
        self._life.to(RequestState.DONE, now_s=now_s, cause=str(reason))
        self.clock.delivered(len(self.generated), now_s)
        finished = Finished(
            self.submit.seq_id,
            reason,
            len(self.generated),
            self.cached_tokens,
            self._order.embedding,
            self.clock.latency_breakdown(),
            self._served,
        )
        return [*actions, finished]

    # --- losses and cancellation --------------------------------------------------------------------

    def _lost(
        self,
        worker_id: WorkerId | None,
        avoid: Set[WorkerId],
        cause: RetryCause,
        reason: str,
        *,
        now_s: float,
    ) -> list[RouterAction]:
        note = self._note("retried", reason, tuple(self._participants), cause=cause)
        if cause is RetryCause.DRAINED:
            actions = self._displace(worker_id, avoid, reason, now_s=now_s)
            return actions if self.is_backup else [note, *actions]
        # A stream that has begun must go on, since no HTTP status is left that could carry a Retry-After.
        must_go_on, is_free = bool(self.generated), self.is_backup
        end = self._losses.lost(cause, reason, must_go_on=must_go_on, is_free=is_free, now_s=now_s)
        if end is not None:
            self._forget_holder(worker_id)
            return self.refuse(end.kind, end.message, now_s=now_s, retry_after_s=end.retry_after_s)
        actions = self._requeue(worker_id, avoid, reason, self._losses.count, now_s=now_s)
        if self.is_backup:
            return actions
        self._wait.begin(now_s)
        return [note, *actions]

    def _displace(
        self, worker_id: WorkerId | None, avoid: Set[WorkerId], reason: str, *, now_s: float
    ) -> list[RouterAction]:
        """Queue the sequence again because the cluster takes its worker away, which is not counted."""
        self._wait.begin(now_s)
        self._wait.is_displaced = True
        return self._requeue(worker_id, avoid, reason, 0, now_s=now_s)

    def _requeue(
        self, worker_id: WorkerId | None, avoid: Set[WorkerId], reason: str, times: int, *, now_s: float
    ) -> list[RouterAction]:
        """Cancel the attempt and queue the sequence again. `worker_id` holds nothing for it any more.

        `times` says how often this happened already, see `backoff_s`.
        """
        self._forget_holder(worker_id)
        actions = self._cancel_attempt()
        self._life.to(RequestState.QUEUED, now_s=now_s, cause=reason)
        self.epoch += 1
        self.clock.lost(now_s)
        self.avoid = frozenset(avoid)
        self._has_joined = False
        if (rest_s := backoff_s(times)) > 0:
            self.rest_until_s = now_s + rest_s
        return actions

    def _note(
        self,
        what: str,
        reason: str,
        worker_ids: tuple[WorkerId, ...],
        *,
        seconds: float = 0.0,
        bytes_moved: int = 0,
        cause: RetryCause | None = None,
    ) -> Note:
        return Note(self.submit.seq_id, what, reason, worker_ids, seconds, bytes_moved, cause)

    def _forget_holder(self, worker_id: WorkerId | None) -> None:
        self.phases = {w: phase for w, phase in self.phases.items() if w != worker_id}

    def _cancel_attempt(self) -> list[RouterAction]:
        """Cancel the current attempt at every worker that holds something for it."""
        message = CancelSequence(self.name, self.epoch)
        actions: list[RouterAction] = [ToWorker(worker_id, message) for worker_id in self.phases]
        self.phases, self._participants = {}, {}
        self._order.attempt_over()
        self._source_refusal, self._decodes_at = "", None
        return actions
