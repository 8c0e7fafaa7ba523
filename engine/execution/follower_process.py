"""Processes of followers, for the leader and for the other hosts of a worker. Starting one needs no torch.

`python -m engine.execution.follower_process MODULE PARENT_PID` runs `MODULE.main(PARENT_PID)`.
"""

import contextlib
import importlib
import logging
import os
import subprocess
import sys

from baton.core import garbage


def start_follower(setup: bytes, *, module: str = "engine.execution.follower") -> subprocess.Popen[bytes]:
    """Start a process that reads its setup, as JSON (a `FollowerSetup` or what else the module reads), and
    ends with the thread that calls this."""
    command = [sys.executable, "-m", __name__, module, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its end is noticed anyway
        pipe.write(setup)
    return process


def how_ended(process: subprocess.Popen[bytes]) -> str:
    """How a process has ended; empty: it runs."""
    code = process.poll()
    if code is None:
        return ""
    return f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}"


def _run(module: str, parent_pid: int) -> int:
    with garbage.uncollected():
        follower = importlib.import_module(module)
    code: int = follower.main(parent_pid)
    logging.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1], int(sys.argv[2])))
