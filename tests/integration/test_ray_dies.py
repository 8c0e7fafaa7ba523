"""Nothing can be started any more without Ray, so the whole process ends, for a supervisor to restart it."""

import os
import signal

import psutil
import pytest

from tests.integration.cluster import Cluster
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "tiny", "llama")


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_serve_ends_at_once_and_leaves_nothing_behind(model, name):
    cluster = Cluster(model)
    cluster.__enter__()
    try:
        family = psutil.Process(cluster.process.pid).children(recursive=True)
        (victim,) = [p for p in family if p.name() == name]
        os.kill(victim.pid, signal.SIGKILL)
        assert cluster.process.wait(30) == 1
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
        told = [line for line in cluster.log if f"Ray's {name} " in line]
        assert len(told) == 1
        assert "Traceback" not in "\n".join(cluster.log)
    finally:
        cluster.kill()
