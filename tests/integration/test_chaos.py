"""A short drill on hosts made of namespaces: processes are killed and frozen, and a link is cut.

Its hosts have no default route, so it also shows that every process finds the address under which the others
of its cluster reach it.
"""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from baton.core.errors import SetupError
from benchmarks.chaos.model import allow_tools
from benchmarks.chaos.namespaces import check_namespaces
from tests.contract.redis_servers import EXECUTABLE, EXECUTABLES
from tests.integration.cluster import ROOT, eventually
from tests.models import make_model


def why_not():
    """Why hosts cannot be made here; empty: they can."""
    if not EXECUTABLES:
        return "needs redis-server: apt-get install it"
    try:
        check_namespaces()
    except SetupError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
FAULTS = ("kill", "freeze", "cut", "flush", "clock")
OPTIONS = (
    "--minutes",
    "0.7",
    "--every",
    "7",
    "--seed",
    "5",
    "--prefill",
    "1",
    "--decode",
    "2",
    "--rate",
    "1",
    "--max-output",
    "192",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("m") / "tiny", "llama", seed=3)
    allow_tools(folder)
    return folder


def command(model, folder, *more):
    what = (*OPTIONS, "--faults", ",".join(FAULTS), "--model", str(model), "--folder", str(folder))
    return [sys.executable, "-m", "baton", "chaos", *what, *more]


def environment():
    return {**os.environ, "REDIS_SERVER": EXECUTABLE, "PYTHONPATH": str(ROOT)}


def test_a_drill_costs_no_answer_and_leaves_nothing(model, tmp_path):
    argv, folder = command(model, tmp_path / "drill"), tmp_path / "drill"
    done = subprocess.run(
        [*argv, "--json"], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=480
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]} {done.stderr[-3000:]}"
    report = json.loads(done.stdout)
    schedule = json.loads((folder / "schedule.json").read_text())
    assert [f["event"] for f in sorted(report["faults"], key=lambda f: f["event"]["number"])] == schedule
    assert {event["fault"] for event in schedule} <= set(FAULTS)
    assert not [f["what"] for f in report["faults"] if f["what"].startswith("not applied")]
    assert report["requests"] == report["attempts"]["answered"] == 42
    assert report["longest_wait"]["length_s"] > 0
    assert report["findings"] == []


def test_an_interrupted_drill_ends_all_that_it_started(model, tmp_path):
    """It is interrupted while the undisturbed run starts, when there are processes and namespaces already."""
    # A process that a shell starts in the background ignores the signal, and so would the drill.
    heeding = ["env", "--default-signal=INT", *command(model, tmp_path / "drill")]
    drill = subprocess.Popen(heeding, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert drill.stderr is not None
        next(line for line in drill.stderr if line.startswith("reference"))
        parent = psutil.Process(drill.pid)
        eventually(
            "a worker starts",
            lambda: any("worker" in p.cmdline() for p in parent.children(recursive=True)),
            timeout_s=30,
        )
        family = parent.children(recursive=True)
        drill.send_signal(signal.SIGINT)
        assert drill.wait(180) == 130
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
    finally:
        drill.kill()
        drill.communicate()
