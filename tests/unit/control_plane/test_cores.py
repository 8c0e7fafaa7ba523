from hypothesis import given
from hypothesis import strategies as st

from control_plane.cores import core_share, thread_count


@given(st.integers(1, 64), st.integers(1, 64))
def test_shares_are_disjoint_contiguous_and_use_every_core_or_nobody_is_pinned(worker_count, core_count):
    cores = list(range(core_count))
    shares = [core_share(i, worker_count, cores) for i in range(worker_count)]
    if worker_count > core_count:
        assert all(share == tuple(cores) for share in shares)
        return
    assert [core for share in shares for core in share] == cores
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_threads_follow_the_share_unless_the_operator_says_otherwise():
    assert thread_count((0, 1, 2), 2, 6, asked=0) == 3
    assert thread_count((0, 1), 5, 2, asked=0) == 1
    assert thread_count((), 1, 8, asked=0) == 1
    assert thread_count((0,), 5, 2, asked=4) == 4
