"""The phases of a sequence at the router, and which may follow which."""

from enum import StrEnum, auto


class Phase(StrEnum):
    QUEUED = auto()
    PREFILLING = auto()
    """All legs were told to start."""
    HANDING_OVER = auto()
    """The prefill worker has sampled its token; the decode worker has not joined."""
    DECODING = auto()
    """One worker has all it needs. Others taking part no longer matter."""
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


_ENDS = frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED})
LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.PREFILLING, Phase.FAILED, Phase.CANCELLED}),
    # QUEUED, here and below: the attempt was lost or refused.
    # DECODING: the decode worker was heard before the prefill worker, or there is only one worker.
    Phase.PREFILLING: frozenset({Phase.HANDING_OVER, Phase.DECODING, Phase.QUEUED}) | _ENDS,
    Phase.HANDING_OVER: frozenset({Phase.DECODING, Phase.QUEUED}) | _ENDS,
    Phase.DECODING: frozenset({Phase.QUEUED}) | _ENDS,
    Phase.DONE: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}
