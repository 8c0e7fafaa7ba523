import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.geometry import KVGeometry
from kv_transfer.layout import (
    Places,
    RangeCopy,
    ascending_runs,
    check_places,
    check_ranges,
    cover,
    part_geometry,
    part_reads,
    runs,
    whole_places,
)
from tests.kv_parts import heads_of

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
        layer_count=draw(st.integers(1, 4)),
        kv_head_count=draw(st.sampled_from([1, 2, 4, 6])),
        head_dim=draw(st.sampled_from([1, 4])),
        block_tokens=draw(st.integers(1, 3)),
        dtype="float32",
        planes=draw(st.sampled_from([1, 2])),
        kv_dtype="int8" if quantized else "auto",
    )


@st.composite
def shapes(draw, geometry):
    """Parts of a worker by rank: stages of any length, an equal number of heads per tensor rank, or fewer
    heads than ranks."""
    heads, layers = geometry.kv_head_count, geometry.layer_count
    widths = [width for width in (1, 2, 3, 4, 8) if heads % width == 0 or width % heads == 0]
    tensor = draw(st.sampled_from(widths))
    cuts = draw(st.sets(st.integers(1, layers - 1))) if layers > 1 else set()
    return [
        Places(range(first, end), heads_of(heads, tensor, rank))
        for first, end in itertools.pairwise([0, *sorted(cuts), layers])
        for rank in range(tensor)
    ]


def content_of_each_byte(geometry, places):
    """The (kind, layer, plane, head, byte) of the whole model for every byte of a part's block."""
    g = geometry
    found = []
    sizes = [("values", g.head_dim * (1 if g.is_quantized else 4))]
    sizes += [("scales", 4)] if g.is_quantized else []
    for kind, vector_bytes in sizes:
        for layer, plane, head in itertools.product(places.layers, range(g.planes), places.heads):
            found += [(kind, layer, plane, head, i) for i in range(g.block_tokens * vector_bytes)]
    return found


@settings(deadline=None)
@given(st.data())
def test_a_part_gets_each_of_its_bytes_once_from_a_part_that_has_it(data):
    whole = data.draw(geometries())
    sources, targets = data.draw(shapes(whole)), data.draw(shapes(whole))
    target, spread = data.draw(st.sampled_from(targets)), data.draw(st.integers(0, 9))
    wanted = content_of_each_byte(whole, target)
    assert part_geometry(whole, target).block_bytes == len(wanted)
    got = [None] * len(wanted)
    reads = part_reads(whole, sources, target, spread=spread)
    assert len({read.source_part for read in reads}) == len(reads)
    for read in reads:
        held = content_of_each_byte(whole, sources[read.source_part])
        check_ranges(read.ranges, source_bytes=len(held), local_bytes=len(wanted))
        for piece in read.ranges or (RangeCopy(0, 0, len(wanted)),):
            for i in range(piece.length):
                assert got[piece.local + i] is None
                got[piece.local + i] = held[piece.source + i]
        for a, b in itertools.pairwise(read.ranges):
            assert (a.source + a.length, a.local + a.length) != (b.source, b.local)
    assert got == wanted


G = KVGeometry(layer_count=4, kv_head_count=2, head_dim=8, block_tokens=16, dtype="bfloat16")


def tensor_parts(width, layers=range(4)):
    return [Places(layers, heads_of(G.kv_head_count, width, rank)) for rank in range(width)]


def test_the_same_part_is_copied_whole_and_replicas_are_read_from_different_ranks():
    parts = tensor_parts(2)
    assert [part_reads(G, parts, part) for part in parts] == [[(0, ())], [(1, ())]]
    replicas = tensor_parts(8)
    found = [part_reads(G, replicas, replicas[rank], spread=rank % 4)[0] for rank in range(8)]
    assert found == [(rank, ()) for rank in range(8)]
    assert [read.source_part for read in part_reads(G, replicas, whole_places(G))] == [0, 4]
    assert [read.source_part for read in part_reads(G, replicas, whole_places(G), spread=7)] == [3, 7]


def test_a_stage_of_a_whole_block_is_one_range():
    stages = [Places(range(1), range(2)), Places(range(1, 4), range(2))]
    layer_bytes = G.block_bytes // 4
    assert part_reads(G, [whole_places(G)], stages[1]) == [(0, (RangeCopy(layer_bytes, 0, 3 * layer_bytes),))]
    assert part_reads(G, stages, whole_places(G)) == [
        (0, (RangeCopy(0, 0, layer_bytes),)),
        (1, (RangeCopy(0, layer_bytes, 3 * layer_bytes),)),
    ]


def test_a_rank_of_half_the_heads_takes_half_of_every_plane():
    (read,) = part_reads(G, [whole_places(G)], tensor_parts(2)[1])
    half = G.block_bytes // 16
    assert read.ranges == tuple(RangeCopy((2 * i + 1) * half, i * half, half) for i in range(8))


def test_bytes_that_nobody_holds_are_named():
    with pytest.raises(ValueError, match=r"layers 0..1, heads 1..1"):
        part_reads(G, [tensor_parts(2)[0], Places(range(2, 4), range(2))], whole_places(G))


@pytest.mark.parametrize(
    ("layers", "heads"),
    [
        (range(0), range(2)),
        (range(5), range(2)),
        (range(4), range(1, 3)),
        (range(-1, 2), range(2)),
        (range(4), range(3, 3)),
        (range(0, 4, 2), range(2)),
    ],
)
def test_parts_outside_the_model_are_refused(layers, heads):
    with pytest.raises(ValueError, match="a part with"):
        check_places(G, Places(layers, heads))
