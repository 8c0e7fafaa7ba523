"""What a node's publisher says is what the book understands, in however many messages."""

import pytest

from baton.config import StoreConfig
from baton.core.store import NodeRef, StoreMember, Tier
from kv_store.directory.book import DirectoryBook
from kv_store.node.context import HASHES_MAX, Context
from kv_store.node.publisher import Publisher


def h(number):
    return number.to_bytes(16, "big")


@pytest.mark.parametrize("count", [0, 1, HASHES_MAX, 2 * HASHES_MAX + 1])
def test_a_snapshot_is_heard_whole(count):
    node = NodeRef("a", "a")
    context = Context(node, StoreConfig(), now_s=0.0)
    publisher, book = Publisher(context), DirectoryBook(10**6)
    for number in range(count):
        publisher.block_is(h(number), Tier.SSD if number % 3 else Tier.HOST)
    publisher.flush()
    context.take_actions()  # lost on the way
    book.renew(StoreMember(node), lease_s=10, now_s=0)
    publisher.snapshot()
    publisher.block_is(h(count), Tier.HOST)
    publisher.block_is(h(0), None)
    publisher.flush()
    heard = [book.publish(action.changes) for action in context.take_actions()]
    assert all(heard)
    assert len(heard) >= -(-count // HASHES_MAX)
    held = [bool(found) for found in book.look_up(map(h, range(count + 2)))]
    assert held == [0 < number <= count for number in range(count + 2)]
