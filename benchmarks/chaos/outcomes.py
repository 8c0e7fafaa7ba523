"""What became of a drill, as values. Instants are monotonic seconds while a drill runs."""

from enum import StrEnum

import msgspec

from benchmarks.chaos.answers import HeardAnswer
from benchmarks.chaos.schedule import Event


class End(StrEnum):
    """How an attempt ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """429 or 503, before anything was streamed."""
    ERROR = "error"
    """An error object: in the stream, or as the body of another status."""
    NOT_CONNECTED = "not connected"
    BROKEN = "broken"
    """The connection ended without an answer or an error, which is right only if the router was killed."""
    GARBAGE = "garbage"
    """What was said is not JSON."""
    UNANSWERED = "unanswered"
    """Nothing was heard for longer than the request's own deadline."""


class Stretch(msgspec.Struct, frozen=True):
    """A stretch of time."""

    from_s: float
    to_s: float

    @property
    def length_s(self) -> float:
        return self.to_s - self.from_s


class ClientAttempt(msgspec.Struct, frozen=True):
    router: str
    began_s: float
    ended_s: float
    end: End
    detail: str
    is_final: bool
    """Asking again cannot change it."""
    retry_after_s: float
    first_wait: Stretch
    """Time from the request to the first token, or to the end."""
    pause: Stretch
    """The longest time between two tokens."""
    answer: HeardAnswer


class AskedRequest(msgspec.Struct, frozen=True):
    """A request with all its attempts."""

    index: int
    kind: str
    attempts: tuple[ClientAttempt, ...]


class Applied(msgspec.Struct, frozen=True):
    """A fault as it happened."""

    event: Event
    what: str
    """The process or worker that it hit, and what was found out."""
    began_s: float
    ended_s: float
    """When it was undone; when it struck, if nothing is to be undone."""
    recovered_s: float | None
    """When all parts were back after it ended. None: not before the drill ended."""


class ProcessSample(msgspec.Struct, frozen=True):
    """Memory and descriptors of one process."""

    at_s: float
    name: str
    pid: int
    rss_bytes: int
    descriptors: int
