"""The attempts of one sequence: start messages, suspects and back-off, and how many may be lost. Pure."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from baton.core.ids import BlockHash, SequenceId, WorkerId
from baton.core.messages import STILL_COMPILED, FailureReason, PeerRef, Phase, StartSequence
from baton.core.sampling import SamplingParams
from router.decisions.events import FailureKind, RetryCause, Submit, ToWorker
from router.decisions.retry_budgets import WindowBudget

NOT_BUDGETED = frozenset({RetryCause.WORKER_LOST, RetryCause.SOURCE_LOST})
"""Causes whose first loss does not use up the retry budget, since a lost worker loses all its sequences at
once. `RetryCause.DRAINED` is never charged."""
COMPILE_RETRY_S = 5.0
"""When a client comes back whose grammar is still being compiled: what was compiled is kept."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 2.0


def start_messages(
    submit: Submit,
    *,
    name: SequenceId,
    epoch: int,
    phases: Mapping[WorkerId, Phase],
    tokens: Sequence[int],
    sampling: SamplingParams,
    source: PeerRef | None,
    cache_root: BlockHash,
    now_s: float,
) -> list[ToWorker]:
    """Return the message that starts the attempt, for each worker. `source` is the prefill worker of a
    pair."""
    return [
        ToWorker(
            worker_id,
            StartSequence(
                seq_id=name,
                epoch=epoch,
                phase=phase,
                tokens=tokens,
                prompt_token_count=len(submit.prompt),
                sampling=sampling,
                cache_root=cache_root,
                time_left_s=max(0.0, submit.deadline_s - now_s),
                source=source if phase is Phase.DECODE else None,
                traceparent=submit.traceparent,
                task=submit.task,
                adapter=submit.adapter,
                priority=submit.priority,
                tpot_slo_s=submit.tpot_slo_s,
                fairness_key=submit.fairness_key,
            ),
        )
        for worker_id, phase in phases.items()
    ]


def prefill_is_beside(worker_id: WorkerId, phases: Mapping[WorkerId, Phase]) -> bool:
    """Return whether another worker prefills, whose own report may explain why it refused its KV to this one.

    It refuses if the sequence ended with its first token, or if it had no room. Its own report decides, and
    this worker's message may overtake it.
    """
    return any(phase is Phase.PREFILL for worker, phase in phases.items() if worker != worker_id)


def suspects(phases: Mapping[WorkerId, Phase], worker_id: WorkerId, reason: FailureReason) -> set[WorkerId]:
    """Return the workers that the next attempt avoids. A decode worker may fail because of its KV source."""
    sources = {w for w, phase in phases.items() if phase is Phase.PREFILL and w != worker_id}
    match reason:
        case FailureReason.SOURCE_LOST | FailureReason.SOURCE_REFUSED:
            return sources or {worker_id}
        case FailureReason.TRANSFER:
            return sources | {worker_id}
        case FailureReason.INTERNAL | FailureReason.DRAINED | FailureReason.DEADLINE:
            return {worker_id}


def backoff_s(times: int) -> float:
    """Return how long a sequence rests that was lost or refused `times` times. The first time it does not."""
    return 0.0 if times <= 1 else min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** (times - 2))


class PlaceWait:
    """The wait of one sequence for a place. It begins with the request, and anew whenever the sequence got on
    or was lost, but not when a worker refuses it."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s, self.since_s = limit_s, now_s
        self.refusals = 0
        """Refusals since the sequence got on last."""
        self.last_refusal = ""
        """The worker that refused the sequence last during this wait, and its reason."""
        self.is_displaced = False
        """True while the sequence looks for a place because the cluster took its worker away."""

    def begin(self, now_s: float) -> None:
        self.since_s, self.last_refusal = now_s, ""

    def got_on(self, now_s: float) -> None:
        self.begin(now_s)
        self.refusals, self.is_displaced = 0, False

    def ends_s(self, *, is_running: bool) -> float:
        """Return when the wait is over. A running stream that was displaced waits until its deadline."""
        return inf if self.is_displaced and is_running else self.since_s + self.limit_s

    @property
    def is_for_compiler(self) -> bool:
        """Whether the worker that was asked last had not compiled the sequence's grammar yet."""
        return STILL_COMPILED in self.last_refusal

    def retry_after_s(self, hint_s: float) -> float:
        """Return the client's Retry-After. `hint_s` follows from the queue, whose drain rate says nothing of
        when a grammar will be ready."""
        return COMPILE_RETRY_S if self.is_for_compiler else hint_s

    def explain(self, waits_for: str) -> str:
        """Say why no worker took the sequence. `waits_for` holds if none was asked."""
        if self.is_for_compiler:
            return f"{STILL_COMPILED}, and was not ready within {self.limit_s:g} s: {self.last_refusal}"
        reason = self.last_refusal or waits_for
        return f"no worker could take the request within {self.limit_s:g} s: {reason}"


class AttemptsOver(NamedTuple):
    """Why a sequence is not tried again."""

    kind: FailureKind
    message: str
    retry_after_s: float


class AttemptAccount:
    """The lost attempts of one sequence. Refusals and migrations are not among them."""

    def __init__(self, attempts_max: int, budget: WindowBudget | None) -> None:
        self.attempts_max, self.budget = attempts_max, budget
        self.count = 0

    def lost(
        self, cause: RetryCause, reason: str, *, must_go_on: bool, is_free: bool, now_s: float
    ) -> AttemptsOver | None:
        """Count a lost attempt; None if the sequence may be tried again.

        `must_go_on`: an empty budget does not end the sequence. `is_free`: nothing is charged to the budget.
        """
        self.count += 1
        if self.count >= self.attempts_max:
            message = f"{self.count} attempts were lost, the last one because: {reason}"
            return AttemptsOver(FailureKind.ATTEMPTS, message, 1.0)
        is_charged = (cause not in NOT_BUDGETED or self.count > 1) and not is_free
        if not is_charged or self.budget is None or self.budget.take(now_s, must=must_go_on):
            return None
        message = f"the retry budget (router.retry_share) is used up, and this attempt failed: {reason}"
        return AttemptsOver(FailureKind.RETRIES_SPENT, message, self.budget.retry_after_s(now_s))
