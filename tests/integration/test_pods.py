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


@pytest.mark.timeout(RUN_S + 60)
def test_head_control_plane_and_router_live_and_end_as_their_manifests_say():
    if missing := check_host():
        pytest.skip(missing)
    if not _has_image():
        pytest.skip(f"no image {IMAGE}: `make pods` builds it")
    command = [sys.executable, "-m", "tests.pods", "cpu-one-machine", "--only", "ray-head,control,router"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dashboard: signed in to" in done.stdout
    assert "Everything held." in done.stdout
