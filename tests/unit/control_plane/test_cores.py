from hypothesis import given
from hypothesis import strategies as st

from baton.core.shape import cores_of_rank
from control_plane.cores import gpu_share, gpus_of_worker, thread_count, worker_cores


@given(st.integers(1, 64), st.integers(1, 64))
def test_shares_are_disjoint_contiguous_and_use_every_core_or_nobody_is_pinned(rank_count, core_count):
    cores = list(range(core_count))
    shares = [cores_of_rank(cores, i, rank_count) for i in range(rank_count)]
    if rank_count > core_count:
        assert all(share == tuple(cores) for share in shares)
        return
    assert [core for share in shares for core in share] == cores
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.integers(1, 64))
def test_a_worker_has_the_cores_of_its_ranks_and_each_rank_some_of_them(rank_counts, core_count):
    cores, in_all = list(range(core_count)), sum(rank_counts)
    firsts = [sum(rank_counts[:i]) for i in range(len(rank_counts))]
    workers = [worker_cores(first, n, in_all, cores) for first, n in zip(firsts, rank_counts, strict=True)]
    if in_all > core_count:
        assert all(worker == tuple(cores) for worker in workers)
        return
    assert [core for worker in workers for core in worker] == cores
    for worker, rank_count in zip(workers, rank_counts, strict=True):
        assert len(worker) >= rank_count
        of_ranks = [cores_of_rank(worker, rank, rank_count) for rank in range(rank_count)]
        assert [core for rank in of_ranks for core in rank] == list(worker)
        assert all(of_ranks)


def test_workers_beyond_the_configured_ones_share_the_cores_of_the_first():
    assert worker_cores(3, 2, 4, range(8)) == (0, 1, 6, 7)
    assert worker_cores(4, 2, 4, range(8)) == (0, 1, 2, 3)


def test_threads_follow_the_share_unless_the_operator_says_otherwise():
    assert thread_count((0, 1, 2), 2, 6, asked=0) == 3
    assert thread_count((0, 1), 5, 2, asked=0) == 1
    assert thread_count((), 1, 8, asked=0) == 1
    assert thread_count((0,), 5, 2, asked=4) == 4
    assert thread_count((0, 1, 2, 3, 4), 3, 8, asked=0, rank_count=2) == 2
    assert thread_count((0, 1), 4, 2, asked=0, rank_count=2) == 1


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


def test_each_of_several_ranks_has_a_whole_device_and_workers_of_one_share_the_rest():
    counts = (2, 1, 1)
    assert gpus_of_worker(2, counts, 4) == 2
    assert [gpus_of_worker(1, counts, devices) for devices in (3, 4)] == [0.5, 1]
    assert gpus_of_worker(1, (2,), 2) == 0, "one that is started later finds none left"
