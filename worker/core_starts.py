"""What a start message asks for: whether it may run here, and as which sequence."""

import msgspec

from baton.config import GRAMMAR_TIMES
from baton.core.ids import SeqKey
from baton.core.messages import (
    FailureReason,
    Phase,
    RefusalReason,
    SequenceFailed,
    SequenceRefused,
    StartSequence,
    Task,
)
from engine.scheduling.sequence import Sequence


def unfit(start: StartSequence, *, tokens_max: int) -> SequenceRefused | SequenceFailed | None:
    """Why this worker can never run it; None if it can. `tokens_max` is the limit of one sequence."""
    key = (start.seq_id, start.epoch)
    if not start.tokens or (start.phase is Phase.DECODE and start.source is None):
        return SequenceFailed(*key, FailureReason.INTERNAL, "no tokens, or no source to pull from")
    is_embedding = start.task is Task.EMBED
    if is_embedding and start.phase is not Phase.AGGREGATED:
        return SequenceFailed(*key, FailureReason.INTERNAL, f"an embedding has no {start.phase} phase")
    if len(start.tokens) + (0 if is_embedding else 1) > tokens_max:
        more = "" if is_embedding else " and one more"
        reason = f"{len(start.tokens)} tokens{more} do not fit {tokens_max}"
        return SequenceRefused(*key, RefusalReason.TOO_LONG, reason)
    return None


def closed_by(*, is_draining: bool, is_parked: bool) -> tuple[RefusalReason, str] | None:
    """Why a worker takes no new sequences at all, for routers and for people; None if it does."""
    if is_draining:
        return RefusalReason.DRAINING, "the worker is leaving"
    if is_parked:
        return RefusalReason.BUSY, "no expert rank has the experts that it needs"
    return None


def refusal_of(
    start: StartSequence,
    *,
    closed: tuple[RefusalReason, str] | None,
    waiting: int | None,
    waiting_max: int,
    tokens_max: int,
) -> SequenceRefused | SequenceFailed | None:
    """Why this worker does not run it now; None if it does. closed: see `closed_by`. `waiting` sequences
    stand before it, if it has to wait for a seat."""
    key = (start.seq_id, start.epoch)
    if closed is not None:
        return SequenceRefused(*key, *closed)
    if (never := unfit(start, tokens_max=tokens_max)) is not None:
        return never
    if waiting is not None and waiting >= waiting_max:
        return SequenceRefused(*key, RefusalReason.NO_ROOM, f"{waiting_max} sequences are waiting")
    return None


def preparation_s(start: StartSequence, prepare_s: float) -> float:
    """Return the longest time in which the sequence's grammar and adapter are made ready."""
    if start.sampling.grammar is not None:
        return GRAMMAR_TIMES * prepare_s
    return prepare_s if start.adapter is not None else 0.0


def sequence_of(start: StartSequence, tokens: list[int], *, block_tokens: int, tokens_max: int) -> Sequence:
    """The sequence of a start message. `tokens` are those of the start, and what is known beyond them."""
    # A client that has tokens already got the prompt's logprobs with the first of them.
    generates = start.phase is not Phase.DECODE and start.task is Task.GENERATE
    wants_prompt = start.sampling.prompt_logprobs is not None and start.generated_count == 0 and generates
    sampling = start.sampling
    if not wants_prompt and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return Sequence(
        key=SeqKey(start.seq_id, start.epoch),
        phase=start.phase,
        tokens=tokens,
        prompt_token_count=start.prompt_token_count,
        sampling=sampling,
        cache_root=start.cache_root,
        block_tokens=block_tokens,
        tokens_max=tokens_max,
        task=start.task,
        adapter="" if start.adapter is None else start.adapter.key,
        wants_prompt_logprobs=wants_prompt,
        priority=start.priority,
        fairness_key=start.fairness_key,
        tpot_slo_s=start.tpot_slo_s,
    )
