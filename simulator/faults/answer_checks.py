"""The answers that clients receive, byte by byte, compared with what nothing disturbed would give."""

from router.decisions.events import FailureKind
from simulator.faults.answers import (
    Choice,
    ReceivedAnswer,
    expected_beams,
    expected_choices,
    expected_vectors,
    read_stream,
    read_whole,
)
from simulator.faults.client import Ending, RequestKind, SimClient
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import Scenario

STATUS = {
    FailureKind.QUEUE_FULL: 503,
    FailureKind.NO_CAPACITY: 503,
    FailureKind.UNMET: 503,
    FailureKind.TOO_LONG: 400,
    FailureKind.UNSUPPORTED: 400,
    FailureKind.DEADLINE: 504,
    FailureKind.RETRIES_SPENT: 503,
    FailureKind.ATTEMPTS: 503,
}
ERROR_TYPES = {400: "invalid_request_error", 429: "", 504: "timeout_error"}
"""Types of errors by status; "" may be any."""


class AnswerChecks:
    """The checks of one run's answers."""

    def __init__(self, run: RunContext, scenario: Scenario) -> None:
        self._run, self._scenario = run, scenario

    def judge(self, client: SimClient) -> Ending:
        """Check a complete answer, or what there is of a broken one. Returns how the request ended."""
        exchange = client.exchange
        assert exchange is not None
        if client.ending is not None:  # the client left before
            self._is_a_beginning(client, self._stream_so_far(client))
            return client.ending
        if exchange.is_broken_off:
            self._run.counts["clients dropped for not reading"] += 1
            answer = self._stream_so_far(client)
            if not client.is_slow or answer.is_done:
                raise self._wrong(client, 1, "the router broke the connection off")
            self._is_a_beginning(client, answer)
            return Ending.FAILED
        if not exchange.is_complete or not exchange.status:
            raise self._wrong(client, 1, "the router is done with a request that has no complete answer")
        if exchange.status != 200:
            self._failed_at_once(client, read_whole(exchange.text))
            return Ending.FAILED
        return self._streamed(client) if client.is_stream else self._whole(client)

    def _stream_so_far(self, client: SimClient) -> ReceivedAnswer:
        exchange = client.exchange
        assert exchange is not None
        if not client.is_stream or exchange.status != 200:
            return ReceivedAnswer()
        return read_stream(exchange.text)

    def _streamed(self, client: SimClient) -> Ending:
        answer = self._stream_so_far(client)
        if answer.after_end:
            raise self._wrong(client, 1, f"the stream goes on after its end: {answer.after_end}")
        if answer.error is not None:
            self._run.counts["streams ended by an error"] += 1
            self._is_failure_explained(client)
            self._is_a_beginning(client, answer)
            return Ending.FAILED
        if not answer.is_done:
            raise self._wrong(client, 1, "the stream ends with neither an error nor [DONE]")
        self._is_complete(client, answer)
        wants_usage = client.body.get("stream_options", {}).get("include_usage", False)
        if wants_usage is not (answer.usage is not None):
            raise self._wrong(client, 2, f"usage {answer.usage}, wanted: {wants_usage}")
        return Ending.FINISHED

    def _whole(self, client: SimClient) -> Ending:
        exchange = client.exchange
        assert exchange is not None
        self._is_complete(client, read_whole(exchange.text))
        return Ending.FINISHED

    def _is_complete(self, client: SimClient, answer: ReceivedAnswer) -> None:
        if any(sequence.ending is Ending.FAILED for sequence in client.sequences):
            raise self._wrong(client, 1, "success after one of its sequences failed")
        if client.kind is RequestKind.EMBEDDING:
            if answer.vectors != expected_vectors(client):
                raise self._wrong(client, 2, f"vectors {answer.vectors}, not {expected_vectors(client)}")
            self._is_usage_true(client, answer, 0)
            return
        counted = want = expected_choices(client)
        if client.kind is RequestKind.BEAM:
            want, count = expected_beams(client, self._scenario)
            counted = want
            self._run.counts["beam searches ended"] += 1
            if count != len(client.sequences):
                raise self._wrong(client, 2, f"{len(client.sequences)} beams were run, not {count}")
        elif "best_of" in client.body:
            self._run.counts["best_of ended"] += 1
            counted = expected_choices(client, all_of_them=True)
        got = [answer.choices.get(i, Choice()) for i in range(max(len(want), len(answer.choices)))]
        if got != want:
            raise self._wrong(client, 2, f"the answer is {got}, undisturbed {want}")
        self._count_features(client, want)
        client.completion_tokens = sum(choice.token_count for choice in counted)
        self._is_usage_true(client, answer, client.completion_tokens)

    def _count_features(self, client: SimClient, want: list[Choice]) -> None:
        counts = self._run.counts
        if len(want) > 1:
            counts["requests of several choices ended"] += 1
        for sequence, choice in zip(client.sequences, want, strict=False):
            if choice.finish == "stop" and choice.token_count < len(sequence.expected.generated):
                counts["stop strings ended an answer"] += 1

    def _is_usage_true(self, client: SimClient, answer: ReceivedAnswer, completion_tokens: int) -> None:
        usage = answer.usage
        if usage is None:
            return
        prompt_tokens = sum(map(len, client.prompts))
        got = (usage["prompt_tokens"], usage.get("completion_tokens", 0), usage["total_tokens"])
        want = (prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if got != want or not 0 <= cached <= prompt_tokens:
            raise self._wrong(client, 2, f"usage {usage}, the client has {want}")

    def _is_a_beginning(self, client: SimClient, answer: ReceivedAnswer) -> None:
        """Check that what came of a broken stream is how the undisturbed one begins."""
        if answer.is_done and answer.error is not None:
            raise self._wrong(client, 1, "[DONE] after an error")
        if client.kind is not RequestKind.COMPLETION:
            return
        want = expected_choices(client)
        for index, choice in answer.choices.items():
            whole = want[index]
            is_beginning = whole.text.startswith(choice.text)
            if not is_beginning or whole.tokens[: choice.token_count] != choice.tokens:
                raise self._wrong(client, 2, f"choice {index} is {choice}, undisturbed {whole}")

    # --- failures -----------------------------------------------------------------------------------

    def _failed_at_once(self, client: SimClient, answer: ReceivedAnswer) -> None:
        exchange = client.exchange
        assert exchange is not None
        status, error = exchange.status, answer.error
        if error is None:
            raise self._wrong(client, 1, f"status {status} without an error object")
        self._run.counts[f"status {status}"] += 1
        wanted_type = ERROR_TYPES.get(status, "")
        if wanted_type and error["type"] != wanted_type:
            raise self._wrong(client, 1, f"status {status} with {error}")
        failures = [s for s in client.sequences if s.ending is Ending.FAILED]
        if failures:
            self._is_failure_explained(client)
            first = min(failures, key=lambda s: s.ended_s)
            want = {STATUS[FailureKind(s.failure.split(":", 1)[0])] for s in failures}
            if status not in want:
                raise self._wrong(client, 1, f"status {status}, but {first.failure}")
        elif status == 400:
            self._may_be_invalid(client)
        elif status == 429:
            self._run.counts["refused by a tenant's limits"] += 1
        elif client.sequences:
            self._is_failure_explained(client)
        if "retry-after" in exchange.headers and int(exchange.headers["retry-after"]) < 1:
            raise self._wrong(client, 1, f"retry-after {exchange.headers['retry-after']}")

    def _may_be_invalid(self, client: SimClient) -> None:
        """Check that only what cannot work is called invalid."""
        longest = max(map(len, client.prompts)) + client.body.get("max_tokens", 1)
        if longest <= self._scenario.context_max:
            raise self._wrong(client, 2, "a request that can work is called invalid")

    def _is_failure_explained(self, client: SimClient) -> None:
        if not any(sequence.ending is Ending.FAILED for sequence in client.sequences):
            raise self._wrong(client, 1, "an error, and none of its sequences failed")

    def _wrong(self, client: SimClient, invariant: int, message: str) -> Violation:
        exchange = client.exchange
        seen = "" if exchange is None else f" (status {exchange.status}, {exchange.text[-300:]!r})"
        seq_id = client.sequences[0].seq_id if client.sequences else client.name
        return Violation(invariant, f"{client.name}: {message}{seen}", seq_id=seq_id)
