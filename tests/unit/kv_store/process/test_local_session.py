"""The local session between worker and store node, over a real Unix socket, both ends' production code."""

import asyncio
import contextlib
import mmap
import os
import socket
import stat
import threading

import pytest

from baton.core.errors import SetupError
from baton.core.ids import BlockHash, NodeId, WorkerId
from baton.core.store import (
    BlocksReady,
    BlocksWritten,
    EndLoad,
    FindBlocks,
    StoreHello,
    StoreRefused,
    StoreWelcome,
)
from baton.core.store_admin import AskClear, AskStatus, Declined, Done
from baton.wire.local import FRAME_BYTES_MAX, ask_store
from kv_store.process.local import LocalServer, LocalSessions
from worker import events as e
from worker.store_copier import StoreCopier
from worker.store_link import StoreLink

BLOCK_BYTES, SLOT_BYTES, SLOT_COUNT = 1000, 4096, 8
WORKER = WorkerId("w.1")
HELLO = StoreHello(WORKER, "fingerprint", BLOCK_BYTES)
WELCOME = StoreWelcome(NodeId("n.1"), SLOT_BYTES, SLOT_COUNT, has_checksums=True)
READY = BlocksReady(1, 0, (2,), (0,))


class Heard:
    """Remembers what it is told; tests wait for it."""

    def __init__(self):
        self.told = []
        self._changed = asyncio.Condition()

    def tell(self, *what):
        self.told.append(what)
        self._wake = asyncio.ensure_future(self._notify())

    async def _notify(self):
        async with self._changed:
            self._changed.notify_all()

    async def until(self, *what, count=1):
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: self.told.count(what) >= count)


class Node(Heard):
    """The node's adapter with a script in place of the core."""

    def __init__(self, path):
        super().__init__()
        self.arena = os.memfd_create("arena")
        os.ftruncate(self.arena, SLOT_BYTES * SLOT_COUNT)
        self.welcome = WELCOME
        self.sessions = LocalSessions(sink=self, arena_descriptor=lambda hello: self.arena)
        self.server = LocalServer(
            str(path), sessions=self.sessions, answer=self.answer, spawn=asyncio.ensure_future
        )
        self.server.open()
        self.task = asyncio.create_task(self.server.run())

    async def answer(self, request):
        return Done(f"heard {type(request).__name__}")

    def worker_joined(self, hello):
        self.tell("joined", hello.worker_id)
        self.sessions.send(hello.worker_id, self.welcome)

    def from_worker(self, worker_id, message):
        self.tell("from", worker_id, message)

    def worker_lost(self, worker_id):
        self.tell("lost", worker_id)

    async def close(self):
        self.task.cancel()
        await asyncio.wait({self.task})
        self.server.close()
        os.close(self.arena)


class Copies:
    """Maps the arena as the real ones do; a copy lasts until it is allowed to end."""

    def __init__(self, descriptor, welcome):
        self.memory = mmap.mmap(descriptor, welcome.slot_bytes * welcome.slot_count)
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.is_closed = False

    def to_slots(self, blocks, slots):
        self.begun.set()
        assert self.may_end.wait(10)
        for block, slot in zip(blocks, slots, strict=True):
            self.memory[slot * SLOT_BYTES : slot * SLOT_BYTES + 4] = block.to_bytes(4, "little")
        return tuple(blocks)

    def from_slots(self, slots, blocks, checksums):
        return tuple(i for i, checksum in enumerate(checksums) if checksum)

    def close(self):
        assert self.may_end.is_set()
        self.memory.close()
        self.is_closed = True


class Worker(Heard):
    def __init__(self, path, worker_id=WORKER):
        super().__init__()
        self.copies = []
        self.copier = StoreCopier(self.open, block_count=100, post=lambda done: self.tell("copied", done))
        self.link = StoreLink(
            str(path),
            hello=StoreHello(worker_id, "fingerprint", BLOCK_BYTES),
            sink=self,
            arena_user=self.copier,
        )
        self.task = asyncio.create_task(self.link.run())

    def open(self, descriptor, welcome):
        self.copies.append(Copies(descriptor, welcome))
        return self.copies[-1]

    def store_joined(self, welcome):
        self.tell("joined", welcome)

    def from_store(self, message):
        self.tell("from", message)

    def store_lost(self):
        self.tell("lost")

    def last_copy(self):
        return next(what[1] for what in reversed(self.told) if what[0] == "copied")

    async def until_copied(self, count):
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: sum(w[0] == "copied" for w in self.told) >= count)
        return [w[1] for w in self.told if w[0] == "copied"]

    async def close(self):
        self.task.cancel()
        await asyncio.wait({self.task})
        self.copier.close()


@pytest.fixture
async def path(tmp_path):
    return tmp_path / "s.sock"


@contextlib.asynccontextmanager
async def opened(*parts):
    try:
        yield
    finally:
        for part in reversed(parts):
            await part.close()


async def raw(path):
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, str(path))
    return connection


async def test_both_sides_speak_and_share_memory(path):
    node = Node(path)
    worker = Worker(path)
    async with opened(node, worker):
        await worker.until("joined", WELCOME)
        find = FindBlocks(1, (BlockHash(b"h" * 16),), 0)
        worker.link.send(find)
        await node.until("from", WORKER, find)
        node.sessions.send(WORKER, READY)
        await worker.until("from", READY)
        worker.copier.to_store(e.CopyToStore(7, blocks=(41, 42), slots=(5, 3)))
        (done,) = await worker.until_copied(1)
        assert (done.copy_id, done.checksums, done.error) == (7, (41, 42), "")
        assert os.pread(node.arena, 4, 3 * SLOT_BYTES) == (42).to_bytes(4, "little")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_session_ends_only_after_the_copy_under_way(path):
    node = Node(path)
    worker = Worker(path)
    async with opened(node, worker):
        await worker.until("joined", WELCOME)
        copies = worker.copies[0]
        copies.may_end.clear()
        worker.copier.to_store(e.CopyToStore(1, (1,), (1,)))
        worker.copier.to_store(e.CopyToStore(2, (2,), (2,)))
        await asyncio.to_thread(copies.begun.wait, 10)
        node.sessions.drop(WORKER, "test")
        await worker.until("lost")
        assert ("lost", WORKER) not in node.told, "the node must not take the slots back yet"
        copies.may_end.set()
        await node.until("lost", WORKER)
        first, second = await worker.until_copied(2)
        assert (first.copy_id, first.error) == (1, "")
        assert second.copy_id == 2
        assert "session" in second.error
        assert copies.is_closed
        assert os.pread(node.arena, 4, 2 * SLOT_BYTES) == bytes(4), "the second never began"
        await worker.until("joined", WELCOME, count=2)  # and it comes back by itself


async def test_the_worker_outlives_the_node_and_finds_the_next_one(path):
    worker = Worker(path)  # nobody there yet
    async with opened(worker):
        first = Node(path)
        await worker.until("joined", WELCOME)
        first.sessions.hang_up()
        await first.close()
        await worker.until("lost")
        assert not worker.link.is_joined
        worker.link.send(EndLoad(1))  # harmless
        second = Node(path)
        second.welcome = StoreWelcome(NodeId("n.2"), SLOT_BYTES, 4, has_checksums=False)
        async with opened(second):
            await worker.until("joined", second.welcome)
            worker.copier.to_store(e.CopyToStore(1, (9,), (3,)))
            await worker.until_copied(1)
            assert os.pread(second.arena, 4, 3 * SLOT_BYTES) == (9).to_bytes(4, "little")


async def test_slots_beyond_the_arena_are_not_touched(path):
    node = Node(path)
    worker = Worker(path)
    async with opened(node, worker):
        await worker.until("joined", WELCOME)
        worker.copier.to_store(e.CopyToStore(1, (1,), (SLOT_COUNT,)))
        worker.copier.from_store(e.CopyFromStore(2, (-1,), (1,), (0,)))
        worker.copier.from_store(e.CopyFromStore(3, (0, 1), (1, 2), (0, 5)))
        done = {d.copy_id: d for d in await worker.until_copied(3)}
        assert "beyond" in done[1].error
        assert "beyond" in done[2].error
        assert done[3].corrupt == (1,)


async def test_a_refused_worker_says_why_and_is_never_lost(path):
    node = Node(path)
    node.welcome = StoreRefused("blocks of 1000 bytes are not wanted here")
    worker = Worker(path)
    async with opened(node, worker):
        await node.until("joined", WORKER, count=2)  # it tries again
        assert "not wanted" in worker.link.trouble
        assert worker.told == []
        assert ("lost", WORKER) not in node.told


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff\xff", (5).to_bytes(4, "little") + b"\xc1\xc1\xc1\xc1\xc1", b"\x03\x00"],
    ids=["too long", "no message", "cut off"],
)
async def test_garbage_ends_the_session_and_nothing_else(path, garbage):
    node = Node(path)
    worker = Worker(path)
    async with opened(node, worker):
        await worker.until("joined", WELCOME)
        before_hello = await raw(path)
        before_hello.send(garbage)
        before_hello.close()
        after_hello = await raw(path)
        other = WorkerId("other.1")
        payload = _encoded(StoreHello(other, "f", BLOCK_BYTES))
        after_hello.send(payload + garbage)
        await node.until("joined", other)
        after_hello.close()
        await node.until("lost", other)
        find = FindBlocks(1, (BlockHash(b"h" * 16),), 0)
        worker.link.send(find)
        await node.until("from", WORKER, find)
        assert not any(what[:2] == ("from", other) for what in node.told)


async def test_a_hash_of_the_wrong_size_ends_the_session(path):
    node = Node(path)
    worker = Worker(path)
    async with opened(node, worker):
        await worker.until("joined", WELCOME)
        worker.link.send(FindBlocks(1, (BlockHash(b"short"),), 0))
        await worker.until("lost")
        await node.until("lost", WORKER)
        assert not any(what[0] == "from" for what in node.told)


async def test_a_second_session_of_a_worker_waits_for_the_end_of_the_first(path):
    node = Node(path)
    async with opened(node):
        first = await raw(path)
        first.send(_encoded(HELLO))
        await node.until("joined", WORKER)
        second = await raw(path)
        second.send(_encoded(HELLO))
        first.send(_encoded(BlocksWritten(1, (5,))))
        await node.until("from", WORKER, BlocksWritten(1, (5,)))
        assert node.told.count(("joined", WORKER)) == 1
        first.close()
        await node.until("joined", WORKER, count=2)
        kinds = [what[0] for what in node.told]
        assert kinds == ["joined", "from", "lost", "joined"]
        second.close()
        await node.until("lost", WORKER, count=2)


async def test_an_operator_is_answered(path):
    node = Node(path)
    async with opened(node):
        assert await ask_store(str(path), AskStatus()) == Done("heard AskStatus")
        assert await ask_store(str(path), AskClear()) == Done("heard AskClear")
        connection = await raw(path)
        connection.send(_framed(b"\xc0"))
        answer = await asyncio.get_running_loop().sock_recv(connection, 1000)
        assert b"Declined" in answer
        connection.close()
    assert Declined("x") != Done("x")


async def test_a_dead_nodes_socket_is_replaced_and_a_living_ones_is_not(path):
    node = Node(path)
    async with opened(node):
        with pytest.raises(SetupError, match="another store node"):
            Node(path)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    async with opened(Node(path), Worker(path)):
        pass
    path.write_text("precious")
    with pytest.raises(SetupError, match="something else"):
        Node(path)
    assert path.read_text() == "precious"
    with pytest.raises(SetupError, match="longer"):
        Node(path.with_name("x" * 120))


def _framed(payload):
    assert len(payload) <= FRAME_BYTES_MAX
    return len(payload).to_bytes(4, "little") + payload


def _encoded(message):
    from baton.wire.store_codec import FROM_WORKER

    return _framed(FROM_WORKER.encode(message))
