"""Blocks go down to SSD, survive there, and come up again."""

from baton.core.ids import NodeId
from baton.core.store import BlocksGrant, BlocksRequest, BlocksWritten, DropReason, NodeRef, Tier
from kv_store.node.events import (
    ForgetSsd,
    FromPeer,
    IoDone,
    ReadSsd,
    Recovered,
    SizeClassOpened,
    StoreClientLost,
    ToPeer,
    WriteSsd,
)
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
    ready,
)


def reads(actions):
    return [a for a in actions if isinstance(a, ReadSsd)]


def writes(actions):
    return [a for a in actions if isinstance(a, WriteSsd)]


def store_and_write(node, *blocks):
    before = len(node.performed)
    node.store(*blocks)
    node.io(node.performed[before:])


def filled(slots=4, blocks=4, **config):
    """A node whose host memory is full of chain a."""
    node = Driver(slots=slots, ssd_slots=config.pop("ssd_slots", 8), pinned_share_max=0.75, **config)
    node.join()
    for i in range(blocks):
        store_and_write(node, facts(i))
    return node


def recovered(*numbers, **config):
    """A node that finds these blocks of chain a on its SSD at the start."""
    node = Driver(ssd_slots=8, **config)
    found = tuple(Recovered(slot, facts(i), 7) for slot, i in enumerate(numbers))
    node.handle(SizeClassOpened(BLOCK_BYTES, found))
    node.join()
    return node


def test_a_slot_is_not_given_out_while_its_block_is_being_written():
    node = filled()
    node.performed.clear()
    for i in range(6):
        busy = {write.slot for write in writes(node.performed)}
        _, taken = node.offer(facts(i, "b"))
        assert not busy & {place.slot for place in taken.places}
        node.say(BlocksWritten(taken.offer_id, (7,) * len(taken.places)))
    assert writes(node.performed)


def test_what_left_host_memory_is_found_on_ssd():
    node = filled()
    for i in range(4):
        store_and_write(node, facts(i, "b"))
    assert node.found(chain_of(4)) == [("ssd", 4)]


def test_blocks_found_at_the_start_are_loaded_several_at_a_time_in_order():
    node = recovered(0, 1, 2, 3, ssd_threads=1)
    assert node.found(chain_of(5)) == [("ssd", 4)]
    load_id, actions = node.load(chain_of(4))
    first, second = reads(actions)
    assert (first.block_hash, second.block_hash) == (block_hash(0), block_hash(1))
    later = node.handle(IoDone(second.op_id))
    assert ready(later) == []  # in order
    now = node.handle(IoDone(first.op_id))
    assert ready(now) == [(0, (first.slot, second.slot))]
    assert [read.block_hash for read in reads(later + now)] == [block_hash(2), block_hash(3)]
    node.io(later + now)
    assert node.core.status().loaded_blocks == {Tier.SSD: 4}
    node.end(load_id)
    assert node.found(chain_of(4)) == [("host", 4)]


def test_two_loads_share_one_read():
    node = recovered(0)
    _, actions = node.load(chain_of(1))
    _, again = node.load(chain_of(1))
    assert len(reads(actions)) == 1
    assert reads(again) == []
    assert len(ready(node.io(actions))) == 2


def test_a_corrupt_block_is_dropped_and_counted_and_what_came_before_it_is_good():
    node = recovered(0, 1, 2)
    _, actions = node.load(chain_of(3))
    first, second, third = reads(actions)
    said = node.handle(IoDone(second.op_id, error="checksum", is_corrupt=True))
    assert ForgetSsd(BLOCK_BYTES, second.ssd_slot) in said
    assert failed(said) == []  # the last word comes after what is ready
    said = node.io([first])
    assert [r[0] for r in ready(said)] == [0]
    assert failed(said) == [(1, "checksum")]
    node.io([third])
    assert node.found(chain_of(3)) == [("host", 1)]
    status = node.core.status()
    assert status.corrupt == {Tier.SSD: 1}
    assert status.dropped == {(Tier.SSD, DropReason.CORRUPT): 1}


def test_a_read_too_slow_for_everybody_fails_the_load_and_drops_the_block():
    node = recovered(0, 1)
    _, actions = node.load(chain_of(2), time_left_s=0.5)
    (first, second) = reads(actions)
    node.io([first])
    assert failed(node.wait(1.0)) == [(1, "not there in time")]
    assert node.found(chain_of(2)) == [("host", 1)]
    assert node.store(facts(1)) == [0]  # computed anew, and stored beside the read that still runs
    node.handle(IoDone(second.op_id))
    assert node.found(chain_of(2)) == [("host", 2)]


def test_a_peers_fetch_is_served_as_long_as_its_latest_request_says():
    node = recovered(0, load_timeout_s=10.0)
    peer = NodeRef(NodeId("node-1"), "host1:1")

    def ask(number, time_left_s):
        message = BlocksRequest(7, chain_of(1), time_left_s, number)
        return node.handle(FromPeer(BLOCK_BYTES, peer, message))

    (read,) = reads(ask(0, 1.0))
    node.wait(0.9)
    ask(1, 5.0)
    waited = node.wait(2.0)
    assert [a for a in waited if isinstance(a, ToPeer)] == []
    granted = [a.message for a in node.io([read]) if isinstance(a, ToPeer)]
    assert [type(message) for message in granted] == [BlocksGrant]


def test_a_cancelled_load_does_not_begin_reads_that_nobody_wants():
    node = recovered(0, 1, 2, 3, ssd_threads=1)
    load_id, actions = node.load(chain_of(4))
    assert len(reads(actions)) == 2
    assert reads(node.end(load_id)) == []
    assert reads(node.io(actions)) == []
    assert node.core.is_idle


def test_a_lost_worker_leaves_the_devices_slot_alone_until_the_read_ended():
    node = recovered(0, slots=4)
    _, actions = node.load(chain_of(1))
    (read,) = reads(actions)
    node.handle(StoreClientLost(W0))
    node.join(W1)
    for i in range(6):
        _, taken = node.offer(facts(i, "b"), worker=W1)
        assert read.slot not in [place.slot for place in taken.places]
    node.io([read])


def test_a_full_device_makes_the_tier_smaller_for_a_while():
    node = filled()
    node.performed.clear()
    node.store(facts(0, "b"))
    operations = writes(node.performed)
    node.handle(IoDone(operations[0].op_id, error="no space left on device", is_full=True))
    status = node.core.status()
    assert status.ssd_full == 1
    assert status.tiers[Tier.SSD].limit_bytes < node.config.ssd_bytes
    assert "no space" in " ".join(status.notes)
    for operation in operations[1:]:
        node.handle(IoDone(operation.op_id))
    node.wait(61.0)
    assert node.core.status().tiers[Tier.SSD].limit_bytes == node.config.ssd_bytes


def test_repeated_errors_switch_writes_off_and_good_blocks_are_still_read():
    node = recovered(0, slots=4, pinned_share_max=0.75, ssd_threads=4)
    error_count = 0
    for i in range(20):
        node.performed.clear()
        node.store(facts(i, "b"))
        for operation in writes(node.performed):
            error_count += 1
            node.handle(IoDone(operation.op_id, error="input/output error"))
    assert 5 <= error_count < 12
    assert any("nothing is written" in note for note in node.core.status().notes)
    _, actions = node.load(chain_of(1))
    assert len(ready(node.io(actions))) == 1


def test_the_ssd_tier_never_exceeds_its_bytes_and_a_slot_is_forgotten_before_it_is_reused():
    node = filled(blocks=4, ssd_slots=3)
    for i in range(20):
        store_and_write(node, facts(i, "b"))
    used: set[int] = set()
    for action in node.performed:
        if isinstance(action, ForgetSsd):
            used.remove(action.ssd_slot)
        elif isinstance(action, WriteSsd):
            assert action.ssd_slot not in used
            used.add(action.ssd_slot)
    status = node.core.status()
    assert status.tiers[Tier.SSD].bytes <= 3 * (SLOT_BYTES + 4096)
    assert status.dropped[Tier.SSD, DropReason.EVICTED] > 0


def test_what_does_not_fit_todays_configuration_is_forgotten():
    node = Driver(ssd_slots=2)
    found = (Recovered(0, facts(0), 7), Recovered(1, facts(0), 7), Recovered(9, facts(1), 7))
    actions = node.handle(SizeClassOpened(BLOCK_BYTES, found))
    assert {a.ssd_slot for a in actions if isinstance(a, ForgetSsd)} == {1, 9}
    node.join()
    assert node.found(chain_of(2)) == [("ssd", 1)]


def test_a_file_that_cannot_be_used_leaves_the_host_memory_and_a_note():
    node = Driver(ssd_slots=2)
    node.handle(SizeClassOpened(BLOCK_BYTES, error="read-only file system"))
    node.join()
    assert node.store(facts(0)) == [0]
    assert "read-only" in " ".join(node.core.status().notes)


def test_predictions_follow_what_is_measured():
    node = recovered(0, 1, 2, ssd_threads=1)
    before = node.find(chain_of(3)).spans[0]
    _, actions = node.load(chain_of(1))
    node.now_s += 0.5
    node.io(actions)
    after = node.find(chain_of(3)).spans[1]
    assert after.block_s > 100 * before.block_s > 0
    assert abs(after.block_s - 0.5) < 0.01


def test_a_load_waits_until_its_tenants_blocks_are_written_and_can_leave():
    """Two blocks are the tenant's share of host memory, and both are being written."""
    node = Driver(slots=8, ssd_slots=64, tenant_share_max=0.25)
    node.handle(SizeClassOpened(BLOCK_BYTES, (Recovered(0, facts(0), 7),)))
    node.join()
    node.store(facts(0, "b"), facts(1, "b"))
    under_way = writes(node.performed)
    assert len(under_way) == 2
    _, actions = node.load(chain_of(1))
    assert reads(actions) == []
    assert failed(actions) == []
    assert [first for first, _ in ready(node.io(under_way))] == [0]
