"""Blocks come in from workers and go out to workers through host memory."""

from baton.core.store import (
    BlocksWritten,
    DropReason,
    OfferBlocks,
    StoreRefused,
    StoreWelcome,
    Tier,
)
from kv_store.node.events import Clear, DropStoreClient, ForgetHost, OpenSizeClass, StoreClientLost
from tests.unit.kv_store.node.driver import (
    BLOCK_BYTES,
    SLOT_BYTES,
    W0,
    W1,
    Driver,
    block_hash,
    chain_of,
    facts,
    failed,
    messages,
    ready,
)


def test_a_worker_is_welcomed_with_the_arena_of_its_block_size():
    node = Driver(slots=10)
    actions = node.join()
    assert actions[0] == OpenSizeClass(BLOCK_BYTES, SLOT_BYTES, 10, 0)
    (welcome,) = messages(actions, StoreWelcome)
    assert (welcome.slot_bytes, welcome.slot_count) == (SLOT_BYTES, 10)


def test_blocks_larger_than_the_host_memory_are_refused_in_words():
    node = Driver(slots=10)
    (refused,) = messages(node.join(block_bytes=10 * SLOT_BYTES), StoreRefused)
    assert "store.host_bytes" in refused.message


def test_what_is_written_is_found_and_loaded_by_all_workers_of_the_host():
    node = Driver()
    node.join(W0)
    node.join(W1)
    assert node.store(*(facts(i) for i in range(3))) == [0, 1, 2]
    assert node.found(chain_of(4), worker=W1) == [("host", 3)]
    load_id, actions = node.load(chain_of(3), worker=W1)
    ((first, slots),) = ready(actions)
    assert first == 0
    assert len(set(slots)) == 3
    assert node.core.status().tiers[Tier.HOST].pinned_count == 3
    node.end(load_id, worker=W1)
    assert node.core.is_idle


def test_nothing_is_found_before_it_is_written():
    node = Driver()
    node.join()
    node.offer(facts(0))
    assert node.found(chain_of(1)) == []


def test_two_workers_do_not_write_the_same_block():
    node = Driver()
    node.join(W0)
    node.join(W1)
    node.offer(facts(0), facts(1), worker=W0)
    _, taken = node.offer(facts(0), facts(1), facts(2), worker=W1)
    assert [place.index for place in taken.places] == [2]


def test_the_least_recently_used_leaves_and_its_slot_has_a_new_generation():
    node = Driver(slots=4, pinned_share_max=0.9)
    node.join()
    for i in range(4):
        node.store(facts(i))
    node.found(chain_of(1))
    before = list(node.generations[BLOCK_BYTES])
    node.store(facts(0, "b"))
    assert node.found((block_hash(0),)) == [("host", 1)]
    assert node.found((block_hash(1),)) == []
    after = node.generations[BLOCK_BYTES]
    assert sum(after) == sum(before) + 1
    assert node.core.status().dropped == {(Tier.HOST, DropReason.EVICTED): 1}


def test_what_is_pinned_does_not_leave():
    node = Driver(slots=4, pinned_share_max=0.5)
    node.join()
    node.store(facts(0))
    node.store(facts(1))
    load_id, _ = node.load(chain_of(2))
    for i in range(8):
        node.store(facts(i, "b"))
    assert node.found(chain_of(2)) == [("host", 2)]
    node.end(load_id)


def test_a_lost_workers_half_written_blocks_are_void_and_its_pins_end():
    node = Driver()
    node.join()
    node.store(facts(0))
    node.offer(facts(1))
    node.load(chain_of(1))
    node.handle(StoreClientLost(W0))
    assert node.core.is_idle
    node.join(W1)
    assert node.found(chain_of(2), worker=W1) == [("host", 1)]


def test_loads_wait_for_room_within_the_share_and_fail_at_their_deadline():
    node = Driver(slots=8, pinned_share_max=0.5)
    node.join()
    for i in range(8):
        node.store(facts(i))
    first, _ = node.load(chain_of(8)[:3])
    second, actions = node.load(chain_of(8)[4:7])
    assert ready(actions) == []
    actions = node.end(first)
    assert [r[0] for r in ready(actions)] == [0]
    _, actions = node.load(chain_of(8)[:3])
    assert failed(node.wait(2.0)) == [(0, "not there in time")]
    node.end(second)


def test_a_load_beyond_the_whole_share_gets_its_beginning():
    node = Driver(slots=8, pinned_share_max=0.5)
    node.join()
    for i in range(8):
        node.store(facts(i))
    load_id, actions = node.load(chain_of(8))
    assert [(first, len(slots)) for first, slots in ready(actions)] == [(0, 4)]
    assert [first for first, _ in failed(actions)] == [4]
    node.end(load_id)


def test_blocks_of_one_load_are_counted_once_for_all_loads_of_a_worker():
    node = Driver(slots=8, pinned_share_max=0.5)
    node.join()
    for i in range(4):
        node.store(facts(i))
    loads = [node.load(chain_of(4)) for _ in range(5)]
    assert all(len(ready(actions)) == 1 for _, actions in loads)


def test_a_stream_of_writes_leaves_room_for_loads_that_wait():
    node = Driver(slots=16, pinned_share_max=0.5)
    node.join()
    for i in range(8):
        node.store(facts(i))
    offers = [node.offer(facts(i, "b"))[0] for i in range(4)]
    _, actions = node.load(chain_of(6))
    assert ready(actions) == []
    for i, offer_id in enumerate(offers[:2]):
        node.offer(facts(i, "c"))
        actions = node.say(BlocksWritten(offer_id, (1,)))
    assert len(ready(actions)) == 1


def test_a_hole_fails_the_load_from_there_on():
    node = Driver()
    node.join()
    node.store(facts(0), facts(2))
    load_id, actions = node.load(chain_of(3))
    assert len(ready(actions)) == 1
    assert failed(actions) == [(1, "no peer has it")]
    assert node.core.status().tiers[Tier.HOST].pinned_count == 1
    node.end(load_id)


def test_what_a_worker_finds_corrupt_is_dropped_for_all_and_counted():
    node = Driver()
    node.join()
    node.store(facts(0), facts(1))
    load_id, _ = node.load(chain_of(2))
    node.end(load_id, block_hash(1), block_hash(7))
    assert node.found(chain_of(2)) == [("host", 1)]
    assert node.core.status().corrupt == {Tier.HOST: 1}
    assert node.store(facts(1)) == [0]


def test_a_pinned_block_that_is_cleared_stays_in_its_slot_until_it_is_unpinned():
    node = Driver(slots=4, pinned_share_max=0.5)
    node.join()
    node.store(facts(0))
    load_id, actions = node.load(chain_of(1))
    ((_, (slot,)),) = ready(actions)
    node.handle(Clear())
    assert node.found(chain_of(1)) == []
    _, taken = node.offer(facts(0))
    assert taken.places[0].slot != slot
    node.end(load_id)
    assert node.core.status().tiers[Tier.HOST].bytes == SLOT_BYTES


def test_a_tenant_fills_its_share_and_then_makes_room_among_its_own():
    node = Driver(slots=8, tenant_share_max=0.5)
    node.join()
    node.store(facts(0, "b", tenant="b"))
    for i in range(6):
        node.store(facts(i, tenant="a"))
    assert node.found((block_hash(0, "b"),)) == [("host", 1)]
    assert node.core.status().dropped == {(Tier.HOST, DropReason.QUOTA): 2}


def test_blocks_unused_for_the_ttl_expire():
    node = Driver(ttl_s=10.0)
    node.join()
    node.store(facts(0), facts(1))
    node.wait(6.0)
    node.found(chain_of(1))
    node.wait(6.0)
    assert node.found(chain_of(2)) == [("host", 1)]
    assert node.core.status().dropped == {(Tier.HOST, DropReason.EXPIRED): 1}


def test_another_block_size_takes_the_memory_of_what_was_used_longest_ago():
    node = Driver(slots=8, pinned_share_max=0.9)
    node.join(W0)
    for i in range(8):
        node.store(facts(i))
        node.wait(1.0)
    node.join(W1, block_bytes=2 * BLOCK_BYTES)
    offer_id, taken = node.offer(facts(0, "b"), worker=W1)
    assert len(taken.places) == 1
    node.say(BlocksWritten(offer_id, (1,)), W1)
    status = node.core.status()
    assert status.dropped == {(Tier.HOST, DropReason.REPLACED): 2}
    assert status.tiers[Tier.HOST].bytes <= 8 * SLOT_BYTES
    assert node.found(chain_of(1)) == []


def test_memory_is_given_back_before_another_space_uses_it():
    node = Driver(slots=8, pinned_share_max=0.9)
    node.join(W0)
    node.join(W1, block_bytes=2 * BLOCK_BYTES)
    for i in range(8):
        node.store(facts(i))
    actions = node.say(OfferBlocks(99, (facts(0, "b"),)), W1)
    assert [a.size_class for a in actions if isinstance(a, ForgetHost)] == [BLOCK_BYTES] * 2


def test_a_worker_that_breaks_the_protocol_is_dropped_and_its_slots_kept_until_its_end():
    node = Driver()
    node.join(W0)
    node.join(W1)
    offer_id, _ = node.offer(facts(0), worker=W0)
    actions = node.say(BlocksWritten(offer_id, (1, 2, 3)), W0)
    assert [type(a) for a in actions] == [DropStoreClient]
    assert node.say(OfferBlocks(99, (facts(1),)), W0) == []
    assert node.core.status().writes_open == 1
    node.handle(StoreClientLost(W0))
    assert node.core.status().writes_open == 0
    assert node.store(facts(0), worker=W1) == [0]


def test_the_directory_hears_what_came_and_went_in_order():
    node = Driver(slots=4, pinned_share_max=0.9)
    node.join()
    for i in range(6):
        node.store(facts(i))
    held: dict[bytes, Tier] = {}
    for number, publish in enumerate(node.published, start=1):
        assert publish.changes.sequence_number == number
        held |= dict(publish.changes.stored)
        for gone in publish.changes.removed:
            del held[gone]
    assert held == dict.fromkeys(chain_of(6)[2:], Tier.HOST)
