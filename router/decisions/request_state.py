"""The phases of a sequence at the router, and which may follow which."""

from enum import StrEnum, auto


class RequestState(StrEnum):
    QUEUED = auto()
    PREFILLING = auto()
    """All phases were told to start."""
    HANDING_OVER = auto()
    """The prefill worker has sampled its token; the decode worker has not joined."""
    DECODING = auto()
    """One worker has all it needs. Others taking part no longer matter."""
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


_ENDS = frozenset({RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED})
LEGAL: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset({RequestState.PREFILLING, RequestState.FAILED, RequestState.CANCELLED}),
    # QUEUED, here and below: the attempt was lost or refused.
    # DECODING: the decode worker was heard before the prefill worker, or there is only one worker.
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
