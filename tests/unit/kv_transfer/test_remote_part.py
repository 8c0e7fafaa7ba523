"""Parts of a worker's blocks in another process, as their leader sees them: a stand-in, the messages, and the
part's own side."""

import asyncio
import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import IncompatiblePeer, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer import remote_part
from kv_transfer.backend import KVMemory
from kv_transfer.manager import TransferManager
from kv_transfer.part_service import PartService
from kv_transfer.part_transfer import OwnPart, PartTransfer
from kv_transfer.remote_messages import PartOrder, PartReady, PartReport, ReadIntoPart
from kv_transfer.remote_part import PartLost, RemotePart
from tests.contract.transfer_peer import block_read, make_backend
from tests.faulty_backend import Fault, FaultPlan, FaultyBackend
from tests.kv_parts import (
    BLOCK_COUNT,
    GEOMETRIES,
    GROUPED,
    SHAPES,
    PartedWorker,
    places_of_shape,
    random_blocks,
    started,
)
from tests.loopback_backend import LoopbackFabric

TIMEOUT_S = 20.0


class FarPart:
    """A part with a table and a manager of its own. Every message passes as bytes, in a later turn of the
    loop, unless the link is cut."""

    def __init__(self, places, pool, generations, leader_table, backend):
        self.pool, self.generations = pool, generations
        self.memory = KVMemory(pool.ctypes.data, pool.shape[1], len(pool), generations)
        self.places = places
        self.manager = TransferManager([backend(self.memory)], memory=self.memory)
        self.is_cut, self.silences = False, []
        self.reads, self.crash = asyncio.Event(), asyncio.Future()
        self.leader_table = leader_table

    async def start(self):
        await self.manager.start()
        self.service = PartService(
            self.manager,
            raise_generations=self.raise_,
            report=self._report,
            on_crash=self.crash.set_result,
        )
        self.stand_in = RemotePart(
            "rank 1", send=self._order, generations=self.leader_table, on_silent=self.silences.append
        )
        places, memory = self.places, self.memory
        self._report(
            PartReady(
                *(places.layers.start, len(places.layers), places.heads.start, len(places.heads)),
                *(memory.block_bytes, memory.block_count, self.manager.offers(), self.manager.left_out),
            )
        )
        await self.stand_in.start()
        return self.stand_in

    def raise_(self, blocks, generations):
        places = list(blocks)
        self.generations[places] = np.maximum(self.generations[places], np.array(generations, np.uint64))

    def _order(self, order):
        data = msgspec.msgpack.encode(order)
        asyncio.get_running_loop().call_soon(self._take, data)

    def _take(self, data):
        if not self.is_cut:
            order = msgspec.msgpack.decode(data, type=PartOrder)
            self.service.take(order)
            if isinstance(order, ReadIntoPart):
                self.reads.set()

    def _report(self, report):
        data = msgspec.msgpack.encode(report)
        asyncio.get_running_loop().call_soon(self._heard, data)

    def _heard(self, data):
        if not self.is_cut:
            self.stand_in.heard(msgspec.msgpack.decode(data, type=PartReport))


class FarWorker(PartedWorker):
    """A worker some of whose parts, by number, are elsewhere."""

    def __init__(self, kind, name, geometry, places, blocks=None, *, far=(), fabric=None, make=make_backend):
        super().__init__(kind, name, geometry, places, blocks, fabric=fabric, make=make)
        self.far = {}
        for number in far:
            self.far[number] = FarPart(
                places[number],
                self.pools[number],
                self.generations.copy(),
                self.generations,
                lambda memory, number=number: make(kind, WorkerId(f"{name}/far{number}"), memory, fabric),
            )

    async def join(self):
        for number, part in self.far.items():
            stand_in = await part.start()
            places = stand_in.places(self.geometry, block_count=BLOCK_COUNT)
            self.parts[number] = OwnPart(places, None, stand_in)
        self.transfer = PartTransfer(self.geometry, self.parts)
        return self


@contextlib.asynccontextmanager
async def far_pair(
    owner_shape, reader_shape, *, owner_far=(), reader_far=(), kind="tcp", geometry=GROUPED, **options
):
    """An owner with random blocks and a reader with zeros."""
    owner = FarWorker(
        kind, "p.1", geometry, places_of_shape(geometry, owner_shape), random_blocks(geometry), far=owner_far
    )
    reader = FarWorker(
        kind, "d.1", geometry, places_of_shape(geometry, reader_shape), far=reader_far, **options
    )
    async with started(await owner.join(), await reader.join()):
        await reader.transfer.add_peer(owner.name, owner.transfer.offers())
        yield owner, reader
    for part in (*owner.far.values(), *reader.far.values()):
        assert not part.crash.done()


def expected_pools(reader):
    """What the reader's parts look like if blocks 1 and 2 of the owner are in 3 and 4."""
    blocks = np.zeros((BLOCK_COUNT, reader.geometry.block_bytes), np.uint8)
    blocks[[3, 4]] = random_blocks(reader.geometry)[[1, 2]]
    return PartedWorker("loopback", "x", reader.geometry, reader.places, blocks).pools


SHAPE_AND_FAR = st.sampled_from(sorted(SHAPES)).flatmap(
    lambda shape: st.tuples(
        st.just(shape), st.sets(st.sampled_from(range(SHAPES[shape][0] * len(SHAPES[shape][1]))))
    )
)


@settings(max_examples=25, deadline=None)
@given(SHAPE_AND_FAR, SHAPE_AND_FAR, st.sampled_from(sorted(GEOMETRIES)))
def test_the_bytes_arrive_exactly_wherever_the_parts_are(owner_of, reader_of, geometry):
    async def check():
        (owner_shape, owner_far), (reader_shape, reader_far) = owner_of, reader_of
        kinds = {"owner_far": owner_far, "reader_far": reader_far, "geometry": GEOMETRIES[geometry]}
        async with far_pair(owner_shape, reader_shape, **kinds) as (_, reader):
            done = await reader.read("p.1", [1, 2], [3, 4])
            assert not done.error
            assert done.byte_count >= 2 * reader.geometry.block_bytes
            for pool, wanted in zip(reader.pools, expected_pools(reader), strict=True):
                assert (pool == wanted).all()
            counters = reader.transfer.counters["tcp"]
            assert counters.bytes_read == done.byte_count

    asyncio.run(check())


async def test_generations_are_compared_at_every_source_part_wherever_it_is():
    async with far_pair("tp2pp2", "pp2", owner_far=(2, 3), reader_far=(1,)) as (owner, reader):
        owner.far[3].raise_([2], [500])
        done = await reader.read("p.1", [1, 2], [3, 4])
        assert done.is_stale
        assert "new content" in done.error
        assert not (await reader.read("p.1", [1], [3])).error


async def test_generations_have_risen_before_a_read_writes_the_first_byte():
    """The reader's blocks 3 and 4 were granted to others before. Now they get new content."""
    seen = []

    class Watched:
        def __init__(self, inner, memory):
            self._inner, self._memory, self.name = inner, memory, inner.name

        def __getattr__(self, name):
            return getattr(self._inner, name)

        async def read(self, peer, source, local, **options):
            seen.append([int(self._memory.generations[block]) for block in local])
            return await self._inner.read(peer, source, local, **options)

    def make(kind, name, memory, fabric):
        inner = make_backend(kind, name, memory, fabric)
        return Watched(inner, memory) if "far" in name else inner

    async with far_pair("1", "pp2", reader_far=(1,), make=make) as (_, reader):
        reader.generations[[3, 4]] += 7
        assert reader.far[1].generations[3] == 103
        assert not (await reader.read("p.1", [1, 2], [3, 4])).error
        assert seen == [[110, 111]]
        part = reader.far[1]
        part.raise_([3], [105])
        assert part.generations[3] == 110, "an older message does not take it back"
        source = PartedWorker("tcp", "s", GROUPED, places_of_shape(GROUPED, "1"))
        async with started(source):
            await source.transfer.add_peer("d.1", reader.transfer.offers())
            assert (await source.read("d.1", [3], [0])).is_stale, "whoever was granted the block finds out"


def faulty(*faults, delay_s=0.05):
    def make(kind, name, memory, fabric):
        inner = make_backend(kind, name, memory, fabric)
        if "far" not in name:
            return inner
        return FaultyBackend(inner, FaultPlan(script=faults, delay_s=delay_s), memory=memory)

    return make


async def test_a_late_part_has_landed_when_its_blocks_are_settled():
    async with far_pair("1", "pp2", reader_far=(1,), make=faulty(Fault.LATE)) as (_, reader):
        done = await reader.read("p.1", [1, 2], [3, 4])
        assert (bool(done.error), done.is_settled) == (True, False)
        assert not reader.far[1].pool.any()
        await reader.transfer.settled([4])
        assert (reader.far[1].pool == expected_pools(reader)[1]).all()
        assert reader.transfer.counters["tcp"].reads_unsettled == 1


async def test_what_a_cancelled_read_still_writes_is_written_when_its_blocks_are_settled():
    async with far_pair("1", "pp2", reader_far=(1,), make=faulty(Fault.DELAY, delay_s=30)) as (_, reader):
        read = asyncio.create_task(reader.read("p.1", [1, 2], [3, 4]))
        part = reader.far[1]
        await part.reads.wait()
        read.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await read
        await reader.transfer.settled([3])
        assert not part.service._calls, "the read is not only given up but over"


async def test_the_loss_of_a_part_ends_its_reads_at_once_and_nothing_counts_as_settled():
    async with far_pair("1", "pp2", reader_far=(1,), make=faulty(Fault.LOSE, Fault.LOSE)) as (_, reader):
        part = reader.far[1]
        read = asyncio.create_task(reader.read("p.1", [1, 2], [3, 4], timeout_s=600))
        await part.reads.wait()
        part.is_cut = True
        part.stand_in.lost("rank 1 has died")
        async with asyncio.timeout(TIMEOUT_S):
            done = await read
        assert "rank 1 has died" in done.error
        assert not done.is_settled, "nobody knows"
        assert "rank 1 has died" in (await reader.read("p.1", [1], [3])).error
        settled = asyncio.create_task(reader.transfer.settled([3]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not settled.done()
        settled.cancel()
        with pytest.raises(TransferFailed, match="has died"):
            await part.stand_in.add_peer(WorkerId("q"), {})
        await reader.transfer.remove_peer("p.1")
        await part.service.close()


async def test_a_part_that_does_not_say_how_a_read_ended_is_not_waited_for_longer(monkeypatch):
    monkeypatch.setattr(remote_part, "READ_GRACE_S", 0.01)
    monkeypatch.setattr(remote_part, "LINK_S", 0.01)
    async with far_pair("1", "pp2", reader_far=(1,)) as (_, reader):
        part = reader.far[1]
        part.is_cut = True
        done = await reader.read("p.1", [1], [3], timeout_s=0.5)
        assert "does not say" in done.error
        assert not done.is_settled
        part.is_cut = False
        await reader.transfer.settled([3])


async def test_a_part_that_answers_nothing_at_all_ends_the_worker(monkeypatch):
    async with far_pair("1", "pp2", reader_far=(1,)) as (_, reader):
        part = reader.far[1]
        part.is_cut = True
        # The pair connects within the usual time: only the part that is cut off has to miss this one.
        monkeypatch.setattr(remote_part, "ANSWER_S", 0.01)
        await reader.transfer.remove_peer("p.1")
        assert "does not answer" in part.silences[0]
        assert (
            "does not answer" in (await part.stand_in.read_checked(block_read("p.1", [1], [3], [101]))).error
        )
        await part.service.close()


async def test_peers_that_a_far_part_cannot_read_are_refused_with_its_reason():
    async with far_pair("1", "pp2", reader_far=(1,)) as (owner, reader):
        (whole,) = owner.transfer.offers()
        bad = msgspec.structs.replace(whole, transfer_offers={"tcp": b"?"})
        with pytest.raises(IncompatiblePeer, match="malformed TCP offer"):
            await reader.far[1].stand_in.add_peer(WorkerId("q"), bad.transfer_offers)
        with pytest.raises(IncompatiblePeer):
            await reader.transfer.add_peer("p.1", (bad,))
        assert "not a transfer peer" in (await reader.read("p.1", [1], [3])).error
        await reader.transfer.add_peer("p.1", (whole,))
        assert not (await reader.read("p.1", [1], [3])).error


async def test_a_peer_is_removed_after_it_was_added_even_if_nobody_waited_for_that():
    async with far_pair("1", "pp2", reader_far=(1,)) as (owner, reader):
        part, (whole,) = reader.far[1], owner.transfer.offers()
        adding = asyncio.create_task(
            part.stand_in.add_peer(WorkerId("q"), whole.transfer_offers, block_bytes=GROUPED.block_bytes)
        )
        await asyncio.sleep(0)
        adding.cancel()
        await part.stand_in.remove_peer(WorkerId("q"))
        done = await part.stand_in.read_checked(block_read("q", [1], [3], [101]))
        assert "not a transfer peer" in done.error


async def test_nobody_reads_a_part_that_is_closed():
    async with far_pair("pp2", "1", owner_far=(1,)) as (owner, reader):
        assert not (await reader.read("p.1", [1], [3])).error
        await owner.far[1].stand_in.close()
        done = await reader.read("p.1", [1], [3], timeout_s=1)
        assert done.error
        assert not done.is_stale
        with pytest.raises(PartLost, match="closed"):
            await owner.far[1].stand_in.start()
        await owner.far[1].stand_in.settled([1])


async def test_a_pool_of_another_model_is_not_taken_for_a_part():
    worker = FarWorker(
        "loopback", "w", GROUPED, places_of_shape(GROUPED, "pp2"), far=(1,), fabric=LoopbackFabric()
    )
    stand_in = await worker.far[1].start()
    with pytest.raises(ValueError, match="different models or settings"):
        stand_in.places(GROUPED, block_count=BLOCK_COUNT + 1)
    with pytest.raises(ValueError, match="different models or settings"):
        stand_in.places(GEOMETRIES["few heads"], block_count=BLOCK_COUNT)
    await stand_in.close()


async def test_a_mistake_in_an_order_ends_the_worker_and_not_only_its_read():
    worker = FarWorker(
        "loopback", "w", GROUPED, places_of_shape(GROUPED, "pp2"), far=(1,), fabric=LoopbackFabric()
    )
    stand_in = await worker.far[1].start()
    await stand_in.add_peer(WorkerId("w/far1"), stand_in.offers())
    read = asyncio.create_task(stand_in.read_checked(block_read("w/far1", [0], [1, 2], [100])))
    assert "ValueError" in await worker.far[1].crash
    read.cancel()
    await stand_in.close()
