import json
import logging

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.config import TelemetryConfig
from baton.telemetry import catalogue as cat
from baton.telemetry.logs import configure_logs
from baton.telemetry.metrics import Meter
from baton.telemetry.tracing import OPEN_SPANS_MAX, is_http, spans_for


def test_a_counted_metric_is_rendered_with_its_labels():
    meter = Meter()
    meter.inc(cat.REQUESTS, model="m", outcome="completed")
    meter.inc(cat.REQUESTS, 2, model="m", outcome="completed")
    meter.observe(cat.TTFT, 0.25, model="m")
    text = meter.render().decode()
    assert 'baton_requests_total{model="m",outcome="completed"} 3.0' in text
    assert 'baton_ttft_seconds_bucket{le="0.3",model="m"} 1.0' in text
    assert meter.value(cat.REQUESTS, model="m", outcome="completed") == 3


def test_forgotten_series_are_gone_and_may_come_back():
    meter = Meter()
    meter.set(cat.IN_FLIGHT, 4, worker="w")
    meter.forget(cat.IN_FLIGHT, worker="w")
    assert 'worker="w"' not in meter.render().decode()
    meter.set(cat.IN_FLIGHT, 1, worker="w")
    assert meter.value(cat.IN_FLIGHT, worker="w") == 1


def test_undeclared_labels_are_a_bug():
    with pytest.raises(AssertionError, match="labels"):
        Meter().inc(cat.REQUESTS, color="red")


def test_every_metric_can_be_created_and_names_are_unique():
    meter = Meter()
    for metric in cat.CATALOGUE:
        labels = dict.fromkeys(metric.labels, "x")
        {"counter": meter.inc, "gauge": meter.set, "histogram": meter.observe}[metric.kind](
            metric, 1, **labels
        )
    assert len({metric.name for metric in cat.CATALOGUE}) == len(cat.CATALOGUE) > 20


def test_a_trace_crosses_processes():
    sent = InMemorySpanExporter()
    router, worker = (spans_for(p, TelemetryConfig(), sent) for p in ("router", "decode-0"))
    parent = router.open("r", "request", model="m")
    child = worker.open("s", "decode", parent=parent)
    worker.note("s", "joined", bytes=3)
    worker.close("s", tokens=2)
    router.close("r", error="client gone")
    assert parent != child
    decode, request = sent.get_finished_spans()
    assert decode.context.trace_id == request.context.trace_id
    assert decode.parent.span_id == request.context.span_id
    assert decode.attributes["tokens"] == 2
    assert not request.status.is_ok
    assert not router._open
    assert not worker._open


def test_a_process_may_say_more_of_itself():
    sent = InMemorySpanExporter()
    spans = spans_for("decode-0", TelemetryConfig(), sent, facts={"baton.worker.shape": "tp2"})
    spans.open("a", "request")
    spans.close("a")
    (span,) = sent.get_finished_spans()
    assert span.resource.attributes["baton.worker.shape"] == "tp2"
    assert span.resource.attributes["service.instance.id"] == "decode-0"


def test_open_spans_are_bounded():
    spans = spans_for("p", TelemetryConfig(), InMemorySpanExporter())
    for i in range(OPEN_SPANS_MAX + 5):
        spans.open(i, "s")
    assert len(spans._open) == OPEN_SPANS_MAX


def test_tracing_off_costs_nothing_and_breaks_nothing():
    spans = spans_for("p", TelemetryConfig())
    assert spans.open("k", "s") == ""
    spans.close("k")
    spans.shutdown()


def test_json_logs_are_one_object_per_line(capsys):
    before = logging.getLogger().handlers
    try:
        configure_logs("router", TelemetryConfig(log_json=True))
        logging.getLogger("x").warning("said %s", "this")
        assert '"process": "router"' in (line := capsys.readouterr().err)
        assert '"message": "said this"' in line
        logging.getLogger("x").info("of one", extra={"fields": {"request_id": "cmpl-1"}})
        assert json.loads(capsys.readouterr().err)["request_id"] == "cmpl-1"
    finally:
        logging.getLogger().handlers = before


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        *(
            (one, False)
            for one in ("http://collector:4317", "https://c:4317/", "collector:4317", "10.0.0.1:4317")
        ),
        *((one, True) for one in ("http://collector:4318/v1/traces", "https://c/api/public/otel/v1/traces")),
    ],
)
def test_an_endpoint_with_a_path_is_spoken_to_by_http(endpoint, expected):
    assert is_http(endpoint) is expected
