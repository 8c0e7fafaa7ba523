from baton.core.store import FindBlocks
from kv_store.node.events import WriteSsd
from tests.unit.kv_store.node.driver import Driver, chain_of, facts


def test_a_long_prompt_used_again_goes_to_ssd_whole():
    """More blocks than may wait to be written at once."""
    node = Driver(slots=400, ssd_slots=400)
    node.join()
    hashes = chain_of(300)
    for first in range(0, 300, 50):
        assert len(node.store(*(facts(i) for i in range(first, first + 50)))) == 50
    written = {a.facts.block_hash for a in use_again(node, hashes) if isinstance(a, WriteSsd)}
    assert written == set(hashes)


def use_again(node: Driver, hashes):
    actions = node.say(FindBlocks(node.new_id(), hashes, len(hashes)))
    actions += node.say(FindBlocks(node.new_id(), hashes, len(hashes)))
    return actions + node.io(actions)
