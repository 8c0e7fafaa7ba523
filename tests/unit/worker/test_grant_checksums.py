import asyncio
import threading

from baton.core.messages import KVGrant, KVRefused
from worker.grant_checksums import GrantChecksums


def grant(seq, *blocks):
    return KVGrant(seq, 0, 0, blocks, (1,) * len(blocks), 5.0)


class Sender:
    """Checksums are ten times the block's id, computed when allowed to."""

    def __init__(self):
        self.sent, self.tasks = [], []
        self.may_hash = threading.Event()
        self.may_hash.set()
        self.grants = GrantChecksums(self.hash, self.on_send, spawn=self.spawn)

    def hash(self, blocks):
        assert threading.current_thread() is not threading.main_thread()
        assert self.may_hash.wait(10)
        return [10 * block for block in blocks]

    def on_send(self, reader, message):
        self.sent.append((reader, message))

    def spawn(self, coroutine):
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    async def all_sent(self):
        await asyncio.gather(*self.tasks)


async def test_grants_leave_with_the_checksums_of_their_blocks():
    sender = Sender()
    sender.grants.send("d.1", grant("s", 3, 4))
    await sender.all_sent()
    [(reader, message)] = sender.sent
    assert (reader, message.checksums, message.source_blocks) == ("d.1", (30, 40), (3, 4))


async def test_messages_keep_their_order_and_other_readers_do_not_wait():
    sender = Sender()
    sender.may_hash.clear()
    refusal = KVRefused("t", 0, "no")
    sender.grants.send("d.1", grant("s", 3))
    sender.grants.send("d.1", refusal)
    sender.grants.send("d.1", grant("u"))
    sender.grants.send("d.2", refusal)
    assert sender.sent == [("d.2", refusal)]
    sender.may_hash.set()
    await sender.all_sent()
    assert [m.seq_id for reader, m in sender.sent if reader == "d.1"] == ["s", "t", "u"]
    sender.grants.send("d.1", refusal)
    assert sender.sent[-1] == ("d.1", refusal)


async def test_a_grant_of_no_blocks_leaves_at_once():
    sender = Sender()
    sender.grants.send("d.1", grant("s"))
    assert sender.sent == [("d.1", grant("s"))]
    assert not sender.tasks
