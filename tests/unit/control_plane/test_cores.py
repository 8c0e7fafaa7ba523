from hypothesis import given
from hypothesis import strategies as st

from control_plane.cores import core_share, thread_count
from control_plane.ray_ops import gpu_share


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


@given(st.integers(0, 16), st.integers(1, 64))
def test_workers_share_the_devices_there_are(device_count, worker_count):
    share = gpu_share(float(device_count), worker_count)
    if device_count == 0:
        assert share == 0
    elif device_count >= worker_count:
        assert share == 1
    else:
        workers_on_one_device = int(1 / share + 1e-9)
        assert workers_on_one_device * device_count >= worker_count
