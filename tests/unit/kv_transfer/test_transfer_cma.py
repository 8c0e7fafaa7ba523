"""Reads by the kernel: whose memory it is, how it is cut into calls, and who comes next."""

import os
import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import IncompatiblePeer, SetupError, TransferFailed
from kv_transfer.backend import KVMemory
from kv_transfer.backends import cma_memory
from kv_transfer.backends.cma import CmaBackend, CmaOffer
from kv_transfer.backends.cma_memory import CopyPlan, MemoryLost, ProcessMemory, ReadNotPermitted, vector
from kv_transfer.backends.copy_threads import CopyJob, CopyThreads, StepFailed
from kv_transfer.backends.tcp import TcpBackend
from kv_transfer.layout import RangeCopy
from kv_transfer.manager import TransferManager

BLOCK_BYTES, BLOCK_COUNT = 64, 8


class Side:
    def __init__(self, name, *, fill=0, device="cpu"):
        self.blocks = np.full((BLOCK_COUNT, BLOCK_BYTES), fill, np.uint8)
        table = np.arange(BLOCK_COUNT, dtype=np.uint64)
        self.memory = KVMemory(self.blocks.ctypes.data, BLOCK_BYTES, BLOCK_COUNT, table, device)
        self.backend = CmaBackend(name, self.memory)

    @property
    def offer(self):
        return msgspec.msgpack.decode(self.backend.offer(), type=CmaOffer)

    async def __aenter__(self):
        await self.backend.start()
        return self

    async def __aexit__(self, *_):
        await self.backend.close()


def changed(offer, **fields):
    return msgspec.msgpack.encode(msgspec.structs.replace(offer, **fields))


async def test_a_peer_elsewhere_is_left_to_other_backends():
    async with Side("p.1") as source, Side("d.1") as reader:
        with pytest.raises(IncompatiblePeer, match="another host"):
            await reader.backend.add_peer("p.1", changed(source.offer, host="other/1"))


async def test_a_process_that_got_a_dead_peers_id_is_not_the_peer():
    async with Side("p.1") as source, Side("d.1") as reader:
        with pytest.raises(TransferFailed, match="another process"):
            await reader.backend.add_peer("p.1", changed(source.offer, nonce=b"x" * 16))
        with pytest.raises(TransferFailed):
            await reader.backend.add_peer("p.1", changed(source.offer, nonce_address=4096))
        await reader.backend.add_peer("p.1", source.backend.offer())
        # As if the id had passed to another process between two reads.
        source.backend._host.presence.nonce[:] = 7
        with pytest.raises(TransferFailed, match="another process"):
            await reader.backend.read("p.1", [1], [1], timeout_s=5.0)
        await reader.backend.settled([1])


async def test_a_closed_source_is_not_read_though_its_process_lives_on():
    async with Side("p.1", fill=3) as source, Side("d.1") as reader:
        offer = source.backend.offer()
        await reader.backend.add_peer("p.1", offer)
        assert await reader.backend.read("p.1", [5], [1], timeout_s=5.0) == [5]
        await source.backend.close()
        with pytest.raises(TransferFailed) as failed:
            await reader.backend.read("p.1", [5], [2], timeout_s=5.0)
        assert not failed.value.may_still_land
        with pytest.raises(TransferFailed):
            await reader.backend.add_peer("p.2", offer)


async def test_a_process_that_may_not_be_read_says_what_would_help(monkeypatch):
    def refuse(*_):
        raise ReadNotPermitted("Operation not permitted")

    async with Side("p.1") as source, Side("d.1") as reader:
        monkeypatch.setattr(ProcessMemory, "read", refuse)
        with pytest.raises(IncompatiblePeer, match="ptrace_scope"):
            await reader.backend.add_peer("p.1", source.backend.offer())


async def test_device_memory_is_left_to_other_backends_without_a_warning(caplog):
    side = Side("w.1", device="cuda:0")
    tcp = TcpBackend("w.1", side.memory, host="127.0.0.1")
    manager = TransferManager([side.backend, tcp], memory=side.memory)
    with pytest.raises(SetupError, match=r"cma: .*host memory.*tcp: .*host staging"):
        await manager.start()
    assert (manager.left_out, caplog.text) == ({}, "")


def test_memory_that_is_not_there_is_lost_whole_or_in_part():
    process = ProcessMemory()
    into = np.zeros(16, np.uint8)
    with pytest.raises(MemoryLost):
        process.read(os.getpid(), vector(into.ctypes.data, 16), vector(8, 16))
    source = np.ones(8, np.uint8)
    rows = np.array([[source.ctypes.data, 8], [8, 8]], np.uint64)
    with pytest.raises(MemoryLost, match="of 16 B"):
        process.read(os.getpid(), vector(into.ctypes.data, 16), rows)


RANGES = st.sampled_from([(), (RangeCopy(0, 8, 8),), (RangeCopy(0, 0, 4), RangeCopy(4, 8, 4))])
PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=30)


@given(PAIRS, RANGES, st.integers(1, 100), st.integers(1, 5))
def test_a_plan_copies_every_byte_of_every_pair_in_calls_the_kernel_takes(pairs, ranges, step_bytes, iov_max):
    source, local = [s for s, _ in pairs], [t for _, t in pairs]
    there, here, size = 10_000, 90_000, 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cma_memory, "IOV_MAX", iov_max)
        plan = CopyPlan(
            source, local, ranges, source=(there, size), local=(here, size), step_bytes=step_bytes
        )
    copied = []
    for index in range(plan.step_count):
        mine, theirs = plan.step(index)
        assert len(mine) <= iov_max
        assert len(theirs) <= iov_max
        to = [a + i for a, n in mine.tolist() for i in range(n)]
        came = [a + i for a, n in theirs.tolist() for i in range(n)]
        assert len(to) <= max(step_bytes, 16)
        copied += zip(came, to, strict=True)
    pieces = ranges or (RangeCopy(0, 0, size),)
    wanted = [
        (there + s * size + r.source + i, here + t * size + r.local + i)
        for s, t in pairs
        for r in pieces
        for i in range(r.length)
    ]
    assert sorted(copied) == sorted(wanted)


class Script:
    """A read of `count` steps that notes each, and waits at its first until it is let go on."""

    def __init__(self, name, count, log, gate=None, fails_at=None):
        self.name, self.count, self.log, self.gate, self.fails_at = name, count, log, gate, fails_at
        self.begun, self.ended = threading.Event(), threading.Event()

    def plan(self):
        return self.count

    def copy(self, index):
        self.begun.set()
        if self.gate is not None:
            assert self.gate.wait(10)
        if index == self.fails_at:
            raise StepFailed("as planned")
        self.log.append((self.name, index))

    def finish(self):
        return [self.count]

    def job(self, deadline_s=None):
        def end(job):
            self.outcome = job
            self.ended.set()

        return CopyJob(self, deadline_s or time.monotonic() + 30, end)


@pytest.fixture
def threads():
    made = CopyThreads(1, name="kv under test")
    yield made
    made.close()


def test_a_short_read_passes_a_long_one(threads):
    log, gate = [], threading.Event()
    long, short = Script("long", 50, log, gate), Script("short", 2, log)
    assert threads.submit(long.job())
    assert long.begun.wait(10)
    assert threads.submit(short.job())
    gate.set()
    assert short.ended.wait(10)
    assert long.ended.wait(10)
    assert max(i for i, entry in enumerate(log) if entry[0] == "short") < 10
    assert [i for name, i in log if name == "long"] == list(range(50))
    assert long.outcome.result == [50]


@pytest.mark.parametrize("thread_count", [1, 3])
def test_a_read_that_fails_ends_once_and_alone(thread_count):
    threads = CopyThreads(thread_count, name="kv under test")
    log = []
    bad, good = Script("bad", 20, log, fails_at=3), Script("good", 20, log)
    threads.submit(bad.job())
    threads.submit(good.job())
    assert bad.ended.wait(10)
    assert good.ended.wait(10)
    threads.close()
    assert (bad.outcome.error, good.outcome.error) == ("as planned", "")
    assert sorted(i for name, i in log if name == "good") == list(range(20))
    assert not threads.submit(good.job())


def test_no_step_begins_when_the_time_is_over_or_the_read_is_given_up(threads):
    log = []
    late = Script("late", 3, log)
    threads.submit(late.job(deadline_s=time.monotonic() - 1))
    assert late.ended.wait(10)
    assert late.outcome.error == "out of time"
    gate = threading.Event()
    given_up = Script("given up", 3, log, gate)
    job = given_up.job()
    threads.submit(job)
    assert given_up.begun.wait(10)
    job.is_abandoned = True
    gate.set()
    assert given_up.ended.wait(10)
    assert given_up.outcome.error == "given up"
    assert log == [("given up", 0)]


def test_closing_ends_reads_that_wait():
    threads = CopyThreads(1, name="kv under test")
    log, gate = [], threading.Event()
    first, second = Script("first", 3, log, gate), Script("second", 3, log)
    threads.submit(first.job())
    assert first.begun.wait(10)
    threads.submit(second.job())
    closing = threading.Thread(target=threads.close)
    with threads._changed:
        closing.start()
        threads._is_closed = True
    gate.set()
    closing.join(10)
    assert "closed" in first.outcome.error
    assert "closed" in second.outcome.error
