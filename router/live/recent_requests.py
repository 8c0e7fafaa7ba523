"""The latest requests of a router, in memory and bounded: what served each, and how long it took.

While a request runs, only references to existing values are kept. They become a `RecentRequest` when somebody
asks, which is seldom.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import chain

from baton.core.ids import RouterId
from baton.core.recent_requests import Moment, RecentRequest, RecentRequestsQuery, RecentRequestsReply
from router.decisions.events import LatencyBreakdown, Note, Served
from router.live.request_log import RequestLog
from router.openai.responses import Usage
from router.openai.timings import PARTS, EdgeTimes
from router.tenants.service_classes import NO_OBJECTIVES, RequestObjectives, RequestVerdict

RECENT_MAX = 256
TROUBLED_MAX = 256
"""Most requests in trouble that are kept beside the recent ones. When many requests go well, people ask for
those that did not."""

RUNNING_MAX = 8192
MOMENTS_MAX = 64
"""Most moments of one request."""

PLACED = ("placed", "fallback")
"""Notes of a placement."""

_UNTROUBLED = (None, RequestVerdict.MET, RequestVerdict.CANCELLED)


class RequestTimeline:
    """The record of one request while it runs and after."""

    __slots__ = (
        "began_s",
        "client_request_id",
        "edge",
        "ended_s",
        "error",
        "latency_breakdown",
        "model",
        "notes",
        "objectives",
        "outcome",
        "request_id",
        "served",
        "tenant",
        "tpot_s",
        "ttft_s",
        "usage",
        "verdict",
    )

    def __init__(self, request_id: str, now_s: float, client_request_id: str, model: str) -> None:
        self.request_id, self.began_s, self.client_request_id = request_id, now_s, client_request_id
        self.model = model
        self.ended_s: float | None = None
        self.notes: list[tuple[float, Note]] = []
        self.outcome, self.error, self.tenant = "running", "", ""
        self.verdict: RequestVerdict | None = None
        self.objectives: RequestObjectives = NO_OBJECTIVES
        self.usage = NO_USAGE
        self.ttft_s: float | None = None
        self.tpot_s: float | None = None
        self.edge: EdgeTimes | None = None
        self.latency_breakdown: LatencyBreakdown | None = None
        self.served: Served | None = None

    @property
    def is_trouble(self) -> bool:
        is_dropped = self.outcome == "cancelled" and bool(self.error)
        is_retried = self.served is not None and self.served.attempts > 1
        return self.verdict not in _UNTROUBLED or is_dropped or is_retried


NO_USAGE = Usage()


class RecentRequests:
    """A router's record of its latest requests."""

    def __init__(
        self,
        request_log: RequestLog | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._request_log = request_log or RequestLog()
        self._now_s, self._unix_s = now_s, unix_s
        self._running: dict[str, RequestTimeline] = {}
        self._recent: deque[RequestTimeline] = deque(maxlen=RECENT_MAX)
        self._troubled: deque[RequestTimeline] = deque(maxlen=TROUBLED_MAX)

    def begin(self, request_id: str, *, client_request_id: str = "", model: str = "") -> None:
        if len(self._running) < RUNNING_MAX:
            self._running[request_id] = RequestTimeline(request_id, self._now_s(), client_request_id, model)

    def classified(self, request_id: str, objectives: RequestObjectives, tenant: str) -> None:
        """Note the class and the tenant of a request, which are known once its body was read."""
        timeline = self._running.get(request_id)
        if timeline is not None:
            timeline.objectives, timeline.tenant = objectives, tenant

    def note(self, request_id: str, note: Note) -> None:
        timeline = self._running.get(request_id)
        if timeline is not None and len(timeline.notes) < MOMENTS_MAX:
            timeline.notes.append((self._now_s(), note))

    def answered(
        self,
        request_id: str,
        usage: Usage,
        *,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        edge: EdgeTimes | None = None,
        latency_breakdown: LatencyBreakdown | None = None,
        served: Served | None = None,
    ) -> None:
        timeline = self._running.get(request_id)
        if timeline is not None:
            timeline.usage, timeline.ttft_s, timeline.tpot_s = usage, ttft_s, tpot_s
            timeline.edge, timeline.latency_breakdown, timeline.served = edge, latency_breakdown, served

    def end(
        self,
        request_id: str,
        *,
        outcome: str,
        error: str,
        verdict: RequestVerdict | None,
        objectives: RequestObjectives,
        tenant: str,
    ) -> None:
        timeline = self._running.pop(request_id, None)
        if timeline is None:
            return
        timeline.ended_s = self._now_s()
        timeline.outcome, timeline.error, timeline.verdict = outcome, error, verdict
        timeline.objectives, timeline.tenant = objectives, tenant
        (self._troubled if timeline.is_trouble else self._recent).append(timeline)
        self._request_log.ended(is_trouble=timeline.is_trouble, record=lambda: self._record(timeline))

    def reply(self, wanted: RecentRequestsQuery, router_id: RouterId) -> RecentRequestsReply:
        timelines = self._found(wanted)
        return RecentRequestsReply(router_id, tuple(self._record(timeline) for timeline in timelines))

    def _found(self, wanted: RecentRequestsQuery) -> Iterator[RequestTimeline]:
        if wanted.request_id:
            found = chain(self._running.values(), self._recent, self._troubled)
            named = wanted.request_id
            yield from (d for d in found if named in (d.request_id, d.client_request_id))
            return
        running = sorted(self._running.values(), key=lambda timeline: -timeline.began_s)
        ended = sorted(chain(self._recent, self._troubled), key=lambda timeline: -(timeline.ended_s or 0.0))
        yield from (*running, *ended)[: max(0, wanted.limit)]

    def _record(self, timeline: RequestTimeline) -> RecentRequest:
        now_s = self._now_s()
        served, objectives, usage = timeline.served, timeline.objectives, timeline.usage
        return RecentRequest(
            request_id=timeline.request_id,
            model=timeline.model,
            client_request_id=timeline.client_request_id,
            arrived_s=self._unix_s() - (now_s - timeline.began_s),
            took_s=(now_s if timeline.ended_s is None else timeline.ended_s) - timeline.began_s,
            outcome=timeline.outcome,
            verdict="" if timeline.verdict is None else timeline.verdict.value,
            error=timeline.error,
            slo_class=objectives.slo_class,
            tenant=timeline.tenant,
            ttft_slo_s=objectives.ttft_s,
            tpot_slo_s=objectives.tpot_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_s=timeline.ttft_s,
            tpot_s=timeline.tpot_s,
            parts=_parts(timeline),
            prefill_worker=served.prefill_worker if served else "",
            decode_worker=served.decode_worker if served else "",
            predicted_ttft_s=served.predicted_ttft_s if served else None,
            predicted_tpot_s=served.predicted_tpot_s if served else None,
            attempts=served.attempts if served else _attempts(timeline),
            moments=tuple(_moment(at_s - timeline.began_s, note) for at_s, note in timeline.notes),
        )


def _attempts(timeline: RequestTimeline) -> int:
    """Return how often the sequence was placed that was placed most often. A request may have thousands of
    sequences, each of which is placed once."""
    placed = Counter(note.seq_id for _, note in timeline.notes if note.what in PLACED)
    return max(placed.values(), default=0)


def _parts(timeline: RequestTimeline) -> dict[str, float]:
    parts: dict[str, float] = {}
    if timeline.edge is not None:
        parts = {"route": timeline.edge.route_s, "tokenize": timeline.edge.tokenize_s}
    if timeline.latency_breakdown is not None:
        parts |= {part: getattr(timeline.latency_breakdown, f"{part}_s") for part in PARTS[2:]}
    return parts


def _moment(after_s: float, note: Note) -> Moment:
    sequence = note.seq_id.rsplit("/", 1)[-1]
    return Moment(after_s, note.what, note.reason, sequence, tuple(note.worker_ids), note.seconds, note.bytes)
