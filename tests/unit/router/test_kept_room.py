"""Room that is reserved for tenants below their fair share."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.messages import Role
from router.decisions.placement.room import KEPT_EVERY, KEPT_SHARE, kept_for_others
from tests.unit.router.snapshots import worker_snapshot

BLOCKS = 100


def pool(*free):
    return [
        worker_snapshot(f"w{i}", Role.DECODE, block_tokens=1, block_count=BLOCKS, free_blocks=n, sequences=1)
        for i, n in enumerate(free)
    ]


def test_the_emptiest_keeps_room_where_the_others_have_none():
    assert kept_for_others(pool(10, 30, 5), tokens=9) == {"w0", "w1"}
    assert kept_for_others(pool(10, 60, 30), tokens=9) == {"w2"}
    assert kept_for_others(pool(40, 60, 5), tokens=9) == frozenset()
    assert kept_for_others(pool(30, 30, 25), tokens=9) == frozenset()


def test_a_worker_that_is_alone_keeps_room_too():
    assert kept_for_others(pool(30), tokens=9) == {"w0"}
    assert kept_for_others(pool(40), tokens=9) == frozenset()
    assert kept_for_others([], tokens=9) == frozenset()


@given(st.lists(st.integers(0, BLOCKS), min_size=1, max_size=40), st.integers(1, BLOCKS))
def test_room_that_was_there_is_there_afterwards(free, tokens):
    """Wherever the tokens go among the others, one worker in two keeps its reserved room, if it had it."""
    workers = pool(*free)
    kept = kept_for_others(workers, tokens)
    count = -(-len(free) // KEPT_EVERY)
    assert len(kept) <= count

    def with_room(taken=0, by=None):
        free = (w.load.free_blocks - (taken if w is by else 0) for w in workers)
        return sum(blocks >= KEPT_SHARE * BLOCKS for blocks in free)

    had = min(count, with_room())
    for worker in workers:
        if worker.worker_id not in kept:
            assert with_room(tokens + 1, worker) >= had


def test_a_worker_that_has_nothing_to_do_takes_anything():
    workers = pool(BLOCKS)
    assert kept_for_others(workers, tokens=90) == {"w0"}
    workers[0] = workers[0]._replace(load=workers[0].load._replace(sequences=0))
    assert kept_for_others(workers, tokens=90) == frozenset()
