"""Two days of load during which a node, the control plane and Redis die and all workers are replaced: nothing
is lost, and every answer is that of an undisturbed run."""

import json
import os
import subprocess
import sys

import pytest

from tests.contract.redis_servers import EXECUTABLE, EXECUTABLES
from tests.integration.cluster import ROOT
from tests.models import make_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not EXECUTABLES and not os.environ.get("CI"), reason="needs redis-server: apt-get install it"
    ),
]

SECONDS, RATE = 60, 3


def test_a_day_of_faults_costs_no_request_and_no_token(tmp_path):
    model = make_model(tmp_path / "tiny", "llama", seed=3)
    what = ["--model", str(model), "--seconds", str(SECONDS), "--rate", str(RATE), "--first-token", "10"]
    what += ["--set", f"engine.kv_bytes={32 * 2**20}", "--set", f"store.host_bytes={64 * 2**20}"]
    what += ["--set", "engine.self_timing_s=0.1"]  # some ten workers are started
    done = subprocess.run(
        [sys.executable, "-m", "baton", "bench", "faults", *what, "--json"],
        cwd=ROOT,
        env={**os.environ, "REDIS_SERVER": EXECUTABLE},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    report = result["report"]
    offered = SECONDS * RATE
    assert (report["offered"], report["completed"]) == (offered, offered)
    assert (report["refused"], report["failed"]) == (0, 0)
    assert report["answers"] == {"compared": offered, "differing": 0, "first_differing": []}
    goodput = [(w["offered"], w["met"], w["completed"]) for w in report["windows"]]
    assert sum(met for _, met, _ in goodput) == report["goodput"]["met"]
    assert all(completed == offered for offered, _, completed in goodput)
    names = [f["name"] for f in result["faults"]]
    assert names == ["node lost", "control plane killed", "Redis restarted", "rolling upgrade"]
    # Each waits for what those before it cost, which on a busy machine may be longer than the replay.
    at_s = [f["at_s"] for f in result["faults"]]
    assert 0 < at_s[0] < report["duration_s"]
    assert at_s == sorted(at_s)
    assert "adopted 3 of 3 workers" in result["faults"][1]["what"]
    (decision,) = result["decisions"]
    said = decision["who"], decision["reason"], decision["outcome"]
    assert said == ("drill", "a rolling upgrade under load", "done")
    assert {r["version"] for r in result["state"]["replicas"]} == {"2"}
    log = "\n".join(result["log"])
    for words in (" starts: after its process", "was adopted", "replaces it"):
        assert words in log, log
