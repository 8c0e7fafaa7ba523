"""The record of one request of a replay."""

from dataclasses import dataclass, field
from enum import StrEnum, auto


class RequestOutcome(StrEnum):
    COMPLETED = auto()
    """The stream ended as OpenAI's protocol requires."""
    REFUSED = auto()
    """The server answered 429 or 503: it has no room."""
    FAILED = auto()
    """Any other end; `RequestRecord.error` gives the kind."""
    CANCELLED = auto()
    """The client disconnected as planned while all went well. Goodput leaves it out on both sides, because
    nobody knows whether it would have met its objectives. A request that was refused or failed before that
    keeps its outcome and counts as a miss."""


class ErrorKind(StrEnum):
    CONNECT = auto()
    """There was no connection, or it broke before the head of the response."""
    CONNECTION_LIMIT = auto()
    """The request was not sent, because `--connections-max` were open. Waiting would have closed the loop."""
    HTTP = auto()
    """The status was not 200, 429 or 503."""
    STREAM_BROKEN = auto()
    """The connection ended before `[DONE]`."""
    STREAM_ERROR = auto()
    """The server sent an error object within the stream."""
    STREAM_GARBAGE = auto()
    """The stream was not HTTP, not server-sent events, or not the JSON that they must hold."""
    TIMEOUT = auto()
    INTERRUPTED = auto()
    """The replay was stopped while the request ran."""
    OVERLOADED = auto()
    """The server refused the request."""


@dataclass(slots=True)
class RequestRecord:
    """One request. All instants are seconds on one monotonic clock; latencies count from `planned_s`.

    `planned_s` is when the user meant to send it: the scaled instant of the trace or, for a turn that had to
    wait, the end of the earlier turn plus think time, whichever is later. The load generator's own delay is
    called lateness, and is part of every latency.
    """

    index: int
    planned_s: float
    sent_s: float | None = None
    """Instant at which this program began to connect."""
    token_instants_s: list[float] = field(default_factory=list[float])
    """Arrival of every event that carried text or token ids."""
    ended_s: float | None = None
    outcome: RequestOutcome | None = None
    error: ErrorKind | None = None
    detail: str = ""
    finish_reason: str | None = None
    asked_tokens: int | None = None
    """Length of the answer in the trace; None if it was not prescribed."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server had cached; None if it does not report them."""
    slo_class: str = ""
    """Service class of the request; empty for the server's default."""
    tenant: str = ""
    session: str | None = None
    """The conversation that it is a turn of; None if it stands alone."""
    turn: int = 0
    """Turn within the session, from 0."""
    trace_instant_s: float | None = None
    """The instant at which the trace alone would have sent a turn that waited for the earlier one. None if it
    did not wait; then `planned_s` is that instant."""
    timings: dict[str, float] | None = None
    """Seconds of each phase, and predictions, as the server reports them; see `baton` in docs/api.md."""
    served_by: tuple[str, ...] = ()
    """The workers that served it, prefill first; one name if one worker served both phases. Empty if not
    reported."""
    attempts: int | None = None
    """Number of times that the server placed it; None if not reported."""
    answer: str = ""
    """Digest of the answer; empty if it was not kept."""

    @property
    def waited_for_turn(self) -> bool:
        """True if it was sent later than in the trace because the earlier turn had not ended."""
        return self.trace_instant_s is not None

    @property
    def ttft_s(self) -> float | None:
        return self.token_instants_s[0] - self.planned_s if self.token_instants_s else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.planned_s

    @property
    def tokens_out(self) -> int:
        """Answer tokens as the server counts them, or else the events with text."""
        return len(self.token_instants_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None without a second token."""
        if self.tokens_out < 2 or len(self.token_instants_s) < 2:
            return None
        return (self.token_instants_s[-1] - self.token_instants_s[0]) / (self.tokens_out - 1)

    @property
    def lateness_s(self) -> float | None:
        """Seconds that this program itself was late."""
        return None if self.sent_s is None else self.sent_s - self.planned_s
