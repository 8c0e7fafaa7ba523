"""Two store nodes: blocks move from the arena of one to that of the other, under leases."""

from typing import Any

from baton.core.ids import NodeId, WorkerId
from baton.core.store import (
    BlockLocation,
    BlocksGrant,
    BlocksReady,
    BlocksRefused,
    BlocksReleased,
    BlocksRequest,
    FindBlocks,
    FoundBlocks,
    LoadFailed,
    NodeRef,
    TakeOver,
    Tier,
)
from kv_store.node.events import (
    DrainStore,
    FromPeer,
    LookedUp,
    LookUp,
    NodeAction,
    PeersChanged,
    Recovered,
    SizeClassOpened,
    StorePeerLost,
    ToPeer,
)
from kv_transfer.read import BlockRead, ReadDone, ReadSettled
from tests.unit.kv_store.node.driver import (
    BLOCK_BYTES,
    SELF,
    Driver,
    block_hash,
    chain_of,
    facts,
    failed,
    messages,
    ready,
)

OTHER = NodeRef(NodeId("node-1"), "host1:1")
THIRD = NodeRef(NodeId("node-2"), "host2:1")
FAR = WorkerId("far.a")


def said(actions: list[NodeAction], kind: type[Any]) -> list[Any]:
    return [a.message for a in actions if isinstance(a, ToPeer) and isinstance(a.message, kind)]


def peer_reads(actions: list[NodeAction]) -> list[BlockRead]:
    return [a for a in actions if isinstance(a, BlockRead)]


class Pair:
    """`here` fetches, `there` has chain a. The network delivers at once and reads what is asked."""

    def __init__(self, count: int = 3, **config: Any) -> None:
        self.here, self.there = Driver(**config), Driver(ref=OTHER, **config)
        self.here.handle(PeersChanged((OTHER, THIRD)))
        self.here.join()
        self.there.join(FAR)
        self.there.store(*(facts(i) for i in range(count)), worker=FAR)
        self.read_result: dict[str, Any] = {}
        self.reads: list[BlockRead] = []

    def look_up(self, actions: list[NodeAction], *holders: NodeRef) -> list[NodeAction]:
        """The directory says that these have everything asked for."""
        (lookup,) = [a for a in actions if isinstance(a, LookUp)]
        locations = tuple(BlockLocation(holder, Tier.HOST) for holder in holders or (OTHER,))
        return self.here.handle(LookedUp(lookup.lookup_id, (locations,) * len(lookup.hashes)))

    def deliver(self, actions: list[NodeAction]) -> list[NodeAction]:
        """Messages between the two, and reads, until nothing is left of them. What `here` did."""
        done: list[NodeAction] = []
        while actions:
            done += actions
            answers: list[NodeAction] = []
            for action in actions:
                if isinstance(action, ToPeer) and action.peer == OTHER:
                    for answer in self.there.handle(FromPeer(action.size_class, SELF, action.message)):
                        assert isinstance(answer, ToPeer)
                        answers += self.here.handle(FromPeer(answer.size_class, OTHER, answer.message))
                elif isinstance(action, BlockRead):
                    self.reads.append(action)
                    there = self.there.generations[BLOCK_BYTES]
                    assert [there[slot] for slot in action.source_blocks] == list(action.generations)
                    answers += self.here.handle(ReadDone(action.read_id, **self.read_result))
            actions = answers
        return done

    def load(self, count: int) -> tuple[int, list[NodeAction]]:
        load_id, actions = self.here.load(chain_of(count))
        return load_id, self.deliver(actions + self.look_up(actions))


def test_a_find_asks_the_directory_once_and_offers_what_peers_hold():
    pair = Pair()
    pair.here.store(facts(0))
    actions = pair.here.say(FindBlocks(1, chain_of(4), 0))
    assert messages(actions, FoundBlocks) == []
    (lookup,) = [a for a in actions if isinstance(a, LookUp)]
    assert lookup.hashes == chain_of(4)[1:]
    location = (BlockLocation(OTHER, Tier.HOST),)
    actions = pair.here.handle(LookedUp(lookup.lookup_id, (location, location, ())))
    (found,) = messages(actions, FoundBlocks)
    assert [(span.tier, span.block_count) for span in found.spans] == [(Tier.HOST, 1), (Tier.PEER, 2)]
    assert found.spans[1].wait_s > 0
    assert not any(isinstance(a, LookUp) for a in pair.here.say(FindBlocks(2, chain_of(4), 0)))


def test_a_silent_directory_costs_its_timeout_and_no_more():
    pair = Pair()
    pair.here.say(FindBlocks(1, chain_of(2), 0))
    actions = pair.here.wait(pair.here.config.lookup_timeout_s + 0.2)
    (found,) = messages(actions, FoundBlocks)
    assert found.spans == ()


def test_nobody_is_asked_where_there_are_no_peers():
    node = Driver()
    node.join()
    assert node.found(chain_of(2)) == []


def test_blocks_of_a_peer_are_pinned_read_released_and_kept():
    pair = Pair()
    load_id, actions = pair.load(3)
    assert [(first, len(slots)) for first, slots in ready(actions)] == [(0, 3)]
    (said_ready,) = messages(actions, BlocksReady)
    assert said_ready.tiers == (Tier.PEER,) * 3
    assert len(said(actions, BlocksReleased)) == 1
    assert pair.there.core.is_idle
    pair.here.end(load_id)
    assert pair.here.core.is_idle
    assert pair.here.found(chain_of(3)) == [("host", 3)]
    assert pair.here.core.status().replicated_bytes == 3 * BLOCK_BYTES
    assert pair.there.core.status().served_bytes == 3 * BLOCK_BYTES


def test_whoever_waits_for_a_fetch_later_may_have_more_patience():
    """The peer takes its time: longer than the first worker waits, shorter than the second."""
    pair = Pair(load_timeout_s=10.0)
    other = WorkerId("w1")
    pair.here.join(other)
    first, actions = pair.here.load(chain_of(1), time_left_s=1.0)
    actions = pair.look_up(actions)
    second, _ = pair.here.load(chain_of(1), time_left_s=6.0, worker=other)
    assert len(said(actions, BlocksRequest)) == 1
    waited = pair.here.wait(5.0)
    assert [m.load_id for m in messages(waited, LoadFailed)] == [first]
    [*_, renewed] = said(waited, BlocksRequest)
    assert renewed.time_left_s > 2
    done = pair.deliver([a for a in waited if isinstance(a, ToPeer)][-1:])
    assert len(messages(done, BlocksReady)) == 1
    pair.here.end(second, worker=other)


def test_beyond_the_budget_of_copies_blocks_go_after_use_and_are_not_told_to_the_directory():
    pair = Pair(replicate_bytes_s=0)
    load_id, actions = pair.load(3)
    assert len(ready(actions)) == 1
    pair.here.end(load_id)
    status = pair.here.core.status()
    assert status.tiers[Tier.HOST].block_count == status.tiers[Tier.HOST].bytes == 0
    assert pair.here.published == []


def test_hot_blocks_use_the_last_of_the_budget():
    budget = {"replicate_bytes_s": 8192}  # a burst of two blocks, of which cold ones may use one
    cold = Pair(**budget)
    load_id, _ = cold.load(3)
    cold.here.end(load_id)
    assert cold.here.core.status().tiers[Tier.HOST].block_count == 1
    hot = Pair(**budget)
    for find_id in (1, 2):
        actions = hot.here.say(FindBlocks(find_id, chain_of(3), 0))
        if find_id == 1:
            hot.look_up(actions)
    load_id, actions = hot.here.load(chain_of(3))
    hot.deliver(actions)
    hot.here.end(load_id)
    assert hot.here.core.status().tiers[Tier.HOST].block_count == 2


def test_a_block_that_its_holder_has_no_more_fails_the_load_there():
    pair = Pair(count=2)
    _, actions = pair.load(3)
    assert [(first, len(slots)) for first, slots in ready(actions)] == [(0, 2)]
    assert [first for first, _ in failed(actions)] == [2]


def test_a_holder_that_fails_is_left_for_another_and_avoided():
    pair = Pair()
    _, actions = pair.here.load(chain_of(3))
    actions = pair.look_up(actions, OTHER, THIRD)
    assert [a.peer for a in actions if isinstance(a, ToPeer)] == [OTHER]
    actions = pair.here.handle(StorePeerLost(BLOCK_BYTES, OTHER.node_id, "vanished"))
    assert [(a.peer, type(a.message)) for a in actions if isinstance(a, ToPeer)] == [(THIRD, BlocksRequest)]
    pair.here.store(facts(0, "b"))
    _, actions = pair.here.load(chain_of(2, "c"))
    actions = pair.look_up(actions, OTHER, THIRD)
    assert [a.peer for a in actions if isinstance(a, ToPeer)] == [THIRD]


def test_a_read_of_slots_that_changed_hands_is_refused():
    pair = Pair()
    pair.read_result = {"is_stale": True}
    _, actions = pair.load(3)
    assert ready(actions) == []
    assert len(failed(actions)) == 1
    assert pair.here.core.status().tiers[Tier.HOST].bytes == 0


def test_a_corrupt_block_is_told_to_its_holder_which_drops_it():
    pair = Pair()
    pair.read_result = {"corrupt": (1,)}
    _, actions = pair.load(3)
    assert [(first, len(slots)) for first, slots in ready(actions)] == [(0, 1)]
    assert pair.here.core.status().corrupt == {Tier.PEER: 1}
    assert pair.there.core.status().corrupt == {Tier.HOST: 1}
    assert pair.there.found((block_hash(1),), worker=FAR) == []


def test_slots_of_a_read_that_has_not_settled_are_set_aside_and_the_pins_kept():
    pair = Pair()
    pair.read_result = {"error": "timed out", "is_settled": False}
    _, actions = pair.load(3)
    assert len(failed(actions)) == 1
    assert said(actions, BlocksReleased) == []
    (read,) = pair.reads
    for i in range(20):
        _, taken = pair.here.offer(facts(i, "b"))
        assert not {place.slot for place in taken.places} & set(read.local_blocks)
    assert len(said(pair.here.handle(ReadSettled(read.read_id)), BlocksReleased)) == 1


def test_a_frozen_peer_gets_no_more_slots_of_ours():
    pair = Pair()
    pair.read_result = {"error": "timed out", "is_settled": False}
    pair.load(3)
    pair.here.wait(60.0)
    _, actions = pair.here.load(chain_of(2, "b"))
    actions = pair.look_up(actions, OTHER)
    assert said(actions, BlocksRequest) == []
    assert len(failed(actions)) == 1
    pair.here.handle(ReadSettled(pair.reads[0].read_id))
    pair.here.wait(60.0)
    _, actions = pair.here.load(chain_of(2, "b"))
    assert len(said(pair.look_up(actions, OTHER), BlocksRequest)) == 1


def test_a_read_that_ends_after_the_lease_counts_as_bad():
    pair = Pair(lease_s=0.5)
    _, actions = pair.here.load(chain_of(3))
    (ask,) = [a for a in pair.look_up(actions) if isinstance(a, ToPeer)]
    (answer,) = pair.there.handle(FromPeer(BLOCK_BYTES, SELF, ask.message))
    assert isinstance(answer, ToPeer)
    (read,) = peer_reads(pair.here.handle(FromPeer(BLOCK_BYTES, OTHER, answer.message)))
    pair.here.now_s += 0.49  # the slack is kept
    assert ready(pair.here.handle(ReadDone(read.read_id))) == []
    assert pair.here.core.status().fetches_failed == 1


def test_a_long_read_renews_its_lease():
    pair = Pair(lease_s=0.6)
    _, actions = pair.here.load(chain_of(3))
    (ask,) = [a for a in pair.look_up(actions) if isinstance(a, ToPeer)]
    (answer,) = pair.there.handle(FromPeer(BLOCK_BYTES, SELF, ask.message))
    assert isinstance(answer, ToPeer)
    (read,) = peer_reads(pair.here.handle(FromPeer(BLOCK_BYTES, OTHER, answer.message)))
    for _ in range(4):
        (renewal,) = said(pair.here.wait(0.2), BlocksRequest)
        pair.there.wait(0.2)
        assert pair.there.core.status().leases_open == 1
        for again in pair.there.handle(FromPeer(BLOCK_BYTES, SELF, renewal)):
            assert isinstance(again, ToPeer)
            pair.here.handle(FromPeer(BLOCK_BYTES, OTHER, again.message))
    assert len(ready(pair.here.handle(ReadDone(read.read_id)))) == 1


def test_pins_for_a_reader_that_vanished_end_with_the_lease():
    node = Driver(lease_s=2.0)
    node.join()
    node.store(facts(0))
    (answer,) = said(
        node.handle(FromPeer(BLOCK_BYTES, OTHER, BlocksRequest(1, chain_of(1), 1.0))), BlocksGrant
    )
    assert answer.generations == (node.generations[BLOCK_BYTES][answer.source_blocks[0]],)
    node.handle(StorePeerLost(BLOCK_BYTES, OTHER.node_id, "gone"))
    node.wait(1.9)
    assert node.core.status().tiers[Tier.HOST].pinned_count == 1
    node.wait(0.2)
    assert node.core.status().tiers[Tier.HOST].pinned_count == 0
    assert node.core.status().leases_lapsed == 1


def test_a_peer_gets_blocks_from_ssd_and_hears_what_is_not_there():
    node = Driver(ssd_slots=8)
    node.handle(SizeClassOpened(BLOCK_BYTES, (Recovered(0, facts(0), 7), Recovered(1, facts(1), 7))))
    node.join()
    actions = node.handle(FromPeer(BLOCK_BYTES, OTHER, BlocksRequest(1, chain_of(3), 1.0)))
    actions += node.io(actions)
    pinned = said(actions, BlocksGrant)
    assert sum(len(answer.source_blocks) for answer in pinned) == 2
    assert [f.block_hash for answer in pinned for f in answer.facts] == list(chain_of(2))
    assert [f.first_block for f in said(actions, BlocksRefused)] == [2]


def test_a_space_that_nobody_here_uses_is_a_refusal():
    node = Driver()
    actions = node.handle(FromPeer(12_345, OTHER, BlocksRequest(1, chain_of(1), 1.0)))
    assert len(said(actions, BlocksRefused)) == 1


def test_a_draining_node_hands_its_most_used_blocks_to_its_peers_and_is_drained_when_they_have_read():
    pair = Pair(count=3)
    pair.there.store(facts(0, "b"), facts(1, "b"), worker=FAR)
    pair.there.found(chain_of(3), worker=FAR)
    pair.there.found(chain_of(3), worker=FAR)
    pair.there.handle(PeersChanged((SELF,)))
    actions = pair.there.handle(DrainStore(budget_bytes=3 * BLOCK_BYTES))
    (offer,) = said(actions, TakeOver)
    assert offer.hashes == chain_of(3)
    assert not pair.there.core.is_drained
    pair.deliver(pair.here.handle(FromPeer(BLOCK_BYTES, OTHER, offer)))
    assert pair.here.found(chain_of(3)) == [("host", 3)]
    assert pair.here.core.is_idle
    pair.there.wait(2.0)
    assert pair.there.core.is_drained
    assert pair.there.store(facts(9, "z"), worker=FAR) == []


def test_a_draining_node_without_peers_is_drained_at_once():
    node = Driver()
    node.join()
    node.store(facts(0))
    node.handle(DrainStore(10**9))
    assert node.core.is_drained
    assert node.found(chain_of(1)) == [("host", 1)]
