import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.core.geometry import KVGeometry
from kv_transfer.layout import (
    RangeCopy,
    ascending_runs,
    check_ranges,
    cover,
    head_range,
    runs,
    shard_geometry,
    shard_reads,
)

BLOCKS = st.lists(st.integers(0, 40), max_size=30)
PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30)


@given(PAIRS)
def test_runs_say_the_same_copies_in_the_same_order(pairs):
    source, local = [s for s, _ in pairs], [t for _, t in pairs]
    said = [(run.source + i, run.local + i) for run in runs(source, local) for i in range(run.block_count)]
    assert said == pairs


@given(PAIRS)
def test_no_two_neighbouring_runs_could_be_one(pairs):
    found = list(runs([s for s, _ in pairs], [t for _, t in pairs]))
    for a, b in itertools.pairwise(found):
        assert (b.source, b.local) != (a.source + a.block_count, a.local + a.block_count)


@given(BLOCKS)
def test_ascending_runs_are_the_blocks(blocks):
    assert [block for run in ascending_runs(blocks) for block in run] == blocks


@given(BLOCKS, st.integers(0, 10))
def test_a_cover_holds_every_block_and_only_small_gaps(blocks, gap_max):
    ranges = cover(blocks, gap_max=gap_max)
    covered = [entry for r in ranges for entry in r]
    assert covered == sorted(set(covered))
    assert set(blocks) <= set(covered)
    assert {r.start for r in ranges} | {r.stop - 1 for r in ranges} <= set(blocks)
    wanted = sorted(set(blocks))
    for a, b in itertools.pairwise(wanted):
        together = any(a in r and b in r for r in ranges)
        assert together == (b - a - 1 <= gap_max)


@st.composite
def geometries(draw):
    quantized = draw(st.booleans())
    return KVGeometry(
        layer_count=draw(st.integers(1, 3)),
        kv_head_count=draw(st.sampled_from([1, 2, 4, 6, 8])),
        head_dim=draw(st.sampled_from([1, 4])),
        block_tokens=draw(st.integers(1, 3)),
        dtype="float32",
        planes=draw(st.sampled_from([1, 2])),
        kv_dtype="int8" if quantized else "auto",
    )


def owner_of_each_byte(geometry, width, rank):
    """Return the (part, layer, plane, head, byte) of the whole model for every byte of a rank's block."""
    g, heads = geometry, head_range(geometry.kv_head_count, width, rank)
    found = []
    sizes = [("values", g.head_dim * (1 if g.is_quantized else 4))]
    sizes += [("scales", 4)] if g.is_quantized else []
    for part, vector_bytes in sizes:
        for layer, plane, head in itertools.product(range(g.layer_count), range(g.planes), heads):
            found += [(part, layer, plane, head, i) for i in range(g.block_tokens * vector_bytes)]
    return found


@given(geometries(), st.sampled_from([1, 2, 3, 4, 8, 16]), st.sampled_from([1, 2, 3, 4, 8, 16]), st.data())
def test_a_target_rank_gets_each_of_its_bytes_once_from_a_rank_that_has_it(geometry, p, d, data):
    heads = geometry.kv_head_count
    assume(all(heads % width == 0 or width % heads == 0 for width in (p, d)))
    rank = data.draw(st.integers(0, d - 1))
    wanted = owner_of_each_byte(geometry, d, rank)
    assert shard_geometry(geometry, d).block_bytes == len(wanted)
    got = [None] * len(wanted)
    for read in shard_reads(geometry, source_width=p, target_width=d, target_rank=rank):
        held = owner_of_each_byte(geometry, p, read.source_rank)
        check_ranges(read.ranges, source_bytes=len(held), local_bytes=len(wanted))
        for piece in read.ranges:
            for i in range(piece.length):
                assert got[piece.local + i] is None
                got[piece.local + i] = held[piece.source + i]
        for a, b in itertools.pairwise(read.ranges):
            assert (a.source + a.length, a.local + a.length) != (b.source, b.local)
    assert got == wanted


def test_equal_widths_are_one_range_and_copies_are_read_from_different_ranks():
    g = KVGeometry(layer_count=4, kv_head_count=2, head_dim=8, block_tokens=16, dtype="bfloat16")
    for rank in range(2):
        (read,) = shard_reads(g, source_width=2, target_width=2, target_rank=rank)
        assert read == (rank, (RangeCopy(0, 0, shard_geometry(g, 2).block_bytes),))
    read = [shard_reads(g, source_width=8, target_width=8, target_rank=r)[0].source_rank for r in range(8)]
    assert read == list(range(8))
    assert [r.source_rank for r in shard_reads(g, source_width=8, target_width=1, target_rank=0)] == [0, 4]


@pytest.mark.parametrize(("width", "rank"), [(3, 0), (2, 2), (2, -1)])
def test_widths_that_do_not_fit_are_refused(width, rank):
    with pytest.raises(ValueError):
        head_range(4, width, rank)
