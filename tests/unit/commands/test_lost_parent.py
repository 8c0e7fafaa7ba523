"""A child whose parent ended while the child started has nobody to report to: it ends, and says nothing."""

import os
import signal
import subprocess
import sys

import pytest

TELLS = "from commands.serve import tell_parent; tell_parent('ready x'); raise SystemExit('went on')"
IN_A_GROUP = """
import asyncio, signal
from commands.serve import tell_parent

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with asyncio.TaskGroup() as group:
        group.create_task(stop.wait())
        tell_parent("ready x")
        await stop.wait()

asyncio.run(main())
"""
CANNOT_START = """
from baton.config import Config
from commands.serve import serve_dashboard

config = Config()
config = config.model_copy(update={"access": config.access.model_copy(update={"tokens": "/nowhere/tokens"})})
serve_dashboard(config, control_address="127.0.0.1:1", exit_with_parent=True)
"""


@pytest.mark.parametrize(
    ("script", "status"),
    [(TELLS, -signal.SIGTERM), (IN_A_GROUP, 0), (CANNOT_START, -signal.SIGTERM)],
    ids=["tells", "in a task group", "cannot start"],
)
def test_a_child_whose_parent_is_gone_ends_in_silence(script, status):
    reads, writes = os.pipe()
    os.close(reads)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", script],
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writes)
    assert ended.stderr == ""
    assert ended.returncode == status


def test_a_parent_that_listens_hears_the_line():
    script = "from commands.serve import tell_parent; tell_parent('ready x')"
    assert subprocess.check_output([sys.executable, "-c", script], text=True, timeout=120) == "ready x\n"
