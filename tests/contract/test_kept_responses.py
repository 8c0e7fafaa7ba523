"""Responses that are kept: the same in a router's memory and in a real Redis."""

import time
from contextlib import asynccontextmanager

import pytest

from baton.core.errors import PeerFailure
from kv_store.directory.redis_client import RedisClient
from router.responses.keeper import LocalResponses, RedisResponses
from router.responses.store import Absence, StoreBounds, StoredResponse
from tests.contract.redis_servers import RedisServer

TIMEOUT_S = 5.0
BOUNDS = StoreBounds(count_max=3, bytes_max=1000, keep_s=600.0)


def of(size):
    return StoredResponse(b"r" * size, b"i")


@asynccontextmanager
async def local(tmp_path, bounds):
    keeper = LocalResponses(bounds)
    yield keeper, keeper


@asynccontextmanager
async def in_redis(tmp_path, bounds):
    """Two routers with one Redis."""
    with RedisServer(tmp_path) as server:
        made = [
            RedisResponses(RedisClient(server.url, timeout_s=TIMEOUT_S), name="test", bounds=bounds)
            for _ in range(2)
        ]
        try:
            yield tuple(made)
        finally:
            for keeper in made:
                await keeper.close()


@pytest.mark.parametrize("place", [local, in_redis])
async def test_what_is_kept_is_read_within_its_bounds(place, tmp_path):
    async with place(tmp_path, BOUNDS) as (one, other):
        assert await one.put("a", "resp_1", of(10))
        assert await other.get("a", "resp_1") == of(10)
        assert isinstance(await other.get("b", "resp_1"), Absence)
        assert not await one.put("a", "resp_2", of(300))
        for number in range(3, 6):
            await one.put("a", f"resp_{number}", of(200))
        assert isinstance(await one.get("a", "resp_1"), Absence)
        assert await other.delete("a", "resp_3") == of(200)
        assert isinstance(await one.get("a", "resp_3"), Absence)
        assert isinstance(await one.delete("a", "resp_3"), Absence)
        await one.put("a", "resp_4", of(100))
        assert await one.get("a", "resp_4") == of(100)


async def test_bytes_of_a_tenant_are_bounded_in_redis(tmp_path):
    bounds = StoreBounds(count_max=100, bytes_max=1000, keep_s=600.0)
    async with in_redis(tmp_path, bounds) as (one, other):
        for number in range(8):
            await one.put("a", f"resp_{number}", of(200))
        found = [await other.get("a", f"resp_{number}") for number in range(8)]
        kept = [stored for stored in found if isinstance(stored, StoredResponse)]
        assert 0 < sum(stored.size for stored in kept) <= bounds.bytes_max
        assert len(kept) == 4


async def test_a_redis_that_is_away_is_told_within_the_timeout(tmp_path):
    with RedisServer(tmp_path) as server:
        url = server.url
    keeper = RedisResponses(RedisClient(url, timeout_s=1.0), name="test", bounds=BOUNDS)
    began_s = time.monotonic()
    with pytest.raises(PeerFailure, match="does not answer"):
        await keeper.get("a", "resp_1")
    assert time.monotonic() - began_s < TIMEOUT_S * 4
    await keeper.close()
