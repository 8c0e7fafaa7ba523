"""A wrong setup is one line and exit status 2, never a traceback. The lines themselves are tested with the
parts that print them. These tests check that they come out of the command, and before anything is started."""

import json
import socket
import subprocess
import sys

import pytest

from commands.app import app
from commands.run import run_app
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


def t5(model):
    config = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 512}
    (model / "config.json").write_text(json.dumps(config))


def truncated(model):
    path = next(model.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1000])


CASES = {
    "unsupported architecture": (
        t5,
        (),
        "architecture T5ForConditionalGeneration is not supported",
    ),
    "truncated weights": (truncated, (), "model.safetensors is truncated"),
    "unknown setting": (None, ("--set", "engine.nonsense=1"), "engine.nonsense"),
    "bad directory": (None, ("--store", "redis://:s3cret@h:99999"), "redis://***@h:99999: hosts are"),
    "setting out of range": (None, ("--set", "engine.block_tokens=0"), "engine.block_tokens"),
}


def assert_one_clear_line(result, names):
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    # Workers that joined before the error are logged; the error itself is one line.
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("baton: ")
    assert names in lines[0]


@pytest.mark.parametrize("case", CASES)
def test_wrong_setup(case, tmp_path):
    spoil, extra, names = CASES[case]
    model = make_model(tmp_path / "tiny", "llama")
    if spoil:
        spoil(model)
    assert_one_clear_line(baton("serve", "--model", model, "--port", 0, *extra), names)


def test_what_only_the_workers_can_find_is_one_line_too(tmp_path):
    """config.json asks for a shape that the checkpoint does not have."""
    model = make_model(tmp_path / "tiny", "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    assert_one_clear_line(baton("serve", "--model", model, "--port", 0), "has shape")


def test_what_only_the_router_can_find_is_one_line_too(tmp_path):
    model = make_model(tmp_path / "tiny", "llama")
    (model / "tokenizer.json").write_text("{")
    assert_one_clear_line(baton("serve", "--model", model, "--port", 0), "tokenizer")


def test_control_checks_too(tmp_path):
    assert_one_clear_line(baton("control", "--model", tmp_path / "nowhere"), "nowhere")


def test_occupied_port(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_one_clear_line(baton("serve", "--model", model, "--port", port), str(port))


@pytest.mark.parametrize(
    "command", ["serve", "router", "worker", "replay", "sim", "doctor", "config", "bench"]
)
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        run_app(app, name="baton", args=[command, "--help"])
    assert ended.value.code == 0
    assert f"baton {command}" in capsys.readouterr().out
