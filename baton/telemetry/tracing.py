"""Spans over the life of a request: router → prefill → transfer → decode.

Decisions are pure and know nothing of spans; adapters open and close them here, by key. The context
crosses processes as a W3C traceparent in StartSequence.
"""

import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.config import TelemetryConfig

OPEN_SPANS_MAX = 20_000
"""More than this and the oldest is closed: a leak must not take the process with it."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Spans:
    """This process's open spans, by key. Costs next to nothing while nothing is exported."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("baton") if provider else None
        self._open: OrderedDict[Hashable, trace.Span] = OrderedDict()

    def open(
        self, key: Hashable, name: str, *, parent: str = "", is_server: bool = False, **attributes: Any
    ) -> str:
        """Start a span; `parent` is a traceparent or empty, and `is_server` says that it answers a client.
        Returns the new span's traceparent, empty when tracing is off."""
        if self._tracer is None:
            return ""
        context = _PROPAGATOR.extract({"traceparent": parent}) if parent else None
        kind = trace.SpanKind.SERVER if is_server else trace.SpanKind.INTERNAL
        span = self._tracer.start_span(name, context=context, kind=kind, attributes=attributes)
        self._open[key] = span
        if len(self._open) > OPEN_SPANS_MAX:
            self._open.popitem(last=False)[1].end()
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        return carrier["traceparent"]

    def note(self, key: Hashable, event: str, **attributes: Any) -> None:
        """Add an event to an open span; unknown key: nothing."""
        if (span := self._open.get(key)) is not None:
            span.add_event(event, attributes)

    @property
    def is_on(self) -> bool:
        """True if spans are exported."""
        return self._tracer is not None

    def describe(self, key: Hashable, attributes: Mapping[str, Any], *, name: str = "") -> None:
        """Add attributes to an open span, and give it a new name if there is one; unknown key: nothing."""
        if (span := self._open.get(key)) is not None:
            span.set_attributes(dict(attributes))
            if name:
                span.update_name(name)

    def record(
        self, key: Hashable, name: str, seconds: float, *, ended_ago_s: float = 0.0, **attributes: Any
    ) -> None:
        """A span that took `seconds` and is over, child of the open span `key`, if there is one."""
        if self._tracer is None or (parent := self._open.get(key)) is None:
            return
        end_ns = time.time_ns() - int(ended_ago_s * 1e9)
        context = trace.set_span_in_context(parent)
        start_ns = end_ns - int(seconds * 1e9)
        span = self._tracer.start_span(name, context=context, start_time=start_ns, attributes=attributes)
        span.end(end_ns)

    def close(self, key: Hashable, *, error: str = "", **attributes: Any) -> None:
        """End a span; unknown key: nothing."""
        span = self._open.pop(key, None)
        if span is None:
            return
        span.set_attributes(attributes)
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end()

    def shutdown(self) -> None:
        """Close what is open and send what is buffered."""
        for key in list(self._open):
            self.close(key, error="process ended")
        if self._provider is not None:
            self._provider.shutdown()


def spans_for(
    process: str,
    config: TelemetryConfig,
    exporter: SpanExporter | None = None,
    *,
    facts: Mapping[str, str] | None = None,
) -> Spans:
    """Spans of one process ("router", "decode-0"); `exporter` overrides the configured one (tests). `facts`
    are further attributes of the process."""
    facts = {"service.name": "baton", "service.instance.id": process, **(facts or {})}
    if exporter is not None:
        return Spans(_provider(facts, SimpleSpanProcessor(exporter)))
    if not config.otlp_endpoint:
        return Spans(None)
    # Imported late: it takes a third of a second, and most installations do not export.
    if is_http(config.otlp_endpoint):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

        return Spans(_provider(facts, BatchSpanProcessor(HttpSpanExporter(config.otlp_endpoint))))
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    otlp = OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=not _is_tls(config.otlp_endpoint))
    return Spans(_provider(facts, BatchSpanProcessor(otlp)))


def is_http(endpoint: str) -> bool:
    """Whether spans go by HTTP: to an address with a path, which gRPC has not."""
    parts = urlsplit(endpoint)
    return parts.scheme in ("http", "https") and bool(parts.path.strip("/"))


def _is_tls(endpoint: str) -> bool:
    return endpoint.startswith("https://")


def _provider(
    facts: Mapping[str, str], processor: BatchSpanProcessor | SimpleSpanProcessor
) -> TracerProvider:
    provider = TracerProvider(resource=Resource.create(dict(facts)))
    provider.add_span_processor(processor)
    return provider


__all__ = ["Spans", "spans_for"]
