"""A wrong setup is one line and exit status 2, never a traceback."""

import json
import socket
import subprocess
import sys

import pytest

from tests.integration.cluster import ROOT
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def baton(*args):
    return subprocess.run(
        [sys.executable, "-m", "baton", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "tiny", "llama")


def broken_config(model):
    (model / "config.json").write_text("{")


def no_weights(model):
    for f in model.glob("*.safetensors"):
        f.unlink()


def unsupported(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "architectures": ["T5ForConditionalGeneration"]})
    )


def truncated(model):
    path = next(model.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1000])


CASES = {
    "broken config.json": (broken_config, (), "config.json"),
    "no weights": (no_weights, (), "safetensors"),
    "unsupported architecture": (unsupported, (), "T5ForConditionalGeneration"),
    "truncated weights": (truncated, (), "safetensors"),
    "no memory for one block": (None, ("--set", "engine.kv_bytes=64"), "kv_bytes"),
    "unknown knob": (None, ("--set", "engine.nonsense=1"), "engine.nonsense"),
    "knob out of range": (None, ("--set", "engine.block_tokens=0"), "engine.block_tokens"),
}


def assert_one_clear_line(result, names):
    said = (result.stdout + result.stderr).strip()
    assert result.returncode == 2, said
    assert "Traceback" not in said
    assert names in said
    assert len(result.stderr.strip().splitlines()) <= 2, said


@pytest.mark.parametrize("case", CASES)
def test_wrong_setup(case, tmp_path):
    spoil, extra, names = CASES[case]
    model = make_model(tmp_path / "tiny", "llama")
    if spoil:
        spoil(model)
    assert_one_clear_line(baton("serve", "--model", model, "--port", 0, *extra), names)


def test_missing_folder(tmp_path):
    assert_one_clear_line(baton("serve", "--model", tmp_path / "nowhere", "--port", 0), "nowhere")


def test_occupied_port(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_one_clear_line(baton("serve", "--model", model, "--port", port), str(port))


@pytest.mark.parametrize(
    "command", ["serve", "router", "worker", "replay", "sim", "doctor", "config", "bench"]
)
def test_every_command_has_help_with_an_example(command):
    result = baton(command, "--help")
    assert result.returncode == 0
    assert f"baton {command}" in result.stdout
