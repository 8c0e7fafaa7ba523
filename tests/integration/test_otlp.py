"""A request as a receiver of OpenTelemetry gets it, over gRPC and over HTTP: spans, phases, attributes."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as wire
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

from tests.integration.cluster import Cluster, eventually
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


class Received:
    """The spans that came, by name, with the headers of each message."""

    def __init__(self):
        self._lock = threading.Lock()
        self._spans, self.headers = [], []

    def add(self, request, headers):
        with self._lock:
            self.headers.append({name.lower(): value for name, value in headers})
            for resource in request.resource_spans:
                process = {one.key: one.value.string_value for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self._spans += [(process["service.instance.id"], span) for span in scope.spans]

    def of_trace(self, trace_id):
        with self._lock:
            return [(process, span) for process, span in self._spans if span.trace_id == trace_id]

    def named(self, name):
        with self._lock:
            return [span for _, span in self._spans if span.name == name]


@contextlib.contextmanager
def grpc_receiver(received):
    class Traces(service.TraceServiceServicer):
        def Export(self, request, context):
            received.add(request, context.invocation_metadata())
            return wire.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    service.add_TraceServiceServicer_to_server(Traces(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(None).wait(10)


@contextlib.contextmanager
def http_receiver(received):
    class Traces(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            is_right = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if is_right:
                received.add(wire.ExportTraceServiceRequest.FromString(body), self.headers.items())
            self.send_response(200 if is_right else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Traces)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    server.shutdown()
    thread.join(10)
    server.server_close()


def value_of(attribute):
    kind = attribute.value.WhichOneof("value")
    if kind == "array_value":
        return [getattr(one, one.WhichOneof("value")) for one in attribute.value.array_value.values]
    return getattr(attribute.value, kind)


@pytest.mark.parametrize("receiver", [grpc_receiver, http_receiver], ids=["grpc", "http"])
def test_one_request_is_a_trace_with_phases_and_the_conventions_attributes(receiver, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    path, received = make_model(tmp_path / "tiny-llama", "llama", seed=5), Received()
    settings = {"model__dtype": "float32", "engine__block_tokens": 16}
    with (
        receiver(received) as endpoint,
        Cluster(path, telemetry__otlp_endpoint=endpoint, **settings) as cluster,
    ):
        body = {"model": cluster.model, "messages": [{"role": "user", "content": "word " * 60}]}
        body |= {"max_tokens": 8, "temperature": 0.5, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120).json()
        (chat,) = eventually(
            "the request's span arrives", lambda: received.named(f"chat {cluster.model}"), timeout_s=60
        )
        wanted = {"prefill", "decode", "kv.transfer", "ttft.prefill"}

        def whole():
            spans = received.of_trace(chat.trace_id)
            return spans if wanted <= {span.name for _, span in spans} else None

        spans = eventually("the spans of all processes arrive", whole, timeout_s=60)
        metrics = httpx.get(f"{cluster.url}/metrics", timeout=60).text
    attributes = {one.key: value_of(one) for one in chat.attributes}
    usage = answer["usage"]
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "baton"
    assert attributes["gen_ai.request.model"] == cluster.model
    assert attributes["gen_ai.request.max_tokens"] == 8
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.response.id"] == answer["id"]
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    assert not [key for key in attributes if "message" in key or "prompt" in key], "what was said is private"
    by_name = {span.name: (process, span) for process, span in spans}
    assert chat.kind == 2, "a server's span"
    ids = {span.span_id for _, span in spans}
    assert all(span.parent_span_id in ids for _, span in spans if span is not chat and span.name != chat.name)
    assert len({by_name[name][0] for name in ("prefill", "decode")}) == 2, "two workers"
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for _, span in spans)
    assert {one.get("authorization") for one in received.headers} == {"Basic abc"}
    labels = 'gen_ai_operation_name="chat",gen_ai_provider_name="baton",'
    labels += f'gen_ai_request_model="{cluster.model}"'
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        lines = [one for one in metrics.splitlines() if one.startswith(f"gen_ai_server_{name}_seconds_count")]
        assert [one for one in lines if labels in one and float(one.rpartition(" ")[2]) == 1], name
