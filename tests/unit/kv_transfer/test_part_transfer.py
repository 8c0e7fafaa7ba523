"""Reads of a worker of several parts: what its peers may say, and how the parts' reads become one."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import IncompatiblePeer, SetupError
from baton.core.ids import ReadId
from baton.core.messages import KVPart
from baton.core.shape import RANKS_MAX
from kv_transfer.checksums import WholeChecksums
from kv_transfer.part_plan import merged, places_of
from kv_transfer.read import ReadDone
from tests.contract.transfer_peer import make_backend
from tests.faulty_backend import Fault, FaultPlan, FaultyBackend
from tests.kv_parts import (
    FEW_HEADS,
    GROUPED,
    TIMEOUT_S,
    PartedWorker,
    places_of_shape,
    random_blocks,
    started,
)
from tests.loopback_backend import LoopbackBackend, LoopbackFabric

OFFERS = {"loopback": b""}
WHOLE = KVPart(0, 5, 0, 4, OFFERS)


class Pair:
    """An owner and a reader of two shapes; `faults` are for the reads into the reader's parts, by number."""

    def __init__(self, owner_shape, reader_shape, faults=None, *, geometry=GROUPED):
        self.faults, self.made, fabric = faults or {}, 0, LoopbackFabric()
        self.blocks = random_blocks(geometry)
        self.owner = PartedWorker(
            "loopback", "p.1", geometry, places_of_shape(geometry, owner_shape), self.blocks, fabric=fabric
        )
        self.reader = PartedWorker(
            "loopback",
            "d.1",
            geometry,
            places_of_shape(geometry, reader_shape),
            fabric=fabric,
            make=self.make,
        )
        self.sums = WholeChecksums(geometry, self.owner.memories)([1, 2])

    def make(self, kind, name, memory, fabric):
        script, self.made = self.faults.get(self.made, ()), self.made + 1
        plan = FaultPlan(script=script, delay_s=0.01)
        return FaultyBackend(make_backend(kind, name, memory, fabric), plan, memory=memory)

    async def __aenter__(self):
        self._started = started(self.owner, self.reader)
        await self._started.__aenter__()
        await self.reader.transfer.add_peer("p.1", self.owner.transfer.offers())
        return self

    async def __aexit__(self, *_):
        await self._started.__aexit__(None, None, None)

    async def read(self, **options):
        return await self.reader.read("p.1", [1, 2], [3, 4], **options)

    @property
    def counters(self):
        return self.reader.transfer.counters["loopback"]


async def test_a_read_is_one_for_each_pair_of_parts_with_bytes_in_common():
    async with Pair("tp2pp2", "tp2") as pair:
        done = await pair.read()
        assert (done.error, done.read_id, done.byte_count) == ("", 7, 2 * GROUPED.block_bytes)
        assert done.seconds > 0
        assert (pair.counters.reads_ok, pair.counters.bytes_read) == (4, 2 * GROUPED.block_bytes)
        assert pair.reader.transfer.peer_counts == {"loopback": 1}
        assert pair.reader.transfer.left_out == {}


async def test_two_workers_of_one_part_read_directly():
    async with Pair("1", "1") as pair:
        seen, manager = [], pair.reader.parts[0].manager
        inner = manager.read_checked

        async def record(read):
            seen.append(read)
            return await inner(read)

        manager.read_checked = record
        done = await pair.read(checksums=pair.sums)
        (read,) = seen
        assert (read.owner, read.ranges, read.checksums) == ("p.1", (), tuple(pair.sums))
        assert done.byte_count == 2 * GROUPED.block_bytes
        assert list(pair.reader.backends[0]._inner._peers) == ["p.1"]


async def test_replicas_are_read_from_different_ranks():
    async with Pair("tp4", "tp4", geometry=FEW_HEADS) as pair:
        peers = [backend._inner._peers for backend in pair.reader.backends]
        assert peers == [{f"p.1/part{rank}"} for rank in range(4)]
        assert not (await pair.read(checksums=pair.sums)).error


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    ("fault", "error", "stale", "settled"),
    [
        (Fault.FAIL, True, False, True),
        (Fault.TRUNCATE, True, False, True),
        (Fault.STALE, True, True, True),
        (Fault.LATE, True, False, False),
        (Fault.LOSE, True, False, True),
    ],
)
async def test_what_happens_to_one_part_happened_to_the_read(part, fault, error, stale, settled):
    async with Pair("1", "tp2pp2", {part: (fault,)}) as pair:
        done = await pair.read(timeout_s=0.05 if fault is Fault.LOSE else TIMEOUT_S)
        assert (bool(done.error), done.is_stale, done.is_settled) == (error, stale, settled)
        assert done.byte_count < 2 * GROUPED.block_bytes
        await pair.reader.transfer.settled([3])
        assert not (await pair.read()).error


async def test_a_late_part_has_landed_when_its_blocks_are_settled():
    async with Pair("pp2", "tp2", {1: (Fault.LATE,)}) as pair:
        assert not (await pair.read()).is_settled
        await pair.reader.transfer.settled([5])  # another block is not concerned
        await pair.reader.transfer.settled([4])
        upper = pair.owner.pools[0][2].reshape(2, 2, 4, -1)[:, :, 2:]
        assert (pair.reader.pools[1][4][: upper.size].reshape(upper.shape) == upper).all()


async def test_a_part_given_to_new_content_outweighs_one_that_failed():
    async with Pair("1", "tp2", {0: (Fault.FAIL,), 1: (Fault.STALE,)}) as pair:
        done = await pair.read()
        assert done.is_stale
        assert "new content" in done.error


@pytest.mark.parametrize("part", range(3))
async def test_bytes_that_arrive_wrong_in_any_part_are_found_by_the_whole_checksum(part):
    async with Pair("1", "pp3", {part: (Fault.CORRUPT, Fault.CORRUPT)}) as pair:
        assert not (await pair.read()).error
        done = await pair.read(checksums=pair.sums)
        assert len(done.corrupt) == 1
        assert (done.error, done.is_settled) == ("", True)
        assert pair.counters.reads_corrupt == 1
        done = await pair.read(checksums=pair.sums)
        assert (done.error, done.corrupt) == ("", ())


async def test_one_part_reading_several_compares_checksums_too():
    async with Pair("tp2", "1", {0: (Fault.NONE, Fault.CORRUPT)}) as pair:
        assert len((await pair.read(checksums=pair.sums)).corrupt) == 1


async def test_a_peer_that_comes_back_in_another_shape_replaces_what_it_was():
    async with Pair("tp2", "tp2") as pair:
        geometry = GROUPED
        other = PartedWorker("loopback", "p.1", geometry, places_of_shape(geometry, "1"), pair.blocks)
        other.backends[0]._fabric = pair.owner.backends[0]._fabric
        async with started(other):
            await pair.reader.transfer.add_peer("p.1", other.transfer.offers())
            assert [backend._inner._peers for backend in pair.reader.backends] == [{"p.1"}, {"p.1"}]
            assert not (await pair.read(checksums=pair.sums)).error
        await pair.reader.transfer.remove_peer("p.1")
        assert not any(backend._inner._peers for backend in pair.reader.backends)


async def test_a_peer_of_which_one_part_cannot_be_read_is_not_taken_up():
    async with Pair("tp2", "1") as pair:
        parts = pair.owner.transfer.offers()
        bad = (parts[0], msgspec.structs.replace(parts[1], transfer_offers={"loopback": b"?"}))
        with pytest.raises(IncompatiblePeer, match="loopback"):
            await pair.reader.transfer.add_peer("p.1", bad)
        assert "not a transfer peer" in (await pair.read()).error
        assert not pair.reader.backends[0]._inner._peers


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((), "0 parts"),
        ((WHOLE,) * (RANKS_MAX + 1), "65 parts"),
        ((KVPart(0, 6, 0, 4, OFFERS),), "layers 0..5 of a model with 5"),
        ((KVPart(4_000_000_000, 2, 0, 4, OFFERS),), "layers 4000000000"),
        ((KVPart(0, 4_000_000_000, 0, 4, OFFERS),), "layers"),
        ((KVPart(0, 5, 3, 2, OFFERS),), "heads 3..4 of a model with 4"),
        ((KVPart(0, 0, 0, 4, OFFERS),), "layers 0..-1"),
        ((KVPart(0, 5, 0, 0, OFFERS), WHOLE), "heads"),
        ((KVPart(0, 5, 0, 2, OFFERS),), "no part holds layers 0..1, heads 2..3"),
        ((KVPart(0, 2, 0, 4, OFFERS), KVPart(3, 2, 0, 4, OFFERS)), "no part holds layers 2..2"),
    ],
)
async def test_parts_that_no_worker_of_this_model_has_are_refused_with_a_reason(parts, reason):
    async with Pair("1", "pp2") as pair:
        with pytest.raises(IncompatiblePeer, match=reason):
            await pair.reader.transfer.add_peer("p.1", parts)
        assert (await pair.read()).error, "the peer that it was is gone as well"


COUNTS = st.one_of(st.integers(0, 6), st.integers(0, 2**32 - 1))


@settings(deadline=None)
@given(st.lists(st.builds(KVPart, COUNTS, COUNTS, COUNTS, COUNTS, st.just({})), max_size=5))
def test_whatever_a_peer_says_of_its_parts_it_is_refused_or_inside_the_model(parts):
    try:
        found = places_of(GROUPED, parts)
    except IncompatiblePeer:
        return
    for places in found:
        assert set(places.layers) <= set(range(5))
        assert set(places.heads) <= set(range(4))


DONES = st.builds(
    ReadDone,
    st.just(ReadId(0)),
    error=st.sampled_from(["", "lost"]),
    is_settled=st.booleans(),
    byte_count=st.integers(0, 9),
)
STALE = st.just(ReadDone(ReadId(0), "given away", is_stale=True))


@settings(deadline=None)
@given(st.lists(st.one_of(DONES, STALE), min_size=1, max_size=5))
def test_a_merged_read_is_as_good_as_its_worst_part(parts):
    done = merged(ReadId(3), parts)
    assert done.read_id == 3
    assert bool(done.error) == any(part.error for part in parts)
    assert done.is_stale == any(part.is_stale for part in parts)
    assert done.is_stale == (done.error == "given away")
    assert done.is_settled == all(part.is_settled for part in parts)
    assert done.byte_count == sum(part.byte_count for part in parts)


class Broken(LoopbackBackend):
    async def start(self):
        raise SetupError("no such network here")


async def test_a_part_that_no_backend_can_read_is_a_setup_error():
    def make(kind, name, memory, fabric):
        return (Broken if name.endswith("1") else LoopbackBackend)(name, memory, fabric)

    worker = PartedWorker("loopback", "w", GROUPED, places_of_shape(GROUPED, "tp2"), make=make)
    with pytest.raises(SetupError, match="no such network"):
        await worker.transfer.start()
    assert worker.transfer.left_out == {"loopback": "no such network here"}
    await asyncio.gather(worker.transfer.close(), worker.transfer.close())
