"""A worker of any shape reads the blocks of a worker of any other, through real backends."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.core.messages import KVPart
from kv_transfer.checksums import WholeChecksums
from kv_transfer.part_plan import part_name
from tests.contract.transfer_peer import PeerProcess, cut
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

SOURCE, LOCAL = [4, 0, 5], [1, 2, 5]
WHOLE = dict.fromkeys(GEOMETRIES.values())


def whole_blocks(geometry):
    if WHOLE[geometry] is None:
        WHOLE[geometry] = random_blocks(geometry)
    return WHOLE[geometry]


def check_arrived(reader, *, source=SOURCE, local=LOCAL):
    """The reader's pools have exactly these blocks of the owner, each part its own."""
    whole = whole_blocks(reader.geometry)
    for places, pool in zip(reader.places, reader.pools, strict=True):
        assert (pool[local] == cut(whole[source], reader.geometry, places)).all()
        others = [block for block in range(BLOCK_COUNT) if block not in local]
        assert not pool[others].any()


async def hand_over(kind, geometry, owner_shape, reader_shape):
    owner = PartedWorker(
        kind, "p.1", geometry, places_of_shape(geometry, owner_shape), whole_blocks(geometry)
    )
    reader = PartedWorker(kind, "d.1", geometry, places_of_shape(geometry, reader_shape))
    sums = WholeChecksums(geometry, owner.memories)(SOURCE)
    async with started(owner, reader):
        await reader.transfer.add_peer(owner.name, owner.transfer.offers())
        done = await reader.read(owner.name, SOURCE, LOCAL, checksums=sums)
        assert (done.error, done.corrupt, done.is_settled) == ("", (), True)
        assert done.byte_count == len(SOURCE) * sum(pool.shape[1] for pool in reader.pools)
        check_arrived(reader)
        owner.generations[4] += 1
        assert (await reader.read(owner.name, SOURCE, LOCAL)).is_stale
        await reader.transfer.remove_peer(owner.name)
        assert (await reader.read(owner.name, SOURCE, LOCAL)).error


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("owner_shape", SHAPES)
@pytest.mark.parametrize("reader_shape", SHAPES)
async def test_every_pair_of_shapes_within_a_host(geometry, owner_shape, reader_shape):
    await hand_over("cma", geometry, owner_shape, reader_shape)


@pytest.mark.parametrize("owner_shape", SHAPES)
@pytest.mark.parametrize("reader_shape", SHAPES)
async def test_every_pair_of_shapes_over_the_network(owner_shape, reader_shape):
    await hand_over("tcp", GEOMETRIES["int8"], owner_shape, reader_shape)


@pytest.mark.parametrize(
    ("kind", "owner_shape", "reader_shape"), [("nixl", "tp2pp2", "tp2"), ("nccl", "tp2", "1")]
)
async def test_the_other_backends_do_the_same(kind, owner_shape, reader_shape):
    await hand_over(kind, GROUPED, owner_shape, reader_shape)


class Ranks:
    """An owner with a process for each rank, as on several hosts."""

    def __init__(self, kind, geometry, shape):
        self.kind, self.places = kind, places_of_shape(geometry, shape)
        with ThreadPoolExecutor(len(self.places)) as starters:
            self.peers = list(
                starters.map(
                    lambda number: PeerProcess(
                        kind,
                        part_name("p.1", number, len(self.places)),
                        block_count=BLOCK_COUNT,
                        part=(geometry, self.places[number]),
                    ),
                    range(len(self.places)),
                )
            )

    def offers(self):
        return tuple(
            KVPart(
                places.layers.start,
                len(places.layers),
                places.heads.start,
                len(places.heads),
                {self.kind: peer.offer},
            )
            for places, peer in zip(self.places, self.peers, strict=True)
        )

    def close(self):
        for peer in self.peers:
            peer.close()


@pytest.mark.parametrize("kind", ["cma", "tcp"])
@pytest.mark.parametrize("shape", ["1", "tp2", "pp3"])
async def test_ranks_in_processes_of_their_own_give_away_freeze_and_die(kind, shape):
    ranks = await asyncio.to_thread(Ranks, kind, GROUPED, "tp2")
    reader = PartedWorker(kind, "d.1", GROUPED, places_of_shape(GROUPED, shape))
    try:
        async with started(reader):
            await reader.transfer.add_peer("p.1", ranks.offers())
            assert not (await reader.read("p.1", SOURCE, LOCAL)).error
            check_arrived(reader)

            await asyncio.to_thread(ranks.peers[1].reuse, 5)
            done = await reader.read("p.1", SOURCE, LOCAL)
            assert done.is_stale, "one rank gave the block away, whatever the other says"
            assert done.is_settled

            if kind == "tcp":  # the kernel copies out of a frozen process too
                ranks.peers[0].freeze()
                done = await reader.read("p.1", [0], [0], timeout_s=0.2)
                assert done.error
                assert not done.is_stale
                ranks.peers[0].thaw()
                await reader.transfer.settled([0])
                assert not (await reader.read("p.1", [0], [0])).error

            await asyncio.to_thread(ranks.peers[1].kill)
            done = await reader.read("p.1", [0], [3])
            assert done.error
            assert not done.is_stale
            await reader.transfer.settled([3])
    finally:
        await asyncio.to_thread(ranks.close)
