"""When the dashboard starts, with a process of a few lines in its place."""

import asyncio
import os
import sys

import pytest

from control_plane.dashboard_child import DashboardChild
from control_plane.reconcile import RestartPolicy

POLICY = RestartPolicy(
    backoff_s=0.01, backoff_max_s=0.1, start_timeout_s=60.0, drain_timeout_s=10.0, stable_s=5.0
)
SCRIPT = """
import sys
open(sys.argv[1], "w").close()
print("ready http://127.0.0.1:1 sign in", flush=True)
sys.stdin.read()
"""


def child(marker):
    return DashboardChild(
        [sys.executable, "-c", SCRIPT, str(marker)],
        environment=dict(os.environ),
        policy=POLICY,
        silence_s=60.0,
    )


@pytest.fixture
def announced():
    return asyncio.Queue()


async def test_it_starts_when_the_workers_are_there(tmp_path, announced):
    marker, settled = tmp_path / "started", asyncio.Event()
    dashboard = child(marker)
    running = asyncio.create_task(dashboard.run_beside(announced.put_nowait, after=settled))
    for _ in range(100):
        await asyncio.sleep(0)
    assert (dashboard.pid, marker.exists()) == (None, False)
    settled.set()
    assert await asyncio.wait_for(announced.get(), 30) == "http://127.0.0.1:1 sign in"
    assert marker.exists()
    await dashboard.stop(5)
    await running


async def test_workers_that_do_not_come_keep_it_no_longer_than_a_while(tmp_path, announced):
    dashboard = child(tmp_path / "started")
    never = asyncio.Event()
    running = asyncio.create_task(dashboard.run_beside(announced.put_nowait, after=never, wait_s=0.01))
    assert await asyncio.wait_for(announced.get(), 30)
    await dashboard.stop(5)
    await running


async def test_elsewhere_it_starts_at_once(tmp_path, announced):
    dashboard = child(tmp_path / "started")
    running = asyncio.create_task(dashboard.run_beside(announced.put_nowait, after=None, wait_s=1e9))
    assert await asyncio.wait_for(announced.get(), 30)
    await dashboard.stop(5)
    await running
