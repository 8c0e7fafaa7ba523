"""The directory in Redis when Redis fails, and the kinds of Redis there are. Real servers throughout."""

import asyncio
import itertools
import re
from contextlib import asynccontextmanager

import pytest

from baton.config import StoreConfig
from baton.core.errors import SetupError
from baton.core.store import StoreChanges
from kv_store.directory.connect import connect
from kv_store.directory.interface import DirectoryLost
from tests.contract.directory_worlds import RedisWorld, redis_world
from tests.contract.redis_groups import certificates, redis_cluster, sentinel_group, tls_before
from tests.contract.redis_servers import RedisServer
from tests.contract.test_store_directory import LEASE_S, h, holders, join, location, member, snapshot, stored
from tests.ports import free_port
from tests.unit.kv_store.directory.dull_node import running

QUICK_S = 0.3
"""The directory's own deadline in these tests."""


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as started:
        yield started


@pytest.fixture
async def world(server):
    async with redis_world(server.url) as made:
        yield made


@asynccontextmanager
async def connected(url, **settings):
    config = StoreConfig(directory=url, **{"directory_timeout_s": 5.0, **settings})
    directory = await connect(config, control_address="")
    try:
        yield directory
    finally:
        await directory.close()


async def until_answered(call):
    """The one place that waits for a server to come back: asks until it does."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await call()
            except DirectoryLost:
                await asyncio.sleep(0)


# --- forgetting, dying, hanging -----------------------------------------------------------------------


async def test_a_flushed_redis_is_told_again(world):
    directory = await world.client()
    await join(directory, "a", 1)
    await world.forget()
    assert await directory.members() == ()
    assert await holders(directory, 1) == ()
    assert not await directory.publish(StoreChanges("a", 2, stored=stored(2)))
    await join(directory, "a", 1, 2, number=3)
    assert await holders(directory, 2) == (location("a"),)


async def test_a_lost_index_comes_back_with_the_next_renewal(world):
    directory = await world.client()
    await join(directory, "a", 1)
    await world.raw.delete(f"baton:{world.name}:nodes")
    assert await directory.renew(member("a"), lease_s=LEASE_S)
    assert await directory.members() == (member("a"),)
    assert await holders(await world.client(), 1) == (location("a"),)


async def test_a_killed_redis_is_lost_in_bounded_time_and_heals_when_it_is_back(server, world):
    directory = await world.client(QUICK_S)
    await join(directory, "a", 1)
    server.kill()
    for call in (
        lambda: directory.renew(member("a"), lease_s=LEASE_S),
        lambda: directory.publish(StoreChanges("a", 2)),
        lambda: directory.look_up([h(1)]),
        directory.members,
        lambda: directory.leave("b"),
    ):
        async with asyncio.timeout(20):
            with pytest.raises(DirectoryLost):
                await call()
    server.start()
    assert not await until_answered(lambda: directory.renew(member("a"), lease_s=LEASE_S))
    assert await directory.publish(snapshot("a", 2, 1))
    assert await holders(directory, 1) == (location("a"),)


async def test_a_redis_with_persistence_knows_what_it_knew(tmp_path):
    with RedisServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        async with redis_world(server.url) as world:
            directory = await world.client()
            await join(directory, "a", 1)
            await directory.publish(StoreChanges("a", 2, stored=stored(2), removed=(h(1),)))
            server.kill()
            server.start()
            assert await until_answered(lambda: directory.renew(member("a"), lease_s=LEASE_S))
            assert await directory.look_up([h(1), h(2)]) == [(), (location("a"),)]


async def test_a_redis_that_falls_back_to_an_older_state_is_told_again(server, world):
    directory = await world.client()
    await join(directory, "a", 1)
    await world.raw.save()
    await directory.publish(StoreChanges("a", 2, removed=(h(1),)))
    server.kill()
    server.start()
    assert await until_answered(lambda: holders(directory, 1)) == (location("a"),)
    assert not await directory.renew(member("a"), lease_s=LEASE_S)
    assert not await directory.publish(StoreChanges("a", 3, stored=stored(2)))
    assert await directory.publish(snapshot("a", 4, 2))
    assert await directory.look_up([h(1), h(2)]) == [(), (location("a"),)]


async def test_a_frozen_redis_is_lost_at_the_deadline_and_its_late_answers_go_to_nobody(server, world):
    directory = await world.client(QUICK_S)
    await join(directory, "a", *range(0, 10, 2))
    server.freeze()
    calls = [directory.look_up([h(number)] * (number + 1)) for number in range(10)]
    async with asyncio.timeout(20):
        lost = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(x) for x in lost} == {DirectoryLost}
    server.thaw()
    for number in range(10):
        found = await until_answered(lambda n=number: directory.look_up([h(n)] * (n + 1)))
        assert found == [(location("a"),) if number % 2 == 0 else ()] * (number + 1)


async def test_a_full_redis_refuses_news_and_answers_questions(world):
    directory = await world.client()
    await join(directory, "a", 1)
    await world.raw.config_set("maxmemory", 1)
    with pytest.raises(DirectoryLost, match="maxmemory"):
        await directory.publish(StoreChanges("a", 2, stored=stored(2)))
    assert await holders(directory, 1) == (location("a"),)
    await world.raw.config_set("maxmemory", 0)
    assert await directory.publish(StoreChanges("a", 2, stored=stored(2)))


async def test_many_at_once_wait_for_the_few_connections(world):
    directory = await world.client()
    await join(directory, "a", *range(0, 200, 2))
    found = await asyncio.gather(*(holders(directory, number) for number in range(200)))
    assert found == [(location("a"),) if number % 2 == 0 else () for number in range(200)]
    assert (await world.raw.info("clients"))["connected_clients"] < 20


async def changing(node, until):
    """A node's blocks change all the time, until the condition holds."""
    async with asyncio.timeout(20):
        for number in itertools.count():
            if until():
                return
            node.store(number % 50)
            if h(number % 7) in node.blocks:
                node.remove(number % 7)
            await asyncio.sleep(0)


async def test_a_node_goes_on_while_redis_dies_forgets_and_freezes_and_then_tells_all(server, world):
    directory, other = await world.client(QUICK_S), await world.client()
    numbers = range(60)
    async with running(directory, lease_s=0.3) as node:
        registration = node.registration
        await changing(node, lambda: registration.forgot_count == 1)
        await world.forget()
        await changing(node, lambda: registration.forgot_count == 2)
        for stop, go_on in ((server.kill, server.start), (server.freeze, server.thaw)):
            stop()
            await changing(node, lambda: registration.trouble)
            go_on()
            await changing(node, lambda: not registration.trouble)
        held, found = [h(number) in node.blocks for number in numbers], []
        async with asyncio.timeout(20):
            while found != held:
                found = [bool(x) for x in await until_answered(lambda: other.look_up(list(map(h, numbers))))]


# --- what it costs, and whose it is -------------------------------------------------------------------


async def test_a_look_up_is_one_script_whatever_it_asks_and_every_key_ends_with_its_lease(world):
    directory = await world.client()
    for name in ("a", "b", "c"):
        await join(directory, name, *range(1000))
    await directory.look_up([h(1)])
    before = (await world.raw.info("commandstats"))["cmdstat_eval"]["calls"]
    await directory.look_up([h(number) for number in range(1000)])
    assert (await world.raw.info("commandstats"))["cmdstat_eval"]["calls"] == before + 1
    for name in ("a", "b", "c"):
        left_ms = await world.raw.pttl(f"baton:{world.name}:node:{name}")
        assert 0 < left_ms <= LEASE_S * 1000


async def test_clusters_of_different_names_share_a_redis_and_nothing_else(server):
    async with redis_world(server.url) as ours, redis_world(server.url) as theirs:
        us, them = await ours.client(), await theirs.client()
        await join(us, "a", 1)
        assert await them.members() == ()
        assert await holders(them, 1) == ()
        await them.leave("a")
        assert await holders(us, 1) == (location("a"),)


async def test_what_another_program_wrote_is_no_member(world):
    directory = await world.client()
    await world.raw.sadd(f"baton:{world.name}:nodes", "x", "y")
    await world.raw.hset(f"baton:{world.name}:node:x", mapping={"member": b"\xc1", "address": "x:1"})
    assert await directory.members() == ()
    assert await holders(directory, 1) == ()
    await world.raw.set(f"baton:{world.name}:node:y", "no hash")
    with pytest.raises(DirectoryLost, match="WRONGTYPE"):
        await directory.renew(member("y"), lease_s=LEASE_S)


# --- how to get in ------------------------------------------------------------------------------------


async def refusal(url):
    with pytest.raises(SetupError) as caught:
        async with connected(url):
            pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_passwords_are_asked_for_and_never_shown(tmp_path, caplog):
    port = free_port()
    user = ["--user", "eve", "on", ">s3cret", "~baton:*", "+@all"]
    with RedisServer(tmp_path, "--requirepass", "hunter2", *user, port=port):
        for name, good in (("a", ":hunter2@"), ("b", "default:hunter2@"), ("c", "eve:s3cret@")):
            async with connected(f"redis://{good}127.0.0.1:{port}/0") as directory:
                await join(directory, name, 1)
        for bad in ("", ":wr0ng@", "eve:wr0ng@", "bob:hunter2@"):
            text = await refusal(f"redis://{bad}127.0.0.1:{port}")
            assert "refuses the user or password" in text
            assert not re.search("wr0ng|hunter2|s3cret", text + caplog.text)
        assert "no database of that number" in await refusal(f"redis://:hunter2@127.0.0.1:{port}/99")
        assert "no Redis Cluster" in await refusal(f"redis+cluster://:hunter2@127.0.0.1:{port}")


async def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path, caplog):
    port = free_port()
    url = f"redis://:hunter2@127.0.0.1:{port}"
    async with connected(url, directory_timeout_s=QUICK_S) as directory:
        assert "going on without: redis://***@127.0.0.1" in caplog.text
        with pytest.raises(DirectoryLost) as caught:
            await directory.members()
        assert "hunter2" not in str(caught.value) + caplog.text
        with RedisServer(tmp_path, "--requirepass", "hunter2", port=port):
            assert await until_answered(directory.members) == ()


async def test_tls_with_certificates_on_both_sides(tmp_path, server, caplog):
    with certificates(tmp_path) as folder:
        async with tls_before(server.socket_path, folder) as port:
            where, trust = f"127.0.0.1:{port}", f"ca={folder}/ca.pem"
            us = f"cert={folder}/client.pem"
            async with connected(f"rediss://{where}?{trust}&{us}&key={folder}/client.key") as directory:
                await join(directory, "a", 1)
                assert await holders(directory, 1) == (location("a"),)
            async with connected(f"rediss://{where}?{us}&verify=none") as directory:
                assert await directory.members() == (member("a"),)
            assert "do ca, cert and key fit" in await refusal(f"rediss://{where}?{us}")
            assert "write rediss://" in await refusal(f"redis://{where}")


async def test_a_server_without_tls_is_said_to_be_one(tmp_path):
    with RedisServer(tmp_path, "--requirepass", "hunter2", port=free_port()) as server:
        config = StoreConfig(directory=f"rediss://127.0.0.1:{server.port}", directory_timeout_s=QUICK_S)
        with pytest.raises(SetupError, match="write redis://"):
            await connect(config, control_address="")


async def test_the_servers_own_tls(tmp_path):
    port = free_port()
    with certificates(tmp_path) as folder:
        tls = ["--tls-port", port, "--tls-cert-file", folder / "server.crt", "--tls-key-file"]
        server = RedisServer(tmp_path, *tls, folder / "server.key", "--tls-ca-cert-file", folder / "ca.pem")
        try:
            server.start()
        except AssertionError:
            pytest.skip("this redis-server was built without TLS")
        with server:
            url = f"rediss://127.0.0.1:{port}?ca={folder}/ca.pem&cert={folder}/client.pem"
            async with connected(url) as directory:
                await join(directory, "a", 1)
                assert await holders(directory, 1) == (location("a"),)
            assert "write rediss://" in await refusal(f"redis://127.0.0.1:{port}")


# --- several servers ----------------------------------------------------------------------------------


async def test_a_cluster_without_one_of_its_servers_is_lost_until_it_is_back(tmp_path):
    with redis_cluster(tmp_path) as servers:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{s.port}" for s in servers)
        assert "write redis+cluster://" in await refusal(f"redis://127.0.0.1:{servers[0].port}")
        async with connected(url, directory_timeout_s=1.0) as directory:
            names = [f"node-{i}" for i in range(9)]
            for name in names:
                await join(directory, name, 1)
            assert await holders(directory, 1) == tuple(map(location, names))
            servers[2].freeze()
            with pytest.raises(DirectoryLost):
                await holders(directory, 1)
            servers[2].thaw()
            assert await until_answered(lambda: directory.look_up([h(2), h(1)])) == [
                (),
                tuple(map(location, names)),
            ]
            servers[1].kill()
            async with asyncio.timeout(20):
                with pytest.raises(DirectoryLost):
                    await holders(directory, 1)
            servers[1].start()
            for name in names:
                if not await until_answered(lambda n=name: directory.renew(member(n), lease_s=LEASE_S)):
                    assert await until_answered(lambda n=name: directory.publish(snapshot(n, 2, 1)))
            assert await until_answered(lambda: holders(directory, 1)) == tuple(map(location, names))


async def test_sentinels_name_the_new_master(tmp_path):
    with sentinel_group(tmp_path) as (master, replica, sentinel):
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/them/0"
        async with connected(url, directory_timeout_s=1.0) as directory:
            await join(directory, "a", 1)
            master.kill()
            if not await until_answered(lambda: directory.renew(member("a"), lease_s=LEASE_S)):
                assert await until_answered(lambda: directory.publish(snapshot("a", 2, 1)))
            assert await until_answered(lambda: holders(directory, 1)) == (location("a"),)
            world = RedisWorld(replica.url)
            assert (await world.raw.info("replication"))["role"] == "master"
            await world.close()
