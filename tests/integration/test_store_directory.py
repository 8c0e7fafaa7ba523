"""Store nodes that find each other through a real Redis."""

import asyncio
import subprocess
import sys
from contextlib import contextmanager

import pytest

from baton.config import StoreConfig
from kv_store.directory.connect import connect
from kv_store.directory.interface import DirectoryLost
from tests.contract.redis_servers import RedisServer
from tests.integration.cluster import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

LEASE_S = 1.5


@contextmanager
def store_node(folder, url):
    folder.mkdir()
    settings = [f"cluster.member_lease_s={LEASE_S}", "store.directory_timeout_s=0.5"]
    sets = [part for text in settings for part in ("--set", text)]
    what = ["store", "run", "--socket", folder / "s", "--host-bytes", 2**24, "--store", url, *sets]
    process = subprocess.Popen(
        [sys.executable, "-m", "baton", *map(str, what)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready "), ready
        yield process, ready.split()[2]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def until_listed(directory, *addresses):
    """A process outside the cluster is not notified, so it polls."""
    found = None
    async with asyncio.timeout(30):
        while found != sorted(addresses):
            try:
                found = sorted(member.node.address for member in await directory.members())
            except DirectoryLost:
                found = None


async def test_nodes_come_and_go_and_outlive_their_redis(tmp_path):
    with RedisServer(tmp_path) as redis:
        directory = await connect(StoreConfig(directory=redis.url), control_address="")
        with store_node(tmp_path / "a", redis.url) as (first, here):
            with store_node(tmp_path / "b", redis.url) as (second, there):
                await until_listed(directory, here, there)
                redis.kill()
                redis.start()
                await until_listed(directory, here, there)  # Redis is empty: they registered again
                second.terminate()
                await until_listed(directory, here)
                assert second.wait(20) == 0
            first.kill()
            await until_listed(directory)
        await directory.close()
