"""What became of single requests, as their router tells it to those who operate the cluster.

There is no prompt and no answer in a story: how long things took, who did them, and why.
"""

import msgspec

from baton.core.ids import WorkerId
from baton.core.wire_types import SInt64, UInt64


class Moment(msgspec.Struct, frozen=True):
    """A decision or a change of phase."""

    after_s: float
    """Since the request came in."""
    what: str
    """As `router.decisions.events.Note.what`: placed, first_token, joined, retried, …"""
    reason: str = ""
    sequence: str = ""
    """Of a request with several: which."""
    workers: tuple[WorkerId, ...] = ()
    seconds: float = 0.0
    """That it took, where it has a length."""
    bytes: UInt64 = 0


class RecentRequest(msgspec.Struct, frozen=True):
    request_id: str
    """As answers, traces and workers name it."""
    arrived_s: float
    """Unix time, for people."""
    took_s: float
    """To its end; of one that runs, until now."""
    outcome: str = "running"
    """running, completed, refused, failed, cancelled or invalid."""
    verdict: str = ""
    """Whether its objectives were met, as `Verdict` says; empty while it runs or if it was not counted."""
    error: str = ""
    model: str = ""
    """none: it asked for none that there is."""
    slo_class: str = ""
    tenant: str = ""
    ttft_slo_s: float = 0.0
    """Objective; 0: none."""
    tpot_slo_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    """None: no token came, or it is not known."""
    tpot_s: float | None = None
    """Of its slowest sequence."""
    parts: dict[str, float] = {}
    """Seconds of each part of the time to first token, in order; after those, transfer and first_decode."""
    prefill_worker: str = ""
    decode_worker: str = ""
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    attempts: int = 0
    """Times that its first sequence was placed."""
    moments: tuple[Moment, ...] = ()
    client_request_id: str = ""
    """x-request-id: the client's own, else the one that its answer carries."""

    @property
    def is_trouble(self) -> bool:
        """It ended otherwise than its client wanted, or not at the first attempt."""
        return self.verdict not in ("", "met", "cancelled") or self.attempts > 1


class RecentRequestsQuery(msgspec.Struct, frozen=True):
    request_id: str = ""
    """This one, by either of its ids; empty: the latest ones."""
    limit: SInt64 = 100


class RecentRequestsReply(msgspec.Struct, frozen=True):
    router_id: str
    recent_requests: tuple[RecentRequest, ...]
    """Newest first, those that run before those that ended; ones in trouble are kept longest."""
