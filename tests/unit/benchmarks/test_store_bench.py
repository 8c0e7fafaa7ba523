import json
import shutil

import pytest
from typer.testing import CliRunner

from baton.core.errors import SetupError
from commands.bench import app


@pytest.mark.parametrize("has_fio", [True, False])
def test_every_path_has_a_rate_beside_its_limit_and_nothing_is_left(tmp_path, monkeypatch, has_fio):
    if not has_fio:
        monkeypatch.setattr(shutil, "which", lambda _name: None)
    elif shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    sizes = ["--block-bytes", "20000", "--blocks", "8", "--disk-blocks", "8", "--rounds", "1"]
    done = CliRunner().invoke(app, ["store", "--dir", str(tmp_path), *sizes, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    by_path = {rate["path"]: rate for rate in result["rates"]}
    assert by_path["pool to arena"]["beside"].startswith("memcpy")
    for what in ("SSD write, new file", "SSD write", "SSD read"):
        assert by_path[what]["beside"].startswith("fio" if has_fio else "bare threads")
        assert by_path[what]["ratio"] > 0
    assert result["recovery_labels_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--io", "fast"], "--io fast"),
        (["--dir", "/nowhere"], "--dir /nowhere"),
        (["--block-bytes", "1073741824", "--blocks", "1048576"], "--blocks"),
    ],
)
def test_what_cannot_be_measured_is_said(options, words):
    small = ["--blocks", "8", "--block-bytes", "4096", "--rounds", "1"]
    done = CliRunner().invoke(app, ["store", *small, *options])
    assert isinstance(done.exception, SetupError)
    assert words in str(done.exception)
