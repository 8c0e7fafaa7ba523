"""The life of one sequence: which worker runs which leg, and which tokens the client has.

Pure: what happened goes in, actions come out. Placement is decided elsewhere and told to `start`.
`legs` is the truth about who holds something for the sequence right now; the caller's accounts follow
it. Every loss raises the epoch at once, so that whatever the old attempt still says is stale.
"""

from collections.abc import Mapping, Set
from enum import StrEnum, auto

import msgspec

from baton.core.ids import BlockHash, WorkerId
from baton.core.lifecycle import Lifecycle
from baton.core.messages import (
    CancelSequence,
    FailureReason,
    Leg,
    PeerRef,
    RefusalReason,
    SequenceFailed,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StartSequence,
    Task,
)
from baton.core.sampling import FinishReason, SamplingParams, finish_after
from baton.core.steps import TokenLogprobs
from router.events import (
    Deliver,
    Failed,
    FailureKind,
    Finished,
    Note,
    RetryCause,
    RouterAction,
    Submit,
    ToWorker,
)

HELD_TOKENS_MAX = 1024
"""Tokens kept of one sequence while earlier ones are missing; more, and the attempt is given up."""

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 2.0


class Phase(StrEnum):
    QUEUED = auto()
    PREFILLING = auto()
    """All legs were told to start."""
    HANDING_OVER = auto()
    """The prefill worker has sampled its token; the decode worker has not joined."""
    DECODING = auto()
    """One worker has all it needs. Others taking part no longer matter."""
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


_ENDS = frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED})
LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.PREFILLING, Phase.FAILED, Phase.CANCELLED}),
    # QUEUED, here and below: the attempt was lost or refused.
    # DECODING: the decode worker was heard before the prefill worker, or there is only one worker.
    Phase.PREFILLING: frozenset({Phase.HANDING_OVER, Phase.DECODING, Phase.QUEUED}) | _ENDS,
    Phase.HANDING_OVER: frozenset({Phase.DECODING, Phase.QUEUED}) | _ENDS,
    Phase.DECODING: frozenset({Phase.QUEUED}) | _ENDS,
    Phase.DONE: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}


class Flow:
    def __init__(
        self, submit: Submit, *, arrival: int, attempts_max: int, queue_wait_s: float, now_s: float
    ) -> None:
        self.submit = submit
        self.arrival = arrival
        self.epoch = 0
        self.legs: Mapping[WorkerId, Leg] = {}
        """Who holds something for the current attempt."""
        self.avoid: frozenset[WorkerId] = frozenset()
        """Workers to be placed on last."""
        self.was_placed = False
        self._fingerprint = ""
        self.rest_until_s = now_s
        """Not to be placed before: earlier attempts were refused or lost."""
        self.generated: list[int] = []
        """The tokens the client has."""
        self._life: Lifecycle[Phase] = Lifecycle(Phase.QUEUED, LEGAL, now_s=now_s)
        self._attempts_max = attempts_max
        self._queue_wait_s = queue_wait_s
        self._submitted_at_s = now_s
        self._waiting_since_s = now_s
        self._part: Mapping[WorkerId, Leg] = {}
        """Who took part in the current attempt, whether or not it still holds anything."""
        self._held: dict[int, int] = {}
        self._held_logprobs: dict[int, TokenLogprobs] = {}
        """Of tokens that the client does not have yet."""
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._has_prompt_logprobs = False
        """The client has them: a later attempt does not compute them again."""
        self._embedding: tuple[float, ...] = ()
        self._ends: tuple[int, FinishReason] | None = None
        """(token count, reason), as a worker said it."""
        self._has_joined = False
        self._turned_away = ""
        """Why the source refused the decode worker, while the source itself has not said anything."""
        self._losses = 0
        self._refusals = 0
        self._cached_token_count: int | None = None

    @property
    def phase(self) -> Phase:
        return self._life.phase

    @property
    def is_over(self) -> bool:
        return self._life.is_terminal

    @property
    def is_prefilled(self) -> bool:
        return self.phase in (Phase.HANDING_OVER, Phase.DECODING)

    @property
    def tokens(self) -> tuple[int, ...]:
        """What an attempt started now has to compute: the prompt, then what the client has."""
        prompt = self.submit.prompt
        return (*prompt, *self.generated) if self.generated else prompt

    @property
    def token_count(self) -> int:
        return len(self.submit.prompt) + len(self.generated)

    @property
    def fingerprint(self) -> str:
        """Of the workers that computed the tokens so far; "": there are none."""
        return self._fingerprint if self.generated else ""

    @property
    def is_last_token(self) -> bool:
        """Whatever comes next is all there is: no decode leg."""
        is_embedding = self.submit.task is Task.EMBED
        return is_embedding or self.submit.sampling.max_tokens - len(self.generated) <= 1

    @property
    def _sampling(self) -> SamplingParams:
        sampling = self.submit.sampling
        if sampling.prompt_logprobs is None or not self._has_prompt_logprobs:
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=None)

    @property
    def _cached_tokens(self) -> int:
        return min(self._cached_token_count or 0, len(self.submit.prompt))

    @property
    def _wait_ends_s(self) -> float:
        return self._waiting_since_s + self._queue_wait_s

    def next_tick_s(self, now_s: float) -> float:
        """When `on_tick` wants to be called, or when the rest of a queued sequence is over."""
        if self.phase is not Phase.QUEUED:
            return self.submit.deadline_s
        ends_s = min(self.submit.deadline_s, self._wait_ends_s)
        return min(ends_s, self.rest_until_s) if self.rest_until_s > now_s else ends_s

    # --- what the router decides ------------------------------------------------------------------

    def start(
        self,
        legs: Mapping[WorkerId, Leg],
        *,
        source: PeerRef | None,
        fingerprint: str,
        cache_root: BlockHash,
        because: str,
        is_fallback: bool,
        now_s: float,
    ) -> list[RouterAction]:
        """Begin an attempt: tell every leg's worker. `source` is the PREFILL leg's worker."""
        self._life.to(Phase.PREFILLING, now_s=now_s, cause=because)
        self.legs, self._part = legs, legs
        self.was_placed, self._fingerprint = True, fingerprint
        note = "fallback" if is_fallback else "placed"
        waited_s = now_s - self._waiting_since_s
        actions: list[RouterAction] = [self._note(note, because, tuple(legs), seconds=waited_s)]
        tokens, submit, sampling = self.tokens, self.submit, self._sampling
        for worker_id, leg in legs.items():
            message = StartSequence(
                seq_id=submit.seq_id,
                epoch=self.epoch,
                leg=leg,
                tokens=tokens,
                prompt_token_count=len(submit.prompt),
                sampling=sampling,
                cache_root=cache_root,
                time_left_s=max(0.0, submit.deadline_s - now_s),
                source=source if leg is Leg.DECODE else None,
                traceparent=submit.traceparent,
                task=submit.task,
                adapter=submit.adapter,
                priority=submit.priority,
                tpot_slo_s=submit.tpot_slo_s,
                fairness_key=submit.fairness_key,
            )
            actions.append(ToWorker(worker_id, message))
        return actions

    def refuse(
        self, kind: FailureKind, message: str, *, now_s: float, retry_after_s: float = 1.0
    ) -> list[RouterAction]:
        """End it, whatever it was doing."""
        actions = self._let_go()
        self._life.to(Phase.FAILED, now_s=now_s, cause=message)
        actions.append(Failed(self.submit.seq_id, kind, message, retry_after_s))
        return actions

    # --- what happens to it -----------------------------------------------------------------------

    def on_tick(self, *, now_s: float, retry_after_s: float, waits_for: str) -> list[RouterAction]:
        if self.submit.deadline_s <= now_s:
            return self.refuse(FailureKind.DEADLINE, "the request's time is up", now_s=now_s)
        if self.phase is Phase.QUEUED and self._wait_ends_s <= now_s:
            message = f"no place within {self._queue_wait_s:g} s: {waits_for}"
            return self.refuse(FailureKind.NO_CAPACITY, message, now_s=now_s, retry_after_s=retry_after_s)
        return []

    def on_client_gone(self, *, now_s: float) -> list[RouterAction]:
        actions = self._let_go()
        self._life.to(Phase.CANCELLED, now_s=now_s, cause="client gone")
        return actions

    def on_output(self, worker_id: WorkerId, output: SequenceOutput, *, now_s: float) -> list[RouterAction]:
        """Tokens may come twice (the decode worker repeats the first), from either worker first, and
        ahead of a missing one: the client gets each once, in order."""
        leg = self._part.get(worker_id)
        if leg is None or output.epoch != self.epoch:
            return []
        if self._cached_token_count is None and output.cached_token_count is not None:
            self._cached_token_count = output.cached_token_count
        first_index = len(self.generated)
        reason = self._accept(output)
        if len(self._held) > HELD_TOKENS_MAX:
            return self._lost(
                None, {worker_id}, RetryCause.TOKENS_MISSING, "earlier tokens are missing", now_s=now_s
            )
        if output.tokens:
            self._moved_on(leg, now_s=now_s)
        actions: list[RouterAction] = []
        if len(self.generated) > first_index:
            actions += self._delivered(worker_id, first_index, now_s=now_s)
        if reason is not None:
            has_ended = output.finish is not None and leg is not Leg.PREFILL
            actions += self._finish(reason, worker_id if has_ended else None, now_s=now_s)
        elif self._turned_away and output.tokens:
            cause = RetryCause.SOURCE_REFUSED
            actions += self._lost(None, {worker_id}, cause, self._turned_away, now_s=now_s)
        return actions

    def on_joined(self, worker_id: WorkerId, joined: SequenceJoined, *, now_s: float) -> list[RouterAction]:
        if joined.epoch != self.epoch or self.legs.get(worker_id) is not Leg.DECODE or self._has_joined:
            return []
        self._has_joined = True
        self._moved_on(Leg.DECODE, now_s=now_s)
        note = self._note(
            "joined",
            "all KV has arrived",
            tuple(self._part),
            seconds=joined.handover_s,
            bytes_moved=joined.transferred_bytes,
        )
        return [note]

    def on_refused(
        self, worker_id: WorkerId, refused: SequenceRefused, *, now_s: float
    ) -> list[RouterAction]:
        if refused.epoch != self.epoch or worker_id not in self.legs:
            return []
        because = f"{refused.reason}: {refused.message}" if refused.message else str(refused.reason)
        note = self._note("refused", because, (worker_id,))
        match refused.reason:
            case RefusalReason.TOO_LONG:
                self._holds_nothing(worker_id)
                return [note, *self.refuse(FailureKind.TOO_LONG, because, now_s=now_s)]
            case RefusalReason.UNSUPPORTED:
                self._holds_nothing(worker_id)
                return [note, *self.refuse(FailureKind.UNSUPPORTED, refused.message or because, now_s=now_s)]
            case RefusalReason.STALE_EPOCH:
                cause = RetryCause.STALE_EPOCH
                return [note, *self._lost(worker_id, {worker_id}, cause, because, now_s=now_s)]
            case RefusalReason.NO_ROOM | RefusalReason.DRAINING:
                # Not counted as a loss: what bounds it is the wait for a place, which goes on.
                self._refusals += 1
                return [note, *self._requeue(worker_id, {worker_id}, because, self._refusals, now_s=now_s)]

    def on_failed(self, worker_id: WorkerId, failed: SequenceFailed, *, now_s: float) -> list[RouterAction]:
        """Of a worker that no longer matters (prefill, once decode has everything): nothing happens."""
        if failed.epoch != self.epoch or worker_id not in self.legs:
            return []
        because = f"{failed.reason}: {failed.message}" if failed.message else str(failed.reason)
        if failed.reason is FailureReason.DEADLINE:
            self._holds_nothing(worker_id)
            return self.refuse(FailureKind.DEADLINE, because, now_s=now_s)
        if failed.reason is FailureReason.SOURCE_REFUSED and self._prefill_may_explain(worker_id):
            self._holds_nothing(worker_id)
            self._turned_away = because
            return []
        suspects, cause = self._suspects(worker_id, failed.reason), RetryCause(failed.reason)
        return self._lost(worker_id, suspects, cause, because, now_s=now_s)

    def on_worker_lost(self, worker_id: WorkerId, reason: str, *, now_s: float) -> list[RouterAction]:
        if worker_id not in self.legs:
            return []
        because = f"{worker_id} lost: {reason}"
        return self._lost(worker_id, {worker_id}, RetryCause.WORKER_LOST, because, now_s=now_s)

    # --- tokens -----------------------------------------------------------------------------------

    def _accept(self, output: SequenceOutput) -> FinishReason | None:
        """Take in the tokens that are new; returns why the sequence ends, if it does."""
        generated, held = self.generated, self._held
        end = output.first_index + len(output.tokens)
        if output.finish is not None:
            self._ends = (end, output.finish)
        self._keep_extras(output)
        for index, token in enumerate(output.tokens, output.first_index):
            if index >= len(generated):
                held.setdefault(index, token)
        sampling = self.submit.sampling
        while len(generated) in held:
            token = held.pop(len(generated))
            generated.append(token)
            if self._ends is not None and self._ends[0] == len(generated):
                return self._ends[1]
            if (reason := finish_after(sampling, token, len(generated))) is not None:
                return reason
        if self._ends is not None and self._ends[0] <= len(generated):
            return self._ends[1]
        return None

    def _keep_extras(self, output: SequenceOutput) -> None:
        """What comes beside the tokens, for those that asked."""
        known = len(self.generated)
        for index, entry in enumerate(output.logprobs, output.first_index):
            if index >= known:
                self._held_logprobs.setdefault(index, entry)
        if output.prompt_logprobs is not None and not self._has_prompt_logprobs:
            self._prompt_logprobs = output.prompt_logprobs
        if output.embedding:
            self._embedding = output.embedding

    def _moved_on(self, leg: Leg, *, now_s: float) -> None:
        self._refusals, self._waiting_since_s = 0, now_s
        if leg is Leg.PREFILL:
            if self.phase is Phase.PREFILLING:
                self._life.to(Phase.HANDING_OVER, now_s=now_s, cause="first token from prefill")
            return
        if self.phase is not Phase.DECODING:
            self._life.to(Phase.DECODING, now_s=now_s, cause=f"{leg} has everything")
            self.legs = {w: held for w, held in self.legs.items() if held is not Leg.PREFILL}

    def _delivered(self, worker_id: WorkerId, first_index: int, *, now_s: float) -> list[RouterAction]:
        tokens = tuple(self.generated[first_index:])
        logprobs, of_prompt = self._take_logprobs(first_index)
        actions: list[RouterAction] = [
            Deliver(self.submit.seq_id, first_index, tokens, self._cached_tokens, logprobs, of_prompt)
        ]
        if first_index == 0:
            waited_s = now_s - self._submitted_at_s
            leg = str(self._part[worker_id])
            actions.append(self._note("first_token", leg, (worker_id,), seconds=waited_s))
        return actions

    def _take_logprobs(
        self, first_index: int
    ) -> tuple[tuple[TokenLogprobs, ...], tuple[TokenLogprobs, ...] | None]:
        """Of the generated tokens from `first_index` on, and of the prompt if the client lacks them."""
        of_prompt, self._prompt_logprobs = self._prompt_logprobs, None
        if of_prompt is not None:
            self._has_prompt_logprobs = True
        held = self._held_logprobs
        if not held:
            return (), of_prompt
        indices = range(first_index, len(self.generated))
        return tuple(held.pop(index) for index in indices if index in held), of_prompt

    def _finish(self, reason: FinishReason, ended_at: WorkerId | None, *, now_s: float) -> list[RouterAction]:
        if ended_at is not None:
            self._holds_nothing(ended_at)
        actions = self._let_go()
        self._life.to(Phase.DONE, now_s=now_s, cause=str(reason))
        count, cached = len(self.generated), self._cached_tokens
        actions.append(Finished(self.submit.seq_id, reason, count, cached, self._embedding))
        return actions

    def _prefill_may_explain(self, worker_id: WorkerId) -> bool:
        """The source refuses the decode worker when it ended the sequence with its first token, or had no
        room for it. It tells us too, and its own word decides; it may be overtaken by the decode worker's."""
        others = (leg for w, leg in self.legs.items() if w != worker_id)
        return self.phase is Phase.PREFILLING and Leg.PREFILL in others

    # --- losing and letting go --------------------------------------------------------------------

    def _suspects(self, worker_id: WorkerId, reason: FailureReason) -> set[WorkerId]:
        """Whom to avoid: a decode worker may fail for its source's sake."""
        sources = {w for w, leg in self.legs.items() if leg is Leg.PREFILL and w != worker_id}
        match reason:
            case FailureReason.SOURCE_LOST | FailureReason.SOURCE_REFUSED:
                return sources or {worker_id}
            case FailureReason.TRANSFER:
                return sources | {worker_id}
            case FailureReason.INTERNAL | FailureReason.DRAINED | FailureReason.DEADLINE:
                return {worker_id}

    def _lost(
        self,
        worker_id: WorkerId | None,
        suspects: Set[WorkerId],
        cause: RetryCause,
        because: str,
        *,
        now_s: float,
    ) -> list[RouterAction]:
        self._losses += 1
        if self._losses >= self._attempts_max:
            self._holds_nothing(worker_id)
            message = f"lost {self._losses} times, at last: {because}"
            return self.refuse(FailureKind.ATTEMPTS, message, now_s=now_s)
        self._waiting_since_s = now_s
        note = self._note("retried", because, tuple(self._part), cause=cause)
        return [note, *self._requeue(worker_id, suspects, because, self._losses, now_s=now_s)]

    def _requeue(
        self,
        worker_id: WorkerId | None,
        suspects: Set[WorkerId],
        because: str,
        times: int,
        *,
        now_s: float,
    ) -> list[RouterAction]:
        """`worker_id` holds nothing; the others are cancelled. The first time it is placed anew at once,
        then after a rest that doubles."""
        self._holds_nothing(worker_id)
        actions = self._let_go()
        self._life.to(Phase.QUEUED, now_s=now_s, cause=because)
        self.epoch += 1
        self.avoid = frozenset(suspects)
        self._has_joined = False
        if times > 1:
            self.rest_until_s = now_s + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** (times - 2))
        return actions

    def _note(
        self,
        what: str,
        because: str,
        worker_ids: tuple[WorkerId, ...],
        *,
        seconds: float = 0.0,
        bytes_moved: int = 0,
        cause: RetryCause | None = None,
    ) -> Note:
        return Note(self.submit.seq_id, what, because, worker_ids, seconds, bytes_moved, cause)

    def _holds_nothing(self, worker_id: WorkerId | None) -> None:
        self.legs = {w: leg for w, leg in self.legs.items() if w != worker_id}

    def _let_go(self) -> list[RouterAction]:
        """Cancel the current attempt at every worker that holds something for it."""
        message = CancelSequence(self.submit.seq_id, self.epoch)
        actions: list[RouterAction] = [ToWorker(worker_id, message) for worker_id in self.legs]
        self.legs, self._part = {}, {}
        self._held.clear()
        self._held_logprobs.clear()
        self._ends, self._turned_away = None, ""
        return actions
