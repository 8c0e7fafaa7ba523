"""Budgets of tenants: the same behind every place that counts them. Real servers throughout."""

import asyncio
import math
import time
from contextlib import asynccontextmanager

import pytest

from baton.core.budgets import Ask, Ledger, Settle
from baton.wire.server import start_server
from kv_store.directory.interface import DirectoryLost
from kv_store.directory.redis_client import RedisClient
from router.tenants.budgets import LocalBudgets, RemoteBudgets, SharedBudgets
from router.tenants.keyring import LiveKeys, RedisSource
from router.tenants.keys import KeyRecord, Tenant, digest_of, new_key
from router.tenants.redis_budgets import RedisBudgets
from tests.contract.redis_servers import RedisServer

TIMEOUT_S = 5.0


@asynccontextmanager
async def local(tmp_path):
    budgets = LocalBudgets()
    yield lambda router_id: budgets


@asynccontextmanager
async def remote(tmp_path):
    server, port = await start_server("127.0.0.1", 0, budgets=Ledger())
    made = {name: RemoteBudgets(f"127.0.0.1:{port}", timeout_s=TIMEOUT_S) for name in "ab"}
    try:
        yield made.__getitem__
    finally:
        for budgets in made.values():
            await budgets.close()
        await server.stop(None)


@asynccontextmanager
async def in_redis(tmp_path):
    with RedisServer(tmp_path) as server:
        made = {}

        def budgets(router_id):
            if router_id not in made:
                client = RedisClient(server.url, timeout_s=TIMEOUT_S)
                made[router_id] = RedisBudgets(client, name="test", router_id=router_id)
            return made[router_id]

        try:
            yield budgets
        finally:
            for one in made.values():
                await one.close()


@pytest.fixture(params=[local, remote, in_redis])
async def places(request, tmp_path):
    async with request.param(tmp_path) as of:
        yield of


def ask(tokens=0, *, lease="r", tenant="t", router_id="a", lease_s=600.0, **limits):
    return Ask(tenant, lease, lease_s, tokens, router_id=router_id, **limits)


async def test_routers_spend_one_budget_together(places):
    granted = 0
    for i in range(8):
        router_id = "ab"[i % 2]
        grant = await places(router_id).take(ask(router_id=router_id, requests_per_minute=5))
        granted += grant.is_granted
    assert granted == 5
    assert grant.scarce == "requests"
    assert 0 < grant.retry_after_s <= 12.0
    assert 59 < grant.requests_left_s <= 60
    assert grant.router_count == 2
    assert (await places("a").take(ask(tenant="other", requests_per_minute=5))).is_granted


async def test_tokens_are_taken_whole_and_given_back(places):
    budgets, limits = places("a"), {"tokens_per_minute": 600, "requests_per_minute": 100}
    assert (await budgets.take(ask(500, **limits))).is_granted
    refused = await budgets.take(ask(500, **limits))
    assert refused.scarce == "tokens"
    assert 35 < refused.retry_after_s <= 40.0
    assert refused.requests_left_s < 1.0  # a refused request takes nothing
    await budgets.settle(Settle("t", "r", 450, 600))
    grant = await budgets.take(ask(500, **limits))
    assert grant.is_granted
    assert 54 < grant.tokens_left_s <= 55.0
    assert (await budgets.take(ask(601, **limits))).retry_after_s == math.inf


async def test_requests_at_once_are_leases(places):
    budgets = places("a")
    assert (await budgets.take(ask(lease="1", concurrent_max=2))).is_granted
    assert (await places("b").take(ask(lease="2", concurrent_max=2, router_id="b"))).is_granted
    assert (await budgets.take(ask(lease="3", concurrent_max=2))).scarce == "concurrent"
    await budgets.settle(Settle("t", "2", 0, 0))
    await budgets.settle(Settle("t", "unknown", 0, 0))
    assert (await budgets.take(ask(lease="3", concurrent_max=2, lease_s=0.01))).is_granted
    end_s = time.monotonic() + 20
    while not (grant := await budgets.take(ask(lease="4", concurrent_max=2))).is_granted:
        assert time.monotonic() < end_s, grant


async def test_a_redis_that_dies_leaves_each_router_its_part(tmp_path):
    with RedisServer(tmp_path) as server:
        clients = [RedisClient(server.url, timeout_s=1.0) for _ in range(2)]
        routers = [
            SharedBudgets(RedisBudgets(client, name="x", router_id=f"r{i}"))
            for i, client in enumerate(clients)
        ]
        for i, router in enumerate(routers):
            assert (await router.take(ask(router_id=f"r{i}", requests_per_minute=10))).is_granted
        server.kill()
        granted = [(await routers[1].take(ask(requests_per_minute=10))).is_granted for _ in range(6)]
        assert granted == [True] * 5 + [False]
        assert routers[1].is_away
        with pytest.raises(DirectoryLost):
            await RedisBudgets(clients[0], name="x", router_id="r0").take(ask())
        for router in routers:
            await router.close()


async def test_keys_in_redis_come_and_go(tmp_path):
    with RedisServer(tmp_path) as server:
        source = RedisSource(RedisClient(server.url, timeout_s=TIMEOUT_S), "x")
        key = new_key()
        keys = LiveKeys(RedisSource(RedisClient(server.url, timeout_s=TIMEOUT_S), "x"))
        await keys.open()
        assert keys.tenant_of(key) is None
        tenant = Tenant(weight=2.0, slo_classes=("a",))
        await source.put("acme", tenant, KeyRecord(digest_of(key), "acme", note="n"))
        await keys.look()
        assert keys.tenant_of(key) == ("acme", tenant)
        server.kill()
        await keys.look()
        assert keys.tenant_of(key) == ("acme", tenant)
        assert keys.trouble
        server.start()
        await source.remove([digest_of(key)])
        await asyncio.gather(keys.look())
        assert keys.tenant_of(key) is None
        await keys.close()
        await source.close()
