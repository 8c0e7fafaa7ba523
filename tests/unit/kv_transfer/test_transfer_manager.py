import asyncio
import logging

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import IncompatiblePeer, SetupError, TransferFailed
from kv_transfer import manager
from kv_transfer.backend import KVMemory
from kv_transfer.checksums import checksum_blocks
from kv_transfer.manager import TransferManager
from tests.contract.transfer_peer import block_read
from tests.faulty_backend import FAULTS, Fault, FaultPlan, FaultyBackend
from tests.loopback_backend import LoopbackBackend, LoopbackFabric

BLOCK_BYTES, BLOCK_COUNT = 32, 16
QUICK = tuple(fault for fault in FAULTS if fault is not Fault.LOSE)


class Pool:
    def __init__(self, *, block_bytes=BLOCK_BYTES, fill=0):
        self.blocks = np.full((BLOCK_COUNT, block_bytes), fill, np.uint8)
        self.generations = np.zeros(BLOCK_COUNT, np.uint64)
        self.memory = KVMemory(self.blocks.ctypes.data, block_bytes, BLOCK_COUNT, self.generations)


class Broken(LoopbackBackend):
    """Cannot work on this machine."""

    name = "broken"

    async def start(self):
        raise SetupError("no such network here")


class Other(LoopbackBackend):
    name = "other"


class Pair:
    """A source filled with sevens and a manager that reads from it, through planned faults."""

    def __init__(self, plan=None):
        fabric = LoopbackFabric()
        self.source, self.target = Pool(fill=7), Pool()
        self.far = LoopbackBackend("prefill.1", self.source.memory, fabric)
        self.near = FaultyBackend(
            LoopbackBackend("decode.1", self.target.memory, fabric),
            plan or FaultPlan(),
            memory=self.target.memory,
        )
        self.manager = TransferManager([self.near], memory=self.target.memory)

    async def __aenter__(self):
        await self.far.start()
        await self.manager.start()
        await self.manager.add_peer("prefill.1", {"loopback": self.far.offer()})
        return self

    async def __aexit__(self, *_):
        await self.manager.close()

    async def read(self, source, local, generations, **options):
        return await self.manager.read_checked(
            block_read("prefill.1", source, local, generations, block_bytes=BLOCK_BYTES, **options)
        )

    @property
    def counters(self):
        return self.manager.counters["loopback"]


async def test_a_good_read_reports_its_bytes_and_is_counted():
    async with Pair() as pair:
        outcome = await pair.read([1, 2], [3, 4], [0, 0])
        assert (outcome.error, outcome.is_settled, outcome.is_stale) == ("", True, False)
        assert outcome.byte_count == 2 * BLOCK_BYTES
        assert (pair.target.blocks[[3, 4]] == 7).all()
        assert (pair.counters.reads_ok, pair.counters.bytes_read) == (1, 2 * BLOCK_BYTES)


async def test_blocks_given_to_new_content_are_stale_not_read():
    async with Pair() as pair:
        pair.source.generations[2] += 1
        outcome = await pair.read([1, 2], [3, 4], [0, 0])
        assert outcome.is_stale
        assert outcome.is_settled
        assert "[2]" in outcome.error
        assert (pair.counters.reads_stale, pair.counters.bytes_read) == (1, 0)


@given(
    old=st.lists(st.integers(0, 3), min_size=4, max_size=4), granted=st.lists(st.integers(0, 3), max_size=5)
)
def test_a_read_is_good_exactly_when_every_generation_is_the_granted_one(old, granted):
    async def check():
        async with Pair() as pair:
            pair.source.generations[:4] = old
            outcome = await pair.read([0, 1, 2, 3], [0, 1, 2, 3], granted)
            assert outcome.is_stale == (old != granted)
            assert bool(outcome.error) == outcome.is_stale

    asyncio.run(check())


async def test_a_late_read_is_unsettled_until_its_bytes_have_landed():
    async with Pair(FaultPlan(script=(Fault.LATE,), delay_s=0.02)) as pair:
        outcome = await pair.read([1], [3], [0])
        assert outcome.error
        assert not outcome.is_settled
        assert not pair.target.blocks.any()
        await pair.manager.settled([5])  # another block is not concerned
        assert not pair.target.blocks.any()
        await pair.manager.settled([3])
        assert (pair.target.blocks[3] == 7).all()
        assert (pair.counters.reads_failed, pair.counters.reads_unsettled) == (1, 1)


async def test_a_read_is_answered_in_time_even_when_the_backend_hangs(monkeypatch):
    monkeypatch.setattr(manager, "READ_GRACE_S", 0.01)
    async with Pair() as pair:

        async def hang(*_, timeout_s, ranges):
            await asyncio.Event().wait()

        pair.near.read = hang
        outcome = await pair.read([1], [3], [0], timeout_s=0.01)
        assert "hangs" in outcome.error
        assert not outcome.is_settled
        assert pair.counters.reads_unsettled == 1


@pytest.mark.parametrize(
    ("fault", "error", "stale", "arrived"),
    [
        (Fault.NONE, False, False, 4),
        (Fault.DELAY, False, False, 4),
        (Fault.FAIL, True, False, 0),
        (Fault.TRUNCATE, True, False, 2),
        (Fault.STALE, True, True, 4),
    ],
)
async def test_each_fault_shows_as_what_it_is(fault, error, stale, arrived):
    async with Pair(FaultPlan(script=(fault,), delay_s=0.001)) as pair:
        outcome = await pair.read([0, 1, 2, 3], [0, 1, 2, 3], [0] * 4)
        assert (bool(outcome.error), outcome.is_stale, outcome.is_settled) == (error, stale, True)
        assert int((pair.target.blocks == 7).all(axis=1).sum()) == arrived
        assert pair.near.happened[fault] == 1
        assert not (await pair.read([0], [0], [0])).error


async def test_the_same_seed_gives_the_same_faults():
    async def faults(seed):
        plan = FaultPlan(seed=seed, probability=0.5, faults=QUICK, delay_s=0.0001)
        async with Pair(plan) as pair:
            outcomes = [await pair.read([0], [0], [0]) for _ in range(40)]
            await pair.manager.settled([0])
            return [(o.error, o.is_settled) for o in outcomes]

    assert await faults(1) == await faults(1) != await faults(2)


async def test_a_backend_that_cannot_start_is_left_out_with_its_reason(caplog):
    memory, fabric = Pool().memory, LoopbackFabric()
    backends = [Broken("w.1", memory, fabric), LoopbackBackend("w.1", memory, fabric)]
    manager = TransferManager(backends, memory=memory)
    with caplog.at_level(logging.WARNING):
        await manager.start()
    assert list(manager.offers()) == ["loopback"]
    assert manager.left_out == {"broken": "no such network here"}
    assert "no such network here" in caplog.text
    await manager.close()
    await manager.close()


async def test_no_backend_at_all_is_a_setup_error_that_says_why():
    memory = Pool().memory
    manager = TransferManager([Broken("w.1", memory, LoopbackFabric())], memory=memory)
    with pytest.raises(SetupError, match="no such network here"):
        await manager.start()


async def test_the_next_backend_is_tried_when_the_preferred_one_refuses_the_peer():
    memory, fabric = Pool().memory, LoopbackFabric()
    manager = TransferManager(
        [Other("d.1", memory, LoopbackFabric()), LoopbackBackend("d.1", memory, fabric)],
        memory=memory,
    )
    await manager.start()
    source = LoopbackBackend("p.1", Pool(fill=9).memory, fabric)
    await source.start()
    assert await manager.add_peer("p.1", {"other": b"garbage", "loopback": source.offer()}) == "loopback"
    assert not (await manager.read_checked(block_read("p.1", [0], [0], [0]))).error
    with pytest.raises(IncompatiblePeer):
        await manager.add_peer("p.1", {"carrier pigeon": b""})
    assert (await manager.read_checked(block_read("p.1", [0], [0], [0]))).error
    await manager.close()


async def test_a_peer_that_is_unknown_or_gone_is_an_outcome_and_a_bug_of_ours_is_not():
    async with Pair() as pair:
        assert (await pair.manager.read_checked(block_read("nobody.1", [0], [0], [0]))).error
        with pytest.raises(ValueError):
            await pair.read([0], [BLOCK_COUNT], [0])
        await pair.far.close()
        outcome = await pair.read([0], [0], [0])
        assert outcome.error
        assert outcome.is_settled
        await pair.manager.remove_peer("prefill.1")
        await pair.manager.remove_peer("prefill.1")
        with pytest.raises(TransferFailed):
            await pair.near.read("prefill.1", [0], [0], timeout_s=1.0)


async def test_the_preference_is_ours_not_the_peers():
    memory, fabric = Pool().memory, LoopbackFabric()
    manager = TransferManager(
        [Other("d.1", memory, fabric), LoopbackBackend("d.1", memory, fabric)], memory=memory
    )
    await manager.start()
    source = LoopbackBackend("p.1", Pool(fill=9).memory, fabric)
    await source.start()
    offer = source.offer()
    assert await manager.add_peer("p.1", {"loopback": offer, "other": offer}) == "other"
    assert await manager.add_peer("p.1", {"loopback": offer}) == "loopback"
    await manager.close()


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.HOLE])
async def test_bytes_that_arrive_wrong_are_found_by_their_checksums_and_only_by_them(fault):
    async with Pair(FaultPlan(script=(fault, fault))) as pair:
        pair.source.blocks[:] = np.arange(BLOCK_COUNT)[:, None] + 1
        sums = checksum_blocks(pair.source.memory, [1, 2])
        unseen = await pair.read([1, 2], [3, 4], [0, 0])
        assert not unseen.error
        assert (pair.target.blocks[[3, 4]] != pair.source.blocks[[1, 2]]).any()
        pair.target.blocks[:] = 0
        seen = await pair.read([1, 2], [3, 4], [0, 0], checksums=sums)
        assert len(seen.corrupt) == 1
        assert seen.is_settled
        assert (pair.counters.reads_corrupt, pair.counters.reads_ok) == (1, 1)
        again = await pair.read([1, 2], [3, 4], [0, 0], checksums=sums)
        assert (again.error, again.corrupt) == ("", ())
        assert (pair.target.blocks[[3, 4]] == pair.source.blocks[[1, 2]]).all()


async def test_blocks_that_changed_hands_are_stale_before_they_are_corrupt():
    async with Pair() as pair:
        sums = checksum_blocks(pair.source.memory, [1])
        pair.source.generations[1] += 1
        pair.source.blocks[1] = 9
        outcome = await pair.read([1], [3], [0], checksums=sums)
        assert (outcome.is_stale, outcome.corrupt) == (True, ())


async def test_a_lost_read_is_heard_of_when_its_time_is_up():
    async with Pair(FaultPlan(script=(Fault.LOSE,))) as pair:
        outcome = await pair.read([1], [3], [0], timeout_s=0.01)
        assert outcome.error
        assert outcome.is_settled
        assert not pair.target.blocks.any()


def test_checksums_are_xxh3_of_each_block():
    pool = Pool()
    pool.blocks[:] = np.arange(BLOCK_COUNT)[:, None]
    expected = [xxhash.xxh3_64_intdigest(pool.blocks[block].tobytes()) for block in (5, 0)]
    assert checksum_blocks(pool.memory, [5, 0]) == expected


def test_checksums_of_content_leave_the_rest_of_a_block_out():
    pool = Pool()
    pool.blocks[:] = np.arange(BLOCK_COUNT)[:, None]
    expected = [xxhash.xxh3_64_intdigest(pool.blocks[3, :10].tobytes())]
    pool.blocks[:, 10:] = 77
    assert checksum_blocks(pool.memory, [3], content_bytes=10) == expected


async def test_a_checksum_of_nought_stands_for_none():
    async with Pair() as pair:
        seen = await pair.read([1, 2], [3, 4], [0, 0], checksums=[0, 5])
        assert (seen.error, seen.corrupt) == ("", (1,))


def test_silent_faults_need_the_memory_they_spoil():
    inner = LoopbackBackend("w.1", Pool().memory, LoopbackFabric())
    with pytest.raises(ValueError, match="memory"):
        FaultyBackend(inner, FaultPlan(faults=(Fault.CORRUPT,)))


async def test_the_manager_counts_peers_by_the_backend_that_reads_them():
    async with Pair() as pair:
        assert pair.manager.peer_counts == {"loopback": 1}
        await pair.manager.remove_peer("prefill.1")
        assert pair.manager.peer_counts == {"loopback": 0}
