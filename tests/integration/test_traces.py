"""One trace spans router, prefill, transfer and decode, and arrives at a collector over OTLP."""

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.integration.cluster import Cluster, eventually
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span, with the process it came from."""

    def __init__(self):
        self._lock = Lock()
        self.spans = []

    def Export(self, request, context):
        with self._lock:
            for resource in request.resource_spans:
                facts = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(facts["service.instance.id"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self):
        """name -> (process, span) of the trace that has the most spans."""
        with self._lock:
            traces = {}
            for process, span in self.spans:
                traces.setdefault(span.trace_id, {})[span.name] = (process, span)
        return max(traces.values(), key=len, default={})


@pytest.fixture
def collector():
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer
    server.stop(0).wait(10)


def test_a_request_is_one_trace_through_all_processes(collector, tmp_path):
    model = make_model(tmp_path / "tiny", "llama", seed=2)
    endpoint = f"http://127.0.0.1:{collector.port}"
    wanted = {"request", "prefill", "kv.transfer", "decode"}
    with Cluster(model, model__dtype="float32", telemetry__otlp_endpoint=endpoint) as cluster:
        cluster.complete(list(range(5, 300)), max_tokens=8, ignore_eos=True)
        trace = eventually(
            "a whole trace",
            lambda: (found := collector.trace()) and wanted <= found.keys() and found,
            timeout_s=30,
        )
    request = trace["request"][1]
    assert trace["prefill"][1].parent_span_id == trace["decode"][1].parent_span_id == request.span_id
    assert trace["kv.transfer"][1].parent_span_id == trace["decode"][1].span_id
    processes = {trace[name][0].split(".")[0] for name in ("request", "prefill", "decode")}
    assert len(processes) == 3
    moved = {a.key: a.value.int_value for a in trace["kv.transfer"][1].attributes}
    assert moved["bytes"] > 0
