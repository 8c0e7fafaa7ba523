"""Counters and traces of requests. They observe the driver and the HTTP layer, and decide nothing."""

from collections.abc import Sequence
from typing import Literal

from baton.core.errors import BatonError, ClientError, Overloaded
from baton.core.ids import SequenceId
from baton.telemetry import catalogue as c
from baton.telemetry.metrics import Meter
from baton.telemetry.tracing import Spans
from router.decisions.events import Note
from router.http.streaming import ResponseStream
from router.live.recent_requests import RecentRequests
from router.openai.call import Call
from router.openai.genai import PROVIDER, answer_attributes, operation_of, request_attributes
from router.openai.responses import Usage
from router.openai.timings import first_of, parts_of
from router.tenants.service_classes import RequestObjectives, RequestVerdict

TENANT_LABELS_MAX = 64
"""Label values cost memory here and in Prometheus, and stay until the process ends."""

RequestOutcome = Literal["completed", "refused", "failed", "cancelled", "invalid"]


def outcome_of(error: BatonError) -> RequestOutcome:
    if isinstance(error, ClientError):
        return "invalid"
    return "refused" if isinstance(error, Overloaded) else "failed"


def request_of(seq_id: SequenceId) -> str:
    return seq_id.rsplit("/", 1)[0]


class RequestRecorder:
    """Observer of one model's requests. All models of a router share `recent_requests`."""

    def __init__(self, meter: Meter, spans: Spans, recent_requests: RecentRequests, *, model: str) -> None:
        self.meter, self.spans, self.recent_requests = meter, spans, recent_requests
        self._model = model
        self._tenants: set[str] = set()
        self._calls: dict[str, tuple[str, str, float]] = {}
        """Operation, model and arrival of requests that are under way, by the conventions' names."""

    def on_note(self, note: Note) -> None:
        request_id = request_of(note.seq_id)
        self.recent_requests.note(request_id, note)
        self.spans.note(
            request_id,
            note.what,
            sequence=note.seq_id,
            reason=note.reason,
            workers=list(note.worker_ids),
            seconds=note.seconds,
            bytes=note.bytes,
        )
        meter, model = self.meter, self._model
        match note.what:
            case "placed":
                meter.inc(
                    c.PLACEMENTS, model=model, kind="split" if len(note.worker_ids) > 1 else "aggregated"
                )
            case "fallback":
                meter.inc(c.PLACEMENTS, model=model, kind="fallback")
            case "retried":
                assert note.cause is not None
                meter.inc(c.RETRIES, model=model, cause=note.cause.value)
            case "migrated":
                meter.inc(c.MIGRATIONS, model=model)
            case "joined":
                meter.observe(c.HANDOVER, note.seconds, model=model)
            case _:
                pass

    def open(self, request_id: str, traceparent: str, client_request_id: str) -> str:
        """Begin the record of a request. Returns the traceparent for its spans in other processes."""
        self.recent_requests.begin(request_id, model=self._model, client_request_id=client_request_id)
        return self.spans.open(
            request_id,
            "request",
            parent=traceparent,
            is_server=True,
            model=self._model,
            **{"request.id": request_id, "client.request_id": client_request_id},
        )

    def close(self, request_id: str, outcome: RequestOutcome, error: str = "") -> None:
        self.meter.inc(c.REQUESTS, model=self._model, outcome=outcome)
        self.spans.close(request_id, error=error, outcome=outcome)

    def on_call(self, request_id: str, call: Call, *, arrived_s: float) -> None:
        """Note what a request asks for, in the words of OpenTelemetry's conventions."""
        operation = operation_of(call)
        self._calls[request_id] = (operation, call.model, arrived_s)
        if self.spans.is_on:
            self.spans.describe(request_id, request_attributes(call), name=f"{operation} {call.model}")

    def _genai_labels(self, request_id: str) -> dict[str, str] | None:
        found = self._calls.get(request_id)
        if found is None:
            return None
        operation, model, _ = found
        return dict(zip(c.GENAI_LABELS, (operation, PROVIDER, model), strict=True))

    def _genai_answered(
        self, request_id: str, usage: Usage, *, reasons: Sequence[str] = (), ttft_s: float | None,
        tpots_s: Sequence[float] = (),
    ) -> None:  # fmt: skip
        if self.spans.is_on:
            attributes = answer_attributes(usage, answer_id=request_id, reasons=reasons)
            self.spans.describe(request_id, attributes)
        labels = self._genai_labels(request_id)
        if labels is None:
            return
        if ttft_s is not None:
            self.meter.observe(c.GENAI_TTFT, ttft_s, **labels)
        for tpot_s in tpots_s:
            self.meter.observe(c.GENAI_TPOT, tpot_s, **labels)

    def _genai_ended(self, request_id: str, outcome: RequestOutcome, now_s: float | None) -> None:
        labels = self._genai_labels(request_id)
        found = self._calls.pop(request_id, None)
        error_type = "" if outcome == "completed" else outcome
        if error_type:
            self.spans.describe(request_id, {"error.type": error_type})
        if labels is not None and found is not None and now_s is not None:
            took_s = max(0.0, now_s - found[2])
            self.meter.observe(c.GENAI_DURATION, took_s, **labels, error_type=error_type)

    def on_slow_client(self) -> None:
        self.meter.inc(c.SLOW_CLIENTS, model=self._model)

    def on_usage(self, usage: Usage, *, took_s: float) -> None:
        """Count the tokens of a request that was answered in full."""
        meter, model = self.meter, self._model
        meter.inc(c.PROMPT_TOKENS, usage.prompt_tokens, model=model)
        meter.inc(c.CACHED_TOKENS, usage.cached_tokens, model=model)
        meter.inc(c.GENERATED_TOKENS, usage.completion_tokens, model=model)
        meter.observe(c.E2E, took_s, model=model)

    def on_group_answered(
        self, request_id: str, usage: Usage, *, first_token_s: float, arrived_s: float, now_s: float
    ) -> None:
        """Count a request whose answer was made of many sequences: a beam search, or embeddings."""
        self.on_usage(usage, took_s=now_s - arrived_s)
        ttft_s = first_token_s - arrived_s if first_token_s else None
        self.recent_requests.answered(request_id, usage, ttft_s=ttft_s)
        self._genai_answered(request_id, usage, ttft_s=ttft_s)

    def on_answered(self, response: ResponseStream, *, arrived_s: float) -> None:
        """Count a request that was answered in full: its tokens, and when they came."""
        meter, model = self.meter, self._model
        usage = response.usage()
        self.on_usage(usage, took_s=response.now_s() - arrived_s)
        self._record_timings(response, usage, arrived_s=arrived_s)
        if first_token_s := response.first_token_s:
            meter.observe(c.TTFT, first_token_s - arrived_s, model=model)
            self._on_parts(response, arrived_s)
        for choice in response.choices:
            if (tpot_s := choice.tpot_s) is not None:
                meter.observe(c.TPOT, tpot_s, model=model)

    def _record_timings(self, response: ResponseStream, usage: Usage, *, arrived_s: float) -> None:
        choice = first_of(response.choices)
        tpots_s = [tpot_s for choice in response.choices if (tpot_s := choice.tpot_s) is not None]
        ttft_s = response.first_token_s - arrived_s if response.first_token_s else None
        reasons = [one.finish_reason for one in response.choices]
        self._genai_answered(
            request_of(choice.seq_id), usage, reasons=reasons, ttft_s=ttft_s, tpots_s=tpots_s
        )
        self.recent_requests.answered(
            request_of(choice.seq_id),
            usage,
            ttft_s=ttft_s,
            tpot_s=max(tpots_s, default=None),
            edge=response.edge,
            latency_breakdown=choice.latency_breakdown,
            served=choice.served,
        )

    def _on_parts(self, response: ResponseStream, arrived_s: float) -> None:
        choice = first_of(response.choices)
        request_id = request_of(choice.seq_id)
        ago_s = response.now_s() - arrived_s
        for part, seconds in parts_of(response.edge, choice):
            self.meter.observe(c.TTFT_PART, seconds, model=self._model, part=part)
            ago_s -= seconds
            if seconds > 0:
                self.spans.record(request_id, f"ttft.{part}", seconds, ended_ago_s=max(0.0, ago_s))

    def on_end(
        self, request_id: str, outcome: RequestOutcome, error: str, verdict: RequestVerdict | None,
        objectives: RequestObjectives, tenant: str, now_s: float | None = None,
    ) -> None:  # fmt: skip
        """Count the end of a request, once for each. `verdict` None: the request could never work, and does
        not count as offered."""
        self._genai_ended(request_id, outcome, now_s)
        self.close(request_id, outcome, error)
        if verdict is not None:
            self.on_verdict(objectives.slo_class, tenant, verdict)
        self.recent_requests.end(
            request_id, outcome=outcome, error=error, verdict=verdict, objectives=objectives, tenant=tenant
        )

    def on_verdict(self, slo_class: str, tenant: str, verdict: RequestVerdict) -> None:
        """Count the verdict of an offered request, once for each. Tenants beyond `TENANT_LABELS_MAX` are
        counted together."""
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANT_LABELS_MAX:
                tenant = "other"
            self._tenants.add(tenant)
        named = slo_class or "none"
        self.meter.inc(
            c.SLO_REQUESTS, model=self._model, slo_class=named, tenant=tenant, outcome=verdict.value
        )
