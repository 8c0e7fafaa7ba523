"""The model that `make serve` serves, for the tests that need a real one."""

import fcntl
import subprocess
import sys
from pathlib import Path

from tests.integration.cluster import ROOT

FETCHED = ROOT / "models/SmolLM2-135M-Instruct.gguf"


def fetched_model() -> Path:
    """Fetch the model if it is not there. Tests of other processes wait meanwhile: a second
    `baton fetch-model` of the same file refuses."""
    command = [sys.executable, "-m", "baton", "fetch-model", str(FETCHED)]
    with (ROOT / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, cwd=ROOT, timeout=300, check=True)
    return FETCHED
