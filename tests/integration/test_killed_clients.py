"""Clients that are killed in mid-stream, by every API: the gauges of all processes return to rest."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest

from baton.telemetry import catalogue as cat
from tests.integration.cluster import Cluster, eventually
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EACH = 4
AT_REST = (
    *(cat.RUNNING, cat.WAITING, cat.LEASED, cat.HELD_BLOCKS, cat.QUARANTINED_BLOCKS),
    *(cat.QUEUED, cat.IN_FLIGHT),
)
MESSAGES = [{"role": "user", "content": "a long story"}]
BODIES = {
    "/v1/completions": {"prompt": "a long story", "max_tokens": 6000},
    "/v1/completions?two": {"prompt": "two long stories", "n": 2, "max_tokens": 6000},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 6000},
    "/v1/responses": {"input": "a long story", "max_output_tokens": 6000},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 6000},
}
STREAMS = sum(EACH * body.get("n", 1) for body in BODIES.values())
CLIENT = """
import http.client, sys
port, path, body = sys.argv[1:]
link = http.client.HTTPConnection("127.0.0.1", int(port))
link.request("POST", path, body, {"Content-Type": "application/json"})
answer, events = link.getresponse(), 0
while line := answer.readline():
    events += line.startswith(b"data:")
    if events == 12 and line.startswith(b"data:"):
        print("streaming", flush=True)
print("ended", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("m") / "tiny-llama", "llama", seed=5)
    with Cluster(path, model__dtype="float32", engine__block_tokens=16) as cluster:
        yield cluster


def gauges(cluster):
    """Return the sum of each gauge over the router's and all workers' own exporters."""
    joined = re.findall(r"worker \S+ joined at .*metrics at (http://\S+/metrics)", "\n".join(cluster.log))
    assert len(joined) == 2
    texts = [httpx.get(url).text for url in (f"{cluster.url}/metrics", *joined)]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    found = {
        metric.name: [line for line in lines if line.startswith(metric.name + "{")] for metric in AT_REST
    }
    assert all(found.values()), f"not exported: {[name for name, series in found.items() if not series]}"
    return {name: sum(float(line.rsplit(" ", 1)[1]) for line in series) for name, series in found.items()}


def test_killed_clients_of_every_api_leave_the_gauges_at_rest(cluster):
    before = cluster.metric(cat.REQUESTS.name, outcome="cancelled")
    clients = []
    try:
        for path, body in BODIES.items():
            asked = json.dumps({"model": cluster.model, "stream": True, "ignore_eos": True} | body)
            command = [sys.executable, "-c", CLIENT, str(cluster.port), path, asked]
            clients += [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(EACH)]
        assert [client.stdout.readline() for client in clients] == ["streaming\n"] * len(clients)
        eventually("all sequences run", lambda: gauges(cluster)[cat.RUNNING.name] == STREAMS, timeout_s=30)
    finally:
        for client in clients:
            client.send_signal(signal.SIGKILL)
            client.wait(10)
            client.stdout.close()
    eventually(
        "every client that left is counted",
        lambda: cluster.metric(cat.REQUESTS.name, outcome="cancelled") == before + len(clients),
        timeout_s=30,
    )
    eventually("all gauges at rest", lambda: not any(gauges(cluster).values()), timeout_s=30)
    cluster.assert_idle()
    assert cluster.complete("hello", max_tokens=4)["usage"]["completion_tokens"] == 4
