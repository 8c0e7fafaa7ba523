"""The chart's pods that need no torch, run on podman as a kubelet would. `make pods` runs all of them."""

import subprocess
import sys

import pytest

from tests.pods.images import check_host
from tests.unit.deploy.chart import ROOT

IMAGE = "localhost/baton/light:0.1.0"
RUN_S = 600


def _has_image():
    asked = subprocess.run(["podman", "image", "exists", IMAGE], capture_output=True, timeout=60)
    return asked.returncode == 0


def _why_nothing_starts():
    """What podman says when it cannot start a container here at all; empty: it can."""
    tried = ["podman", "run", "--rm", "--read-only", "--network", "none", IMAGE, "--help"]
    asked = subprocess.run(tried, capture_output=True, text=True, timeout=120)
    return "" if asked.returncode == 0 else asked.stderr.strip()[-300:] or "it says nothing"


@pytest.mark.timeout(RUN_S + 60)
def test_head_control_plane_and_router_live_and_end_as_their_manifests_say():
    if missing := check_host():
        pytest.skip(missing)
    if not _has_image():
        pytest.skip(f"no image {IMAGE}: `make pods` builds it")
    if reason := _why_nothing_starts():
        pytest.skip(f"podman starts no container on this machine: {reason}")
    command = [sys.executable, "-m", "tests.pods", "cpu-one-machine", "--only", "ray-head,control,router"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dashboard: signed in to" in done.stdout
    assert "Everything held." in done.stdout
