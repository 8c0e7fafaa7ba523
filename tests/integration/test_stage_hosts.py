"""Stages of a worker on Ray nodes in network namespaces, with mutual TLS: tokens, hand-over, lost nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import SetupError
from benchmarks.chaos.namespaces import check_namespaces
from tests.integration.cluster import ROOT, bytes_read
from tests.integration.stage_hosts import STREAMED
from tests.integration.test_tokens import Reference
from tests.models import make_model


def why_not() -> str:
    """Why hosts cannot be made here; empty: they can."""
    try:
        check_namespaces()
    except SetupError as error:
        return str(error)
    return ""


pytest.importorskip("cryptography")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def drill(tmp_path: Path, *words: str) -> tuple[Path, dict[str, Any]]:
    """The model, and what was seen."""
    model = make_model(tmp_path / "model", "llama", seed=3, num_hidden_layers=4)
    folder = tmp_path / "drill"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.stage_hosts", str(folder), str(model), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]} {done.stderr[-6000:]}"
    return model, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("fault", ["lose follower", "lose leader", "cut follower"])
def test_a_worker_of_stages_on_two_hosts_outlives_the_loss_of_either(tmp_path: Path, fault: str) -> None:
    model, report = drill(tmp_path, fault, "--aggregated", "1xpp2")
    for placed in (report["placed"], report["placed_again"]):
        assert sorted(placed.values()) == [["follower"], ["leader"]], "each on a host of its own"
    reference = Reference(model)
    for prompt, tokens, streamed in zip(report["prompts"], report["tokens"], report["streamed"], strict=True):
        assert len(tokens) == 24
        assert tokens == reference.greedy(prompt, tokens)
        assert len(streamed) == STREAMED
        assert streamed == reference.greedy(prompt, streamed)
    assert report["streams_under_way"] > 0
    assert report["left"] == {}


@pytest.mark.parametrize(("prefill", "decode"), [("1xpp2", "1"), ("1", "1xpp2")])
def test_stages_on_two_hosts_hand_over_to_another_worker_and_take_over(
    tmp_path: Path, prefill: str, decode: str
) -> None:
    model, report = drill(tmp_path, "none", "--prefill", prefill, "--decode", decode)
    assert sorted(report["placed"].values()) == [["follower"], ["leader"], ["leader"]], "each on its own host"
    reference = Reference(model)
    for prompt, tokens in zip(report["prompts"], report["tokens"], strict=True):
        assert len(tokens) == 24
        assert tokens == reference.greedy(prompt, tokens)
    seen = report["accounts"]
    blocks = sum(-(-len(prompt) // 16) for prompt in report["prompts"])
    assert bytes_read(seen["decode"]) >= blocks * seen["decode"]["block_bytes"]
    assert seen["decode"]["step_tokens.prefill"] == 0
    assert seen["prefill"]["step_tokens.decode"] == 0
    assert not any(n for name, n in seen["decode"].items() if name.endswith(".reads_failed"))
    assert report["left"] == {}
