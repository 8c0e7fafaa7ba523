"""A router that stood still for a while knows the other routers again afterwards."""

import asyncio

from baton.core.ids import RouterId
from baton.core.sharing import RouterUpdate
from router.decisions.cluster.view import ClusterView
from router.decisions.events import PeerLost, PeerUpdated
from router.decisions.peer_loads import PEER_SILENCE_S, PeerBook
from router.decisions.prefix_index import PrefixIndex
from router.live.peers.follower import PeerFollower

PEER = RouterId("peer")


class StoppedClock:
    """A driver whose clock the test moves."""

    def __init__(self):
        self.peers = PeerBook(ClusterView(silence_s=60.0), PrefixIndex())
        self.now_s = 0.0

    def feed(self, event):
        self.peers.expire(self.now_s)
        match event:
            case PeerUpdated(update):
                self.peers.on_update(update, now_s=self.now_s)
            case PeerLost(router_id):
                self.peers.lost(router_id)

    def crash(self, error):
        raise error


async def test_a_peer_given_up_while_this_router_stood_still_is_followed_anew():
    driver, streams = StoppedClock(), 0
    known = asyncio.Event()

    async def follow(address, router_id):
        nonlocal streams
        streams += 1
        yield RouterUpdate(PEER, is_snapshot=True)
        if streams == 1:
            driver.now_s += 2 * PEER_SILENCE_S  # The router stood still, and another event came first.
            driver.peers.expire(driver.now_s)
            assert driver.peers.count == 0
        else:
            known.set()
        while True:
            yield RouterUpdate(PEER)
            await asyncio.sleep(0)

    async with PeerFollower(driver, RouterId("me"), addresses=("a:1",), follow=follow):
        await asyncio.wait_for(known.wait(), 30)
        assert PEER in driver.peers
    assert streams == 2
    assert driver.peers.count == 0
