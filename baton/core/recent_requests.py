"""Recent requests, as routers report them to operators.

A record has no prompt and no answer. It says how long each part took, which workers did it, and for what
reason.
"""

import msgspec

from baton.core.ids import WorkerId
from baton.core.wire_types import SInt64, UInt64


class Moment(msgspec.Struct, frozen=True):
    """A decision about a request, or a change of its state."""

    after_s: float
    """Seconds since the request's arrival."""
    what: str
    """Name of the event, as in `Note.what` of the router: placed, first_token, joined, retried and others."""
    reason: str = ""
    sequence: str = ""
    """The sequence, for a request that has several."""
    workers: tuple[WorkerId, ...] = ()
    seconds: float = 0.0
    """Duration, for an event that has one."""
    bytes: UInt64 = 0


class RecentRequest(msgspec.Struct, frozen=True):
    request_id: str
    """Id of the request, as answers, traces and workers name it."""
    arrived_s: float
    """Unix time, for people."""
    took_s: float
    """Seconds to its end, or until now while it runs."""
    outcome: str = "running"
    """running, completed, refused, failed, cancelled or invalid."""
    verdict: str = ""
    """The `RequestVerdict` on its objectives. Empty while it runs, and if it was not counted."""
    error: str = ""
    model: str = ""
    """Model of the request; "none" if it named one that does not exist."""
    slo_class: str = ""
    tenant: str = ""
    ttft_slo_s: float = 0.0
    """TTFT objective. 0: none."""
    tpot_slo_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    """Measured TTFT. None: no token came, or it is not known."""
    tpot_s: float | None = None
    """TPOT of its slowest sequence."""
    parts: dict[str, float] = {}
    """Seconds of each part of the time to first token, in order, and then of transfer and first_decode."""
    prefill_worker: str = ""
    decode_worker: str = ""
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    attempts: int = 0
    """Number of times that its first sequence was placed."""
    moments: tuple[Moment, ...] = ()
    client_request_id: str = ""
    """The client's own x-request-id, or else the one that its answer carries."""

    @property
    def is_trouble(self) -> bool:
        """Whether it ended otherwise than its client wanted, or not at the first attempt."""
        return self.verdict not in ("", "met", "cancelled") or self.attempts > 1


class RecentRequestsQuery(msgspec.Struct, frozen=True):
    request_id: str = ""
    """Request to return, by either of its ids. Empty: the latest ones."""
    limit: SInt64 = 100


class RecentRequestsReply(msgspec.Struct, frozen=True):
    router_id: str
    recent_requests: tuple[RecentRequest, ...]
    """Requests, newest first, running ones before those that ended. Those in trouble are kept longest."""
