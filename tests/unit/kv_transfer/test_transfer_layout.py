import itertools

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import ascending_runs, cover, runs

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
