"""Spans sent as OTLP over HTTP (protobuf), which Langfuse and other tools take instead of gRPC.

Source: opentelemetry.io/docs/specs/otlp, "OTLP/HTTP".
"""

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""The exporters of OpenTelemetry wait as long. The thread of the batch waits, and nobody else."""


def headers_of(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the headers that OpenTelemetry's variables name, such as a key: `name=value,name=value`, with
    values in URL encoding."""
    text = environment.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or environment.get(
        "OTEL_EXPORTER_OTLP_HEADERS", ""
    )
    pairs = (one.partition("=") for one in text.split(",") if "=" in one)
    return {name.strip().lower(): unquote(value.strip()) for name, _, value in pairs}


class HttpSpanExporter(SpanExporter):
    """Posts batches of spans to one address. A batch that is not taken is lost, and said in the log once
    until the next is taken."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        """`endpoint` is the whole address, as a rule ending with /v1/traces."""
        self._endpoint = endpoint
        self._headers = {**headers, "content-type": "application/x-protobuf"}
        self._is_told = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        data = encode_spans(spans).SerializeToString()
        request = urllib.request.Request(self._endpoint, data, self._headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                self._is_told = False
                return SpanExportResult.SUCCESS
        except (urllib.error.URLError, OSError, ValueError) as error:
            if not self._is_told:
                log.warning("spans are not taken by %s: %s", self._endpoint, error)
            self._is_told = True
            return SpanExportResult.FAILURE
