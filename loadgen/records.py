"""What is known about one request of a replay."""

from dataclasses import dataclass, field
from enum import StrEnum, auto


class Outcome(StrEnum):
    COMPLETED = auto()
    """The stream ended as OpenAI's protocol says it must."""
    REFUSED = auto()
    """429 or 503: the server said that it has no room."""
    FAILED = auto()
    """Anything else; `Record.error` says what."""
    CANCELLED = auto()
    """The client hung up on purpose, as planned, while all went well. Goodput leaves it out on both sides:
    whether it would have met its objectives is not known. One that was refused or failed before the client
    hung up keeps that outcome and counts as a miss."""


class ErrorKind(StrEnum):
    CONNECT = auto()
    """No connection, or it broke before the response's head."""
    CONNECTION_LIMIT = auto()
    """Not sent: `--connections-max` were open. Waiting would have made the loop closed."""
    HTTP = auto()
    """A status other than 200, 429 and 503."""
    STREAM_BROKEN = auto()
    """The connection ended before `[DONE]`."""
    STREAM_ERROR = auto()
    """The server sent an error object within the stream."""
    STREAM_GARBAGE = auto()
    """Not HTTP, not server-sent events, or not the JSON they must hold."""
    TIMEOUT = auto()
    INTERRUPTED = auto()
    """The replay was stopped while the request ran."""
    OVERLOADED = auto()
    """Refused."""


@dataclass(slots=True)
class Record:
    """All instants in seconds on one monotonic clock; latencies count from `planned_s`.

    `planned_s` is when the user meant to send it: the instant of the trace, scaled, or, for a turn that had
    to wait, the end of the turn before plus think time, whichever is later. What the load generator adds is
    lateness, and inside every latency.
    """

    index: int
    planned_s: float
    sent_s: float | None = None
    """When this program began to connect."""
    token_instants_s: list[float] = field(default_factory=list[float])
    """Arrival of every event that carried text or token ids."""
    ended_s: float | None = None
    outcome: Outcome | None = None
    error: ErrorKind | None = None
    detail: str = ""
    finish_reason: str | None = None
    asked_tokens: int | None = None
    """Of the answer, as the trace says; None: it was not prescribed."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """None: the server does not say."""
    slo_class: str = ""
    """Class the request was sent under; empty: the server's default."""
    tenant: str = ""
    session: str | None = None
    """Conversation it is a turn of; None: it stands alone."""
    turn: int = 0
    """Of its session, from 0."""
    trace_instant_s: float | None = None
    """For a turn that waited for the one before: when the trace alone would have sent it. None: it did not
    wait, and `planned_s` is that instant."""
    timings: dict[str, float] | None = None
    """Seconds of each phase, and what was predicted, as the server told; see `baton` in docs/api.md."""
    served_by: tuple[str, ...] = ()
    """Workers that served it, prefill first; one name where it was one worker. Empty: not told."""
    attempts: int | None = None
    """How often the server placed it; None: not told."""
    answer: str = ""
    """Digest of what was answered; empty: not kept."""

    @property
    def waited_for_turn(self) -> bool:
        """It left later than the trace says because the turn before had not ended."""
        return self.trace_instant_s is not None

    @property
    def ttft_s(self) -> float | None:
        return self.token_instants_s[0] - self.planned_s if self.token_instants_s else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.planned_s

    @property
    def tokens_out(self) -> int:
        """As the server counts them; events with text where it does not say."""
        return len(self.token_instants_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None when there is no second one."""
        if self.tokens_out < 2 or len(self.token_instants_s) < 2:
            return None
        return (self.token_instants_s[-1] - self.token_instants_s[0]) / (self.tokens_out - 1)

    @property
    def lateness_s(self) -> float | None:
        """How late this program itself was."""
        return None if self.sent_s is None else self.sent_s - self.planned_s
