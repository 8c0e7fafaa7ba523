"""The states of a sequence at the router, and the legal transitions between them."""

from enum import StrEnum, auto


class RequestState(StrEnum):
    QUEUED = auto()
    PREFILLING = auto()
    """All its workers were asked to start."""
    HANDING_OVER = auto()
    """The prefill worker has sampled the first token, and the decode worker has not joined its batch yet."""
    DECODING = auto()
    """One worker has all that it needs to go on. The other workers of the attempt no longer matter."""
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


_ENDS = frozenset({RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED})
LEGAL: dict[RequestState, frozenset[RequestState]] = {
    # DONE follows if the router found the end of the answer in the last tokens of a lost attempt.
    RequestState.QUEUED: frozenset({RequestState.PREFILLING}) | _ENDS,
    # A sequence goes back to QUEUED, here and below, when its attempt was lost or refused.
    # DECODING follows at once if the decode worker's message overtakes the prefill worker's, or if one worker
    # runs both phases.
    RequestState.PREFILLING: frozenset(
        {RequestState.HANDING_OVER, RequestState.DECODING, RequestState.QUEUED}
    )
    | _ENDS,
    RequestState.HANDING_OVER: frozenset({RequestState.DECODING, RequestState.QUEUED}) | _ENDS,
    RequestState.DECODING: frozenset({RequestState.QUEUED}) | _ENDS,
    RequestState.DONE: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
}
