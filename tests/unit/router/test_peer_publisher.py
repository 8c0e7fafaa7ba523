"""A router publishes its load to a bounded number of others."""

import asyncio
from contextlib import aclosing

import pytest

from baton.core.ids import RouterId
from baton.core.sharing import RouterUpdate
from baton.wire.routers import TooManyFollowers
from router.live.peers import publisher
from router.live.peers.publisher import PeerPublisher

ME = RouterId("me")


class Peers:
    def __init__(self):
        self.is_followed = False

    def listen(self, *, is_followed):
        self.is_followed = is_followed

    def snapshot(self, router_id):
        return RouterUpdate(router_id, is_snapshot=True)

    def changes(self, router_id):
        return None


class Drivers:
    def __init__(self):
        self.peers = Peers()


@pytest.fixture
def drivers():
    return Drivers()


async def first_of(stream):
    update = await anext(stream)
    assert update.is_snapshot
    return stream


async def test_more_followers_than_may_be_are_refused_and_those_there_are_served_on(drivers, monkeypatch):
    monkeypatch.setattr(publisher, "FOLLOWERS_MAX", 2)
    desk = PeerPublisher(drivers, ME)
    one, two = [await first_of(desk.follow(RouterId(name))) for name in ("a", "b")]
    with pytest.raises(TooManyFollowers, match="2 routers"):
        await first_of(desk.follow(RouterId("c")))
    async with aclosing(two):
        desk._put(RouterUpdate(ME))
        assert not (await anext(one)).is_snapshot
        assert not (await anext(two)).is_snapshot
    three = await first_of(desk.follow(RouterId("c")))
    await one.aclose()
    await three.aclose()
    assert not drivers.peers.is_followed


async def test_a_follower_that_comes_again_replaces_itself(drivers, monkeypatch):
    monkeypatch.setattr(publisher, "FOLLOWERS_MAX", 1)
    desk = PeerPublisher(drivers, ME)
    old = await first_of(desk.follow(RouterId("a")))
    new = await first_of(desk.follow(RouterId("a")))
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(old), 30)
    assert drivers.peers.is_followed
    desk._put(RouterUpdate(ME))
    assert not (await anext(new)).is_snapshot
    await new.aclose()
    assert not drivers.peers.is_followed
