"""What every transfer backend must do, between processes where it can."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest

from baton.core.errors import IncompatiblePeer, TransferFailed
from baton.core.transfer_backends import BACKENDS
from kv_transfer.layout import RangeCopy
from tests.circular_garbage import nothing_left
from tests.contract.transfer_peer import BLOCK_BYTES, BLOCK_COUNT, LocalPeer, PeerProcess, Pool, make_backend
from tests.loopback_backend import LoopbackFabric

NIXL_OVER_TCP = ("nixl_tcp", "nixl_awake_tcp")
KINDS = [*BACKENDS, *NIXL_OVER_TCP, "loopback"]
KERNEL_COPIES = ("cuda_ipc", "cma", "nixl")
"""Backends whose reads within one host are copies by the kernel or the GPU: a frozen peer can be read."""
FABRIC = LoopbackFabric()
TIMEOUT_S = 20.0


def set_transport(kind, patch):
    """UCX reads its environment for each agent; without TCP forced it copies within the host."""
    if kind in NIXL_OVER_TCP:
        patch.setenv("UCX_TLS", "tcp")


def new_peer(kind, worker_id, **options):
    with pytest.MonkeyPatch.context() as patch:
        set_transport(kind, patch)
        if kind == "loopback":
            return LocalPeer(worker_id, FABRIC, **options)
        return PeerProcess(kind, worker_id, **options)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def peer(kind):
    """Shared by the tests that leave it as it was."""
    peer = new_peer(kind, f"prefill-{kind}.1")
    yield peer
    peer.close()


@pytest.fixture
def frozen(kind, peer):
    """The shared peer, to freeze and to thaw."""
    if kind == "loopback":
        pytest.skip("one process: nobody to freeze")
    yield peer
    peer.thaw()


@pytest.fixture
def mortal(kind):
    """One to kill."""
    if kind == "loopback":
        pytest.skip("one process: nobody to kill")
    peer = new_peer(kind, f"mortal-{kind}.1", seed=2)
    yield peer
    peer.close()


@pytest.fixture
async def reader(kind, monkeypatch):
    set_transport(kind, monkeypatch)
    pool = Pool(0)
    pool.blocks[:] = 0
    backend = make_backend(kind, "decode.1", pool.memory, FABRIC)
    await backend.start()
    backend.pool = pool
    yield backend
    await backend.close()


@pytest.fixture(autouse=True)
def no_threads_left(peer):
    before = set(threading.enumerate())
    yield
    left = [
        thread.name
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith(("nixl", "kv "))
    ]
    assert left == []


async def read(reader, peer, source, local, timeout_s=TIMEOUT_S):
    return await reader.read(peer.worker_id, source, local, timeout_s=timeout_s)


async def test_scattered_blocks_arrive_identical_and_nothing_else_changes(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    source, local = [5, 3, 4, 60, 0, 1, 2], [9, 20, 21, 22, 63, 0, 2]
    generations = await read(reader, peer, source, local)
    assert (reader.pool.blocks[local] == peer.expected[source]).all()
    assert generations == [100 + block for block in source]
    others = sorted(set(range(BLOCK_COUNT)) - set(local))
    assert not reader.pool.blocks[others].any()


async def test_the_whole_pool_and_nothing_at_all_can_be_read(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    every = list(range(BLOCK_COUNT))
    await read(reader, peer, every, every[::-1])
    assert (reader.pool.blocks[::-1] == peer.expected).all()
    assert await read(reader, peer, [], []) == []


async def test_generations_are_read_in_the_asked_order(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    found = await read(reader, peer, [63, 0, 31, 0], [1, 2, 3, 4])
    assert found == [163, 100, 131, 100]


async def test_reads_leave_nothing_to_the_collector_of_garbage(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    with nothing_left("kv_transfer."):
        for _ in range(3):
            assert await read(reader, peer, [0, 1], [2, 3]) == [100, 101]


async def test_many_reads_at_once_keep_their_blocks_apart(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    source = np.random.default_rng(3).permutation(BLOCK_COUNT).tolist()
    results = await asyncio.gather(*(read(reader, peer, [s], [i]) for i, s in enumerate(source)))
    assert (reader.pool.blocks == peer.expected[source]).all()
    assert results == [[100 + s] for s in source]


async def test_blocks_that_do_not_exist_are_refused(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    for source in ([BLOCK_COUNT], [-1], [2**40]):
        with pytest.raises(TransferFailed) as refused:
            await read(reader, peer, source, [0])
        assert not refused.value.may_still_land
    for source, local in (([0], [BLOCK_COUNT]), ([0], [-1]), ([0, 1], [0])):
        with pytest.raises(ValueError):
            await read(reader, peer, source, local)
    assert not reader.pool.blocks.any()


async def test_a_stranger_cannot_be_read_and_a_removed_peer_is_one(reader, peer):
    with pytest.raises(TransferFailed):
        await read(reader, peer, [0], [0])
    await reader.add_peer(peer.worker_id, peer.offer)
    await reader.remove_peer(peer.worker_id)
    await reader.remove_peer(peer.worker_id)
    with pytest.raises(TransferFailed):
        await read(reader, peer, [0], [0])
    await reader.add_peer(peer.worker_id, peer.offer)
    await read(reader, peer, [7], [0])
    assert (reader.pool.blocks[0] == peer.expected[7]).all()


async def test_adding_a_peer_twice_changes_nothing(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    await reader.add_peer(peer.worker_id, peer.offer)
    assert await read(reader, peer, [1], [1]) == [101]


async def test_offers_that_are_garbage_are_refused(reader, peer, kind):
    for offer in (b"", b"\x00garbage", peer.offer[:-9], b"\x80", peer.offer + b"x"):
        with pytest.raises(IncompatiblePeer):
            await reader.add_peer(peer.worker_id, offer)
    await reader.add_peer(peer.worker_id, peer.offer)
    assert await read(reader, peer, [1], [1]) == [101]


async def test_a_peer_with_other_blocks_is_refused(reader, kind, peer, monkeypatch):
    other = Pool(0, block_bytes=BLOCK_BYTES * 2)
    backend = make_backend(kind, "other.1", other.memory, LoopbackFabric())
    await backend.start()
    try:
        with pytest.raises(IncompatiblePeer):
            await reader.add_peer("other.1", backend.offer())
    finally:
        await backend.close()


async def test_closing_twice_is_closing_once(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    await read(reader, peer, [1], [1])
    await reader.close()
    await reader.close()
    with pytest.raises(TransferFailed):
        await read(reader, peer, [1], [1])


async def test_a_closed_reader_leaves_its_source_readable_for_the_next(reader, peer, kind):
    await reader.add_peer(peer.worker_id, peer.offer)
    await reader.close()
    pool = Pool(0)
    second = make_backend(kind, "decode.2", pool.memory, FABRIC)
    await second.start()
    await second.add_peer(peer.worker_id, peer.offer)
    await second.read(peer.worker_id, [4], [4], timeout_s=TIMEOUT_S)
    await second.close()
    assert (pool.blocks[4] == peer.expected[4]).all()


async def test_reused_blocks_show_in_the_generations(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    before = await read(reader, peer, [40, 41], [0, 1])
    await asyncio.to_thread(peer.reuse, 41)
    after = await read(reader, peer, [40, 41], [0, 1])
    assert (before[0], before[1] + 1) == (after[0], after[1])
    peer.expected[41] = 0


async def test_a_killed_peer_fails_its_reads_harms_no_other_and_may_have_a_successor(
    reader, peer, mortal, kind
):
    await reader.add_peer(peer.worker_id, peer.offer)
    await reader.add_peer(mortal.worker_id, mortal.offer)
    await read(reader, mortal, [1], [1])
    await asyncio.to_thread(mortal.kill)
    async with asyncio.timeout(TIMEOUT_S):
        for _ in range(2):
            with pytest.raises(TransferFailed):
                await read(reader, mortal, [1], [2])
            await reader.settled([2])
    await read(reader, peer, [7], [3])
    assert (reader.pool.blocks[3] == peer.expected[7]).all()
    successor = await asyncio.to_thread(new_peer, kind, mortal.worker_id, seed=3)
    try:
        await reader.add_peer(successor.worker_id, successor.offer)
        await read(reader, successor, [1], [1])
        assert (reader.pool.blocks[1] == successor.expected[1]).all()
    finally:
        await asyncio.to_thread(successor.close)


async def freeze_while_known(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    await read(reader, peer, [1], [1])
    await asyncio.to_thread(peer.freeze)


async def begin(reader, peer, source, local):
    reading = asyncio.ensure_future(read(reader, peer, source, local))
    for _ in range(3):
        await asyncio.sleep(0)
    return reading


async def fail_on_frozen(reader, peer, kind):
    """A read out of time. Returns the wait for its end, which has not come if bytes may still land."""
    with pytest.raises(TransferFailed) as failed:
        await read(reader, peer, [2], [2], timeout_s=0.2)
    settled = asyncio.ensure_future(reader.settled([2]))
    assert failed.value.may_still_land == (kind in NIXL_OVER_TCP)
    if failed.value.may_still_land:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.shield(settled)
    await reader.settled([3])  # other blocks are not concerned
    return settled


async def test_a_frozen_peer_runs_out_of_time_and_settles_when_it_thaws(reader, frozen, kind):
    await freeze_while_known(reader, frozen)
    if kind in KERNEL_COPIES:
        assert await read(reader, frozen, [2], [2]) == [102]
        return
    settled = await fail_on_frozen(reader, frozen, kind)
    frozen.thaw()
    async with asyncio.timeout(TIMEOUT_S):
        await settled
    reader.pool.blocks[2] = 0
    await read(reader, frozen, [3], [3])
    assert (reader.pool.blocks[3] == frozen.expected[3]).all()
    assert not reader.pool.blocks[2].any()


async def test_a_frozen_peer_settles_when_it_dies(reader, mortal, kind):
    if kind in KERNEL_COPIES:
        pytest.skip("within one host the kernel copies, and asks no peer")
    await freeze_while_known(reader, mortal)
    settled = await fail_on_frozen(reader, mortal, kind)
    await asyncio.to_thread(mortal.kill)
    async with asyncio.timeout(TIMEOUT_S):
        await settled


async def test_a_cancelled_read_settles(reader, frozen):
    await freeze_while_known(reader, frozen)
    reading = await begin(reader, frozen, [2], [2])
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    frozen.thaw()
    async with asyncio.timeout(TIMEOUT_S):
        await reader.settled([2])


async def test_a_read_in_flight_fails_when_its_peer_is_removed(reader, frozen, kind):
    if kind in KERNEL_COPIES:
        pytest.skip("within one host a read completes in the call that starts it")
    await freeze_while_known(reader, frozen)
    reading = await begin(reader, frozen, [2], [2])
    await reader.remove_peer(frozen.worker_id)
    with pytest.raises(TransferFailed):
        await reading
    frozen.thaw()
    async with asyncio.timeout(TIMEOUT_S):
        await reader.settled([2])
    await reader.add_peer(frozen.worker_id, frozen.offer)
    await read(reader, frozen, [3], [3])
    assert (reader.pool.blocks[3] == frozen.expected[3]).all()


async def test_closing_while_a_peer_is_frozen_ends_and_nothing_lands_after(reader, frozen, kind):
    await freeze_while_known(reader, frozen)
    reading = await begin(reader, frozen, [2], [2])
    async with asyncio.timeout(TIMEOUT_S):
        await reader.close()
        await asyncio.wait([reading])
    reading.exception()
    reader.pool.blocks[2] = 0
    frozen.thaw()
    await asyncio.to_thread(frozen.reuse, 50)  # it runs again, and has had its turn
    frozen.expected[50] = 0
    assert not reader.pool.blocks[2].any()


async def test_nothing_lands_in_blocks_that_have_settled(kind, monkeypatch):
    set_transport(kind, monkeypatch)
    size = 64 * 1024
    every = list(range(BLOCK_COUNT))
    pool = Pool(0, block_bytes=size)
    source = await asyncio.to_thread(new_peer, kind, f"big-{kind}.1", block_bytes=size)
    reader = make_backend(kind, "decode.1", pool.memory, FABRIC)
    await reader.start()
    try:
        await reader.add_peer(source.worker_id, source.offer)
        await read(reader, source, every, every)
        for timeout_s in (1e-4, 1e-3, 3e-3, 6e-3):
            pool.blocks[:] = 0
            with contextlib.suppress(TransferFailed):
                await read(reader, source, every, every, timeout_s=timeout_s)
            async with asyncio.timeout(TIMEOUT_S):
                await reader.settled(every)
            pool.blocks[:] = 0
            await read(reader, source, [9], [0])
            assert (pool.blocks[0] == source.expected[9]).all()
            assert not pool.blocks[1:].any()
    finally:
        await reader.close()
        await asyncio.to_thread(source.close)


RANGES = (RangeCopy(1, 5, 7), RangeCopy(100, 4000, 96), RangeCopy(2048, 0, 1))


async def test_parts_of_blocks_land_where_they_are_wanted_and_nothing_else_changes(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    source, local = [5, 3, 4, 60], [9, 63, 0, 2]
    reader.pool.blocks[:] = 77
    expected = reader.pool.blocks.copy()
    for there, here in zip(source, local, strict=True):
        for piece in RANGES:
            got = peer.expected[there, piece.source : piece.source + piece.length]
            expected[here, piece.local : piece.local + piece.length] = got
    generations = await reader.read(peer.worker_id, source, local, timeout_s=TIMEOUT_S, ranges=RANGES)
    assert generations == [100 + block for block in source]
    assert (reader.pool.blocks == expected).all()


async def test_parts_outside_a_block_are_a_bug_of_ours(reader, peer):
    await reader.add_peer(peer.worker_id, peer.offer)
    for piece in (RangeCopy(0, 1, BLOCK_BYTES), RangeCopy(BLOCK_BYTES, 0, 1), RangeCopy(-1, 0, 1), (0, 0, 0)):
        with pytest.raises(ValueError):
            await reader.read(peer.worker_id, [0], [0], timeout_s=1.0, ranges=(RangeCopy(*piece),))


async def test_blocks_of_another_size_can_be_read_in_parts_and_not_whole(reader, kind, peer):
    other = Pool(7, block_bytes=BLOCK_BYTES * 2)
    backend = make_backend(kind, "other.1", other.memory, FABRIC)
    await backend.start()
    try:
        await reader.add_peer("other.1", backend.offer(), block_bytes=2 * BLOCK_BYTES)
        with pytest.raises(ValueError):
            await reader.read("other.1", [0], [0], timeout_s=TIMEOUT_S)
        upper = (RangeCopy(BLOCK_BYTES, 0, BLOCK_BYTES),)
        await reader.read("other.1", [3, 8], [8, 3], timeout_s=TIMEOUT_S, ranges=upper)
        assert (reader.pool.blocks[[8, 3]] == other.blocks[[3, 8], BLOCK_BYTES:]).all()
    finally:
        await backend.close()
