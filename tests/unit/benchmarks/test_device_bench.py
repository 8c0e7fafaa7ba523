"""What `baton bench gpu` measures, on a tiny model and the CPU: the device only changes the figures."""

import pytest
import torch
from typer.testing import CliRunner

from baton.core.errors import SetupError
from benchmarks import device, limits
from benchmarks.device_model import DeviceModelSizes, make_device_model
from benchmarks.gpu_cli import gpu

TINY = DeviceModelSizes(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=300)


@pytest.fixture
def folder(tmp_path):
    return make_device_model(tmp_path / "tiny", TINY, torch.device("cpu"))


def test_the_model_is_transformers_own(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    read = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name)
    assert read == TINY.matrix_parameters
    assert AutoTokenizer.from_pretrained(folder).decode([7]) == "w7"


def test_every_step_is_timed_beside_its_limit(folder, monkeypatch):
    monkeypatch.setattr(device, "PREFILLS", (8, 24))
    monkeypatch.setattr(device, "DECODES", ((1, 16), (3, 16), (4, 10**9)))
    monkeypatch.setattr(limits, "read_bandwidth", lambda _: 1e9)
    monkeypatch.setattr(limits, "matmul_rate", lambda *_: 1e9)
    told: list[str] = []
    steps = device.measure_steps(folder, "cpu", TINY, 2, told.append)
    assert [one.name for one in steps] == ["prefill 8", "prefill 24", "decode 1 x 16", "decode 3 x 16"]
    assert all(one.alone_s > 0 and one.ahead_s > 0 for one in steps)
    assert steps[2].limit_s == pytest.approx((2 * TINY.matrix_parameters + 16 * 2 * 2 * 2 * 16 * 2) / 1e9)
    assert any("does not hold it" in line for line in told)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cpu"}, "this is for GPUs"),
        ({"size": "9b"}, "choose one of 1b, 8b"),
    ],
)
def test_a_wrong_option_says_what_to_do(options, expected):
    with pytest.raises(SetupError, match=expected):
        gpu(**options)


def test_help_has_an_example():
    import typer

    app = typer.Typer()
    app.command()(gpu)
    assert "baton bench gpu --peer" in CliRunner().invoke(app, ["--help"], terminal_width=200).output
