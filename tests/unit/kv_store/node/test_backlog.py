"""What goes down to SSD before it has to leave host memory."""

from baton.core.store import BlocksWritten, FindBlocks
from kv_store.node.events import WriteSsd
from tests.unit.kv_store.node.driver import BlockFacts, Driver, chain_of, facts


def store_and_write(node: Driver, *blocks: BlockFacts) -> list[WriteSsd]:
    """In batches: a worker's share of the arena bounds one offer."""
    written = []
    for first in range(0, len(blocks), 50):
        offer_id, taken = node.offer(*blocks[first : first + 50])
        actions = node.say(BlocksWritten(offer_id, (7,) * len(taken.places)))
        written += writes(actions + node.io(actions))
    return written


def writes(actions) -> list[WriteSsd]:
    return [action for action in actions if isinstance(action, WriteSsd)]


def test_while_the_device_has_room_everything_goes_down():
    """More blocks than may wait to be written at once."""
    node = Driver(slots=400, ssd_slots=400)
    node.join()
    written = store_and_write(node, *(facts(i) for i in range(300)))
    assert {action.facts.block_hash for action in written} == set(chain_of(300))


def test_a_full_device_takes_what_is_used_again():
    node = Driver(slots=500, ssd_slots=100, policy="serving")  # nothing leaves
    node.join()
    assert 90 <= len(store_and_write(node, *(facts(i) for i in range(300)))) <= 110
    hashes = chain_of(100, "b")
    assert store_and_write(node, *(facts(i, "b") for i in range(100))) == []
    used = node.say(FindBlocks(node.new_id(), hashes, 0))
    used += node.say(FindBlocks(node.new_id(), hashes, 0))
    written = writes(used + node.io(used))
    assert {action.facts.block_hash for action in written} == set(hashes)
