"""What each sequence gets from its router, token by token, compared with the run that nothing disturbs."""

from baton.core.messages import StartSequence, Task
from router.decisions.events import Deliver, Failed, FailureKind, Finished, Note, Submit
from simulator.faults.client import Ending, RequestKind, SimClient, SimSequence
from simulator.faults.model import Expected, Model, fake_logprob
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import Scenario


class SequenceChecks:
    """The checks of all sequences of a run, whatever router has them."""

    def __init__(
        self, run: RunContext, clients: dict[str, SimClient], scenario: Scenario, model: Model
    ) -> None:
        self._run, self._clients, self._scenario, self._model = run, clients, scenario, model
        self.by_id: dict[str, SimSequence] = {}

    def submitted(self, submit: Submit) -> SimSequence:
        """Take note of a sequence, and check that it is what its client asked for."""
        client = self._clients[submit.request_id]
        if submit.seq_id in self.by_id:
            raise Violation(1, f"{submit.seq_id} is submitted twice", seq_id=submit.seq_id)
        self._is_as_asked(client, submit)
        expected = Expected(
            submit.prompt,
            submit.sampling,
            client.owner,
            context_max=self._scenario.context_max,
            loops=client.loops,
            task=submit.task,
        )
        self._model.expected[submit.seq_id] = expected
        sequence = SimSequence(client, submit, expected, self._run.clock.now_s)
        self.by_id[submit.seq_id] = sequence
        client.sequences.append(sequence)
        self._run.counts["sequences with an adapter"] += submit.adapter is not None
        return sequence

    def _is_as_asked(self, client: SimClient, submit: Submit) -> None:
        tokens = tuple(submit.prompt)
        is_part = client.kind is RequestKind.BEAM
        if not any(tokens[: len(p)] == p if is_part else tokens == p for p in client.prompts):
            raise Violation(2, f"{submit.seq_id} has a prompt of {tokens}", seq_id=submit.seq_id)
        if submit.tenant != client.tenant or submit.adapter != client.adapter:
            raise Violation(7, f"{submit} of tenant {client.tenant}", seq_id=submit.seq_id)
        if (submit.task is Task.EMBED) is not (client.kind is RequestKind.EMBEDDING):
            raise Violation(2, f"{submit.seq_id} is to do {submit.task}", seq_id=submit.seq_id)

    def cancelled(self, seq_id: str) -> bool:
        """Take note of a cancellation. Returns whether a stop string may be the reason."""
        sequence = self.by_id[seq_id]
        if sequence.ending is not None:
            return False
        self._run.counts[f"left while {sequence.state}"] += 1
        self._ended(sequence, Ending.GONE)
        return sequence.client.ending is None and bool(sequence.received)

    def started(self, start: StartSequence) -> None:
        """Take note of an attempt. A higher epoch replaces the one before it."""
        sequence = self.by_id.get(start.seq_id)
        if sequence is not None and start.epoch > sequence.epoch:
            sequence.epoch, sequence.epoch_s = start.epoch, self._run.clock.now_s

    def router_died(self, client: SimClient) -> None:
        for sequence in client.sequences:
            if sequence.ending is None:
                self._ended(sequence, Ending.BROKEN)

    def delivered(self, action: Deliver) -> None:
        """Check invariant 2: tokens come in order, none twice, none missing, none wrong."""
        sequence = self._living(action.seq_id, action)
        received = sequence.received
        if action.first_index != len(received):
            raise Violation(
                2,
                f"delivery starts at {action.first_index}, the client has {len(received)} tokens",
                seq_id=action.seq_id,
            )
        if not action.tokens:
            raise Violation(2, "an empty delivery", seq_id=action.seq_id)
        self._logprobs_came(sequence, action)
        received.extend(action.tokens)
        now_s = self._run.clock.now_s
        sequence.token_times_s = [*sequence.token_times_s[:1], now_s]
        want = sequence.expected.generated[: len(received)]
        if received != want:
            raise Violation(2, f"received {received}, undisturbed {want}", seq_id=action.seq_id)

    def _logprobs_came(self, sequence: SimSequence, action: Deliver) -> None:
        """Check that log probabilities come with every token, and the prompt's once, with the first token."""
        expected, sampling = sequence.expected, sequence.submit.sampling
        want = ()
        if sampling.logprobs is not None:
            want = tuple(expected.logprobs_at(action.first_index + i, t) for i, t in enumerate(action.tokens))
        of_prompt = None
        if sampling.prompt_logprobs is not None and not sequence.received:
            of_prompt = tuple(map(fake_logprob, expected.prompt[1:]))
        if action.logprobs != want or action.prompt_logprobs != of_prompt:
            raise Violation(
                2, f"logprobs {action.logprobs}, of the prompt {action.prompt_logprobs}", seq_id=action.seq_id
            )

    def finished(self, action: Finished) -> None:
        sequence = self._living(action.seq_id, action)
        expected, seq_id = sequence.expected, action.seq_id
        if action.embedding != expected.embedding:
            raise Violation(2, f"embedding {action.embedding}, not {expected.embedding}", seq_id=seq_id)
        if sequence.received != expected.generated or action.generated_count != len(expected.generated):
            raise Violation(
                2,
                f"finished after {sequence.received} (count {action.generated_count}), "
                f"undisturbed {expected.generated}",
                seq_id=seq_id,
            )
        if action.reason is not expected.finish:
            raise Violation(2, f"finished by {action.reason}, not {expected.finish}", seq_id=seq_id)
        if not 0 <= action.cached_token_count <= len(expected.prompt):
            raise Violation(
                2,
                f"{action.cached_token_count} of {len(expected.prompt)} prompt tokens cached",
                seq_id=seq_id,
            )
        if action.cached_token_count:
            self._run.counts["prompts with cache hits"] += 1
        self._ended(sequence, Ending.FINISHED)

    def failed(self, action: Failed) -> None:
        sequence = self._living(action.seq_id, action)
        sequence.failure = f"{action.kind}: {action.message}"
        if action.kind is FailureKind.INTERNAL:
            raise Violation(0, f"an internal failure: {action.message}", seq_id=action.seq_id)
        self._run.counts[f"failed: {action.kind}"] += 1
        self._ended(sequence, Ending.FAILED)

    def noted(self, note: Note) -> SimSequence:
        """Follow what the router says it did."""
        sequence = self.by_id[note.seq_id]
        self._run.counts[f"note: {note.what}"] += 1
        match note.what:
            case "placed" | "fallback":
                sequence.placements += 1
                sequence.state = "prefilling"
                if sequence.placements > 1 and sequence.received:
                    self._run.counts["resumes"] += 1
            case "first_token":
                sequence.state = "handing over"
            case "joined":
                sequence.state = "decoding"
            case "retried" | "migrated":
                sequence.state = "queued"
                if note.cause is not None:
                    self._run.counts[f"retried: {note.cause}"] += 1
            case _:
                pass
        return sequence

    def _living(self, seq_id: str, action: object) -> SimSequence:
        sequence = self.by_id[seq_id]
        if sequence.ending is not None:
            raise Violation(1, f"{action} after the end ({sequence.ending})", seq_id=seq_id)
        return sequence

    def _ended(self, sequence: SimSequence, ending: Ending) -> None:
        sequence.ending, sequence.ended_s = ending, self._run.clock.now_s
