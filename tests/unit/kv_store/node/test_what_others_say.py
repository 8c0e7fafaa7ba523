"""Messages that no sound worker or peer sends: the node goes on, and nobody else is harmed."""

import pytest

from baton.core.ids import NodeId, WorkerId
from baton.core.store import (
    BlocksGrant,
    BlocksRefused,
    BlocksRequest,
    BlocksWritten,
    LoadBlocks,
    NodeRef,
    OfferBlocks,
    Tier,
)
from kv_store.node.events import Clear, DropStoreClient, FromPeer, PeersChanged, StoreClientLost, ToPeer
from tests.unit.kv_store.node.driver import BLOCK_BYTES, W0, W1, Driver, chain_of, facts, failed, ready
from tests.unit.kv_store.node.test_between_nodes import OTHER, Pair, peer_reads, said

FAR = NodeRef(NodeId("node-9"), "host9:1")


def test_a_worker_that_breaks_the_protocol_keeps_what_it_reads_until_its_end():
    """A copy out of these slots may be under way."""
    node = Driver(slots=4, pinned_share_max=0.9)
    node.join(W0)
    node.join(W1)
    node.store(facts(0), worker=W1)
    load_id, actions = node.load(chain_of(1), worker=W0)
    [(_, (slot,))] = ready(actions)
    again = node.say(LoadBlocks(load_id, chain_of(1), 1.0), W0)
    assert [type(action) for action in again] == [DropStoreClient]
    for i in range(8):
        offer_id, taken = node.offer(facts(i, "b"), worker=W1)
        assert slot not in [place.slot for place in taken.places]
        node.say(BlocksWritten(offer_id, (7,) * len(taken.places)), W1)
    node.handle(StoreClientLost(W0))
    node.handle(StoreClientLost(W1))
    assert node.core.is_idle
    assert node.core.status().tiers[Tier.HOST].pinned_count == 0


def test_a_worker_may_have_any_name():
    node = Driver()
    worker = WorkerId("peers")
    node.join(worker)
    node.store(facts(0), worker=worker)
    node.handle(FromPeer(BLOCK_BYTES, FAR, BlocksRequest(1, chain_of(1), 1.0)))
    node.wait(60.0)
    assert node.core.is_idle
    node.handle(StoreClientLost(worker))
    node.join(worker)


def test_a_time_too_short_for_the_clock_is_no_time():
    node = Driver()
    node.join()
    node.store(facts(0))
    _, actions = node.load(chain_of(1), time_left_s=1e-18)
    assert failed(actions) == [(0, "not there in time")]
    actions = node.handle(FromPeer(BLOCK_BYTES, FAR, BlocksRequest(1, chain_of(1), 1e-18)))
    assert [type(a.message) for a in actions if isinstance(a, ToPeer)] == [BlocksRefused]
    assert node.core.is_idle


@pytest.mark.parametrize("checksum", [-1, 2**64])
def test_a_checksum_that_no_label_has_room_for_is_not_taken(checksum):
    node = Driver(ssd_slots=8)
    node.join()
    offer_id, _ = node.offer(facts(0))
    actions = node.say(BlocksWritten(offer_id, (checksum,)))
    assert [type(action) for action in actions] == [DropStoreClient]
    pair = Pair(1)
    _, actions = pair.here.load(chain_of(1))
    (pin,) = said(pair.look_up(actions), BlocksRequest)
    answer = BlocksGrant(pin.fetch_id, 0, (0,), (1,), (facts(0),), (checksum,), 10.0)
    actions = pair.here.handle(FromPeer(BLOCK_BYTES, OTHER, answer))
    assert peer_reads(actions) == []
    assert pair.here.core.status().fetches_failed == 1


def test_what_two_tenants_have_in_common_is_charged_to_whom_it_was_stored_for():
    """Names of users are beneath the salt: their blocks can be the same. The driver audits every event."""
    node = Driver(slots=8, ssd_slots=8, tenant_share_max=0.5)
    node.join()
    node.io(node.say(OfferBlocks(901, (facts(0, tenant="x"),))))
    node.io(node.say(BlocksWritten(901, (7,))))
    node.handle(Clear(Tier.HOST))
    assert node.found(chain_of(1)) == [("ssd", 1)]
    node.store(facts(0, tenant="y"))
    node.handle(Clear(Tier.SSD))
    node.find(chain_of(1))  # used again: written once more
    node.io(node.performed)
    node.handle(Clear(Tier.HOST))
    _, actions = node.load(chain_of(1))
    assert len(ready(node.io(actions))) == 1
    assert [tenant[0] for tenant in node.core.status().tenants] == ["y"]


def test_peers_that_came_and_went_leave_nothing_behind():
    pair = Pair(1)
    pair.load(1)
    pair.here.handle(PeersChanged(()))
    assert not pair.here.core._components.peers._stuck_bytes
