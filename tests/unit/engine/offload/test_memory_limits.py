"""A model larger than the memory that one rank is allowed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import make_model

LIMIT_MIB = 188
"""The packed layers have 192 MiB, and one has 16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("model"),
        "llama",
        with_tokenizer=False,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
    )


def run(folder: Path, *arguments: str, limit_mib: int = LIMIT_MIB) -> str:
    module = "tests.unit.engine.offload.limited_load"
    shape, offload = arguments
    command = [
        sys.executable,
        "-m",
        module,
        str(folder),
        shape,
        offload,
        str(limit_mib),
        str(folder / "layers"),
    ]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_served_by_two_ranks_and_by_one_that_streams(folder: Path) -> None:
    """One rank without streaming says what to do; more ranks under the same limit, and streamed layers, give
    the tokens that one gives without a limit."""
    expected = run(folder, "1", "0", limit_mib=0)
    assert expected.startswith("tokens: [")
    refused = run(folder, "1", "0")
    assert refused.startswith("refused: the weights of this rank need ")
    assert "ulimit -d" in refused
    assert "model.offload" in refused
    assert "engine.shape" in refused
    assert run(folder, "1", "all") == expected
    assert run(folder, "tp2", "0") == expected
