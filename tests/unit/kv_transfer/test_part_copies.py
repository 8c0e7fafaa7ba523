"""Parts of blocks gathered into whole ones and scattered again, and the checksums of whole blocks."""

import numpy as np
import pytest
import xxhash

from kv_transfer.backend import KVMemory
from kv_transfer.checksums import WholeChecksums
from kv_transfer.layout import RangeCopy, part_reads, whole_places
from kv_transfer.part_copies import PartCopies, rows_at
from tests.contract.transfer_peer import cut
from tests.kv_parts import GEOMETRIES, QUANTIZED, SHAPES, places_of_shape, random_blocks

each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
each_shape = pytest.mark.parametrize("shape", SHAPES)
REST = 5
"""Bytes of a row that do not belong to the block."""


def pools_of(blocks, geometry, shape):
    return [cut(blocks, geometry, places) for places in places_of_shape(geometry, shape)]


def memories(pools, geometry, shape):
    table = np.zeros(len(pools[0]), np.uint64)
    return [
        (places, KVMemory(pool.ctypes.data, pool.shape[1], len(pool), table))
        for places, pool in zip(places_of_shape(geometry, shape), pools, strict=True)
    ]


@each_geometry
@each_shape
def test_parts_are_gathered_and_scattered_where_they_belong(geometry, shape):
    blocks = random_blocks(geometry)
    pools, empty = pools_of(blocks, geometry, shape), pools_of(0 * blocks, geometry, shape)
    places = places_of_shape(geometry, shape)
    wholes = np.full((4, geometry.block_bytes + REST), 9, np.uint8)
    there = PartCopies(geometry, wholes, list(zip(places, pools, strict=True)))
    there.gather(5, 2)
    assert (wholes[2, : geometry.block_bytes] == blocks[5]).all()
    assert (wholes[2, geometry.block_bytes :] == 9).all()
    assert (wholes[[0, 1, 3]] == 9).all()
    assert there.agree(5, 2)
    PartCopies(geometry, wholes, list(zip(places, empty, strict=True))).scatter(2, 1)
    for pool, filled in zip(pools, empty, strict=True):
        assert (filled[1] == pool[5]).all()
        assert not filled[[0, 2, 3, 4, 5]].any()


@each_geometry
@each_shape
def test_numpy_and_byte_ranges_say_the_same_of_a_block(geometry, shape):
    blocks = random_blocks(geometry)
    for places in places_of_shape(geometry, shape):
        (read,) = part_reads(geometry, [whole_places(geometry)], places)
        expected = cut(blocks, geometry, places)
        found = np.zeros_like(expected)
        for piece in read.ranges or (RangeCopy(0, 0, geometry.block_bytes),):
            found[:, piece.local : piece.local + piece.length] = blocks[
                :, piece.source : piece.source + piece.length
            ]
        assert (found == expected).all()


@each_geometry
@each_shape
def test_the_checksum_is_that_of_one_rank_and_any_flipped_byte_is_found(geometry, shape):
    blocks = random_blocks(geometry)
    pools = pools_of(blocks, geometry, shape)
    checksums = WholeChecksums(geometry, memories(pools, geometry, shape))
    expected = [xxhash.xxh3_64_intdigest(blocks[block].tobytes()) for block in (4, 0)]
    assert checksums([4, 0]) == expected
    assert checksums.wrong([4, 0], expected) == ()
    for pool in pools:
        for at in (0, pool.shape[1] // 2, pool.shape[1] - 1):
            pool[0, at] ^= 1
            assert checksums.wrong([4, 0], expected) == (1,)
            assert checksums.wrong([4, 0], [expected[0], 0]) == (), "nobody computed one"
            pool[0, at] ^= 1
    assert checksums.wrong([4, 0], expected) == ()


def test_replicas_that_differ_do_not_agree():
    places = [whole_places(QUANTIZED)] * 2
    pools = [random_blocks(QUANTIZED), random_blocks(QUANTIZED)]
    copies = PartCopies(
        QUANTIZED, np.zeros((1, QUANTIZED.block_bytes), np.uint8), list(zip(places, pools, strict=True))
    )
    copies.gather(0, 0)
    assert copies.agree(0, 0)
    pools[0][0, -1] ^= 1  # a scale of the first replica, which the second has overwritten
    assert not copies.agree(0, 0)


def test_rows_are_the_memory_itself():
    memory = np.zeros(12, np.uint8)
    rows = rows_at(memory.ctypes.data, 4, 3)
    rows[1, 2] = 5
    assert memory[6] == 5
