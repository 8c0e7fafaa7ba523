"""Processes of followers, for the leader and for the other hosts of a worker. It needs no torch."""

import contextlib
import os
import subprocess
import sys


def start_follower(setup: bytes, *, module: str = "engine.execution.follower") -> subprocess.Popen[bytes]:
    """Start a process that reads its setup, as JSON (a `FollowerSetup` or what else the module reads), and
    ends with the thread that calls this."""
    command = [sys.executable, "-m", module, str(os.getpid())]
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
