"""What a worker makes of a store node that says what it should not, and of many loads that wait."""

import pytest

from baton.core.store import BlocksReady, BlocksWritten, FindBlocks, FoundBlocks, FoundSpan, Place, TakeBlocks
from tests.unit.worker.test_core_store import (
    PROMPT,
    at_rest,
    compute,
    filled,
    heard,
    pair,
    right,
    submit,
    wait_for_load,
)


class Looked(dict):
    """Counts the values that were looked at."""

    count = 0

    def values(self):
        for value in super().values():
            self.count += 1
            yield value


def looked_at(waiting_count):
    """The loads that one round looks at, where so many wait for others to make room."""
    machine, node = pair(block_count=64)
    loads = machine.core._store._loads
    loads._prefetch_max = 5
    for i in range(waiting_count):
        submit(machine, node, f"s{i}", tuple(range(1000 * i, 1000 * i + 23)))
    while machine.to_store:
        message = machine.to_store.popleft()
        if isinstance(message, FindBlocks):
            spans = (FoundSpan(node.tier, len(message.hashes) - message.held_count, 0.0, 0.0),)
            node.tell(FoundBlocks(message.find_id, spans))
    loads._loads = Looked(loads._loads)
    loads.advance(now_s=node.now_s)
    return loads._loads.count


def test_the_work_of_a_round_grows_with_the_loads_that_wait_and_not_with_their_square():
    assert looked_at(80) <= 2.5 * looked_at(40)


def test_a_place_for_a_block_that_was_not_offered_is_not_written():
    machine, node = pair()
    submit(machine, node, "a")
    node.wait(1.0)  # the answer does not come
    machine.to_store.clear()
    compute(machine, node)
    node.wait(1.0)
    offer = machine.to_store.popleft()
    node.tell(TakeBlocks(offer.offer_id, (Place(99, 0), Place(-1, 1))))
    assert machine.to_store.popleft() == BlocksWritten(offer.offer_id, (None, None))
    assert not machine.copies


@pytest.mark.parametrize(("checksums", "tiers"), [((), ()), ((1, 2, 3), ()), ((1,), ("ssd", "ssd"))])
def test_lists_of_different_lengths_are_no_blocks(checksums, tiers):
    machine, node = pair()
    filled(machine, node)
    load_id = wait_for_load(machine, node)
    node.tell(BlocksReady(load_id, 0, (0,), checksums, tiers))
    at_rest(machine, node)
    assert right("b", machine)


@pytest.mark.parametrize("counts", [(99,), (2, -3, 50), (0, 5, 1)])
def test_more_found_than_asked_for_is_what_was_asked_for(counts):
    machine, node = pair()
    filled(machine, node)
    submit(machine, node, "b")
    find = machine.to_store.popleft()
    assert isinstance(find, FindBlocks)
    spans = tuple(FoundSpan(node.tier, count, 0.0, 0.0) for count in counts)
    node.tell(FoundBlocks(find.find_id, spans))
    at_rest(machine, node)
    assert right("b", machine)
    assert all(len(load.hashes) <= len(PROMPT) // 4 for load in heard(node, type(find)))
