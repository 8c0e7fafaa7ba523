"""Counts and traces what the driver and the edge do; decides nothing."""

from typing import Literal

from baton.core.errors import BatonError, ClientError, Overloaded
from baton.core.ids import SequenceId
from baton.telemetry import catalogue as c
from baton.telemetry.metrics import Meter
from baton.telemetry.tracing import Spans
from router.events import Note
from router.openai_response import Usage
from router.streaming import Exchange

Outcome = Literal["completed", "refused", "failed", "cancelled", "invalid"]


def outcome_of(error: BatonError) -> Outcome:
    if isinstance(error, ClientError):
        return "invalid"
    return "refused" if isinstance(error, Overloaded) else "failed"


def request_of(seq_id: SequenceId) -> str:
    return seq_id.rsplit("/", 1)[0]


class Observer:
    def __init__(self, meter: Meter, spans: Spans, *, model: str) -> None:
        self.meter, self.spans = meter, spans
        self._model = model

    def on_note(self, note: Note) -> None:
        self.spans.note(
            request_of(note.seq_id),
            note.what,
            sequence=note.seq_id,
            because=note.because,
            workers=list(note.worker_ids),
            seconds=note.seconds,
            bytes=note.bytes,
        )
        match note.what:
            case "placed":
                self.meter.inc(c.PLACEMENTS, kind="split" if len(note.worker_ids) > 1 else "whole")
            case "fallback":
                self.meter.inc(c.PLACEMENTS, kind="fallback")
            case "retried":
                assert note.cause is not None
                self.meter.inc(c.RETRIES, cause=note.cause.value)
            case "joined":
                self.meter.observe(c.HANDOVER, note.seconds)
            case _:
                pass

    def open(self, request_id: str, traceparent: str) -> str:
        """Returns the traceparent for what this request causes elsewhere."""
        return self.spans.open(request_id, "request", parent=traceparent, model=self._model)

    def close(self, request_id: str, outcome: Outcome, error: str = "") -> None:
        self.meter.inc(c.REQUESTS, model=self._model, outcome=outcome)
        self.spans.close(request_id, error=error, outcome=outcome)

    def on_slow_client(self) -> None:
        self.meter.inc(c.SLOW_CLIENTS)

    def on_usage(self, usage: Usage, *, took_s: float) -> None:
        """Of a request that was answered in full."""
        meter, model = self.meter, self._model
        meter.inc(c.PROMPT_TOKENS, usage.prompt_tokens, model=model)
        meter.inc(c.CACHED_TOKENS, usage.cached_tokens, model=model)
        meter.inc(c.GENERATED_TOKENS, usage.completion_tokens, model=model)
        meter.observe(c.E2E, took_s, model=model)

    def on_answered(self, exchange: Exchange, *, arrived_s: float) -> None:
        """The same, with when its tokens came."""
        meter, model = self.meter, self._model
        self.on_usage(exchange.usage(), took_s=exchange.now_s() - arrived_s)
        began_s = [choice.first_token_s for choice in exchange.choices if choice.first_token_s]
        if began_s:
            meter.observe(c.TTFT, min(began_s) - arrived_s, model=model)
        for choice in exchange.choices:
            if choice.token_count > 1:
                tpot_s = (choice.last_token_s - choice.first_token_s) / (choice.token_count - 1)
                meter.observe(c.TPOT, tpot_s, model=model)
