"""What routers are told of a sequence's progress."""

from baton.core.costs import PhaseTimings
from baton.core.messages import Phase, SequenceOutput
from baton.core.sampling import FinishReason
from baton.core.steps import TokenLogprobs
from engine.scheduling.sequence import Progress, Sequence
from worker.core_attempts import Attempt

PromptLogprobs = tuple[TokenLogprobs, ...] | None


def token_output(
    attempt: Attempt, done: Progress, prompt_logprobs: PromptLogprobs, now_s: float
) -> SequenceOutput:
    """The message with the sequence's newest tokens, `done.tokens`."""
    seq = done.sequence
    is_first = not attempt.has_output
    has_prefilled = attempt.start.phase is not Phase.DECODE
    return SequenceOutput(
        *seq.key,
        first_index=seq.generated_count - len(done.tokens),
        tokens=done.tokens,
        finish=seq.finish,
        cached_token_count=seq.cached_token_count if is_first else None,
        logprobs=done.logprobs,
        prompt_logprobs=prompt_logprobs,
        timings=attempt.clock.timings(now_s) if is_first and has_prefilled else None,
    )


def embedding_output(done: Progress, timings: PhaseTimings) -> SequenceOutput:
    return SequenceOutput(
        *done.sequence.key,
        first_index=0,
        tokens=(),
        finish=FinishReason.STOP,
        cached_token_count=done.sequence.cached_token_count,
        embedding=done.embedding,
        timings=timings,
    )


def prompt_logprobs_of(attempt: Attempt, seq: Sequence) -> PromptLogprobs:
    """The prompt's logprobs, which go with the attempt's first token if they were asked for."""
    if attempt.has_output or not seq.wants_prompt_logprobs:
        return None
    return tuple(seq.prompt_logprobs)
