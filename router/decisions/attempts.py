"""What follows from the values of one attempt: its start messages, its suspects and its back-off. Pure."""

from collections.abc import Mapping, Sequence

from baton.core.ids import BlockHash, SequenceId, WorkerId
from baton.core.messages import FailureReason, PeerRef, Phase, StartSequence
from baton.core.sampling import SamplingParams
from router.decisions.events import Submit, ToWorker

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
