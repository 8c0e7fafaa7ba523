"""What the progress of a phase means to others: tokens for its router, blocks for its readers, and its
end."""

from baton.core.ids import SeqKey
from baton.core.messages import FailureReason, Phase, ResyncBlocks, RouterMessage, SequenceFailed, Task
from baton.core.sampling import FinishReason
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Progress, Sequence
from prefill_worker.handovers import Handovers, Tell
from worker.core_attempts import Attempt, Attempts
from worker.core_outputs import PromptLogprobs, embedding_output, prompt_logprobs_of, token_output
from worker.events import ToReader
from worker.outbox import Outbox
from worker.phase_clock import waits_for_store


class Phases:
    """The progress of one worker's live attempts."""

    def __init__(self, attempts: Attempts, scheduler: Scheduler, handovers: Handovers, out: Outbox) -> None:
        self._attempts = attempts
        self._scheduler = scheduler
        self._handovers = handovers
        self._out = out
        self._loading: list[Attempt] = []
        """Attempts for which the store is, or was, asked."""

    def watch(self, attempt: Attempt) -> None:
        """Follow an attempt that may wait for blocks of the store."""
        if attempt.sequence is not None and attempt.sequence.incoming is not None:
            self._loading.append(attempt)

    def look_at_loads(self, now_s: float) -> None:
        """Note who waits for the store from now on, at the end of every event."""
        if not self._loading:
            return
        for attempt in self._loading:
            assert attempt.sequence is not None
            attempt.clock.observe(is_blocked=waits_for_store(attempt.sequence, now_s), now_s=now_s)
        self._loading = [
            a for a in self._loading if a.sequence is not None and a.sequence.incoming is not None
        ]

    def prepared(self, message: RouterMessage, now_s: float) -> None:
        """Forget that an attempt is made ready, because its start or its cancel was handled or dropped."""
        if isinstance(message, ResyncBlocks):
            return
        key = SeqKey(message.seq_id, message.epoch)
        self._attempts.preparing.discard(key)
        if self._handovers.is_preparing(key):
            # The start opened no hand-over, as when it was dropped because its router is lost.
            self.tell_readers(self._handovers.close(key, "made ready and not started", now_s=now_s))

    def progressed(self, done: Progress, now_s: float, *, step_s: float) -> None:
        """Take in what a step that took `step_s` computed of an attempt."""
        attempt = self._attempts.get(done.sequence.key)
        assert attempt is not None, "cancelled sequences make no progress"
        attempt.clock.stepped(now_s - step_s)
        if attempt.start.task is Task.EMBED:
            self._on_embedded(attempt, done, now_s)
        elif attempt.start.phase is Phase.PREFILL:
            self._on_prefilled(attempt, done, now_s)
        elif done.tokens:
            self.emit(attempt, done, prompt_logprobs_of(attempt, done.sequence), now_s)

    def _on_embedded(self, attempt: Attempt, done: Progress, now_s: float) -> None:
        if done.sequence.computed_count < len(done.sequence.tokens):
            return
        self._end(attempt, done.sequence)
        if done.embedding:
            self._out.add_output(attempt.router_id, embedding_output(done, attempt.clock.timings(now_s)))
        else:
            self.fail(attempt, FailureReason.INTERNAL, "the engine returned no embedding")

    def _on_prefilled(self, attempt: Attempt, done: Progress, now_s: float) -> None:
        seq = done.sequence
        if not done.tokens:
            self.announce(seq, now_s)
            return
        prompt_logprobs = prompt_logprobs_of(attempt, seq)
        if self.emit(attempt, done, prompt_logprobs, now_s) is None:
            answers = self._handovers.complete(
                seq.key,
                seq.block_ids,
                first_token=done.tokens[0],
                first_logprobs=done.logprobs[0] if done.logprobs else None,
                prompt_logprobs=prompt_logprobs,
                cached_token_count=seq.cached_token_count or 0,
                now_s=now_s,
            )
            self.tell_readers(answers)
            self._end(attempt, seq)  # answered: from here on the lease book holds the blocks
        else:
            self.tell_readers(self._handovers.close(seq.key, "finished with its first token", now_s=now_s))

    def emit(
        self, attempt: Attempt, done: Progress, prompt_logprobs: PromptLogprobs, now_s: float
    ) -> FinishReason | None:
        """Send the sequence's newest tokens to its router, and end the sequence if they are the last."""
        self._out.add_output(attempt.router_id, token_output(attempt, done, prompt_logprobs, now_s))
        attempt.has_output = True
        if done.sequence.finish is not None:
            self._end(attempt, done.sequence)
        return done.sequence.finish

    def _end(self, attempt: Attempt, seq: Sequence) -> None:
        self._attempts.pop(attempt.key)
        self._scheduler.remove(seq)

    def announce(self, seq: Sequence, now_s: float) -> None:
        committed = seq.block_ids[: seq.committed_count]
        self.tell_readers(self._handovers.committed(seq.key, committed, now_s=now_s))

    def tell_readers(self, answers: list[Tell]) -> None:
        for tell in answers:
            self._out.add(ToReader(tell.reader, tell.message))

    def fail(self, attempt: Attempt, reason: FailureReason, message: str) -> None:
        self._out.tell(attempt.router_id, SequenceFailed(*attempt.key, reason, message))
