"""Reads by the GPU: what is mapped and for how long, what is copied, and what is left to other backends."""

import asyncio
import os
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import IncompatiblePeer, OtherMemory, SetupError, TransferFailed
from kv_transfer.backend import KVMemory
from kv_transfer.backends import cma_memory, cuda_driver
from kv_transfer.backends.cma_memory import CopyPlan
from kv_transfer.backends.cuda_driver import CudaDevice
from kv_transfer.backends.cuda_ipc import CudaIpcBackend, CudaIpcOffer
from kv_transfer.layout import RangeCopy
from kv_transfer.manager import TransferManager
from tests.contract.transfer_peer import BLOCK_BYTES, BLOCK_COUNT, PeerProcess
from tests.fake_device import ALLOCATION_OFFSET, FakeDevice, shareable_array

TIMEOUT_S = 20.0


class Side:
    def __init__(self, name="d.1", *, device="cuda:3", opened=None):
        self.blocks = shareable_array((BLOCK_COUNT, BLOCK_BYTES))
        table = np.arange(BLOCK_COUNT, dtype=np.uint64)
        self.memory = KVMemory(self.blocks.ctypes.data, BLOCK_BYTES, BLOCK_COUNT, table, device)
        self.device = opened
        self.backend = CudaIpcBackend(name, self.memory, open_device=self._open)

    def _open(self, index):
        self.device = self.device or FakeDevice(index)
        return self.device

    @property
    def offer(self):
        return msgspec.msgpack.decode(self.backend.offer(), type=CudaIpcOffer)

    def called(self, name):
        return [arguments for called, *arguments in self.device.log if called == name]

    async def read(self, source, local, ranges=()):
        return await self.backend.read("p.1", source, local, timeout_s=TIMEOUT_S, ranges=ranges)

    async def __aenter__(self):
        await self.backend.start()
        return self

    async def __aexit__(self, *_):
        await self.backend.close()


@pytest.fixture(scope="module")
def peer():
    made = PeerProcess("cuda_ipc", "p.1")
    yield made
    made.close()


def changed(offer, **fields):
    parsed = msgspec.msgpack.decode(offer, type=CudaIpcOffer)
    return msgspec.msgpack.encode(msgspec.structs.replace(parsed, **fields))


async def test_the_offer_names_the_allocation_and_where_the_pool_begins_in_it():
    async with Side() as side:
        assert side.device.index == 3
        offer = side.offer
        assert (offer.pool_offset, offer.base_address) == (ALLOCATION_OFFSET, side.memory.base_address)
        assert offer.allocation_bytes == side.memory.pool_bytes + ALLOCATION_OFFSET
        assert (offer.pid, len(offer.handle), offer.device_uuid) == (os.getpid(), 64, b"\x03" * 16)


async def test_neighbours_on_both_sides_are_one_copy_and_those_on_one_side_are_not(peer):
    async with Side() as side:
        await side.backend.add_peer("p.1", peer.offer)
        await side.read([4, 5, 6, 9, 10], [20, 21, 22, 23, 30])
        assert side.called("copy") == [[3 * BLOCK_BYTES], [BLOCK_BYTES], [BLOCK_BYTES]]
        assert (side.blocks[[20, 21, 22, 23, 30]] == peer.expected[[4, 5, 6, 9, 10]]).all()
        side.device.log.clear()
        await side.read([4, 5], [0, 1], (RangeCopy(0, 8, 16), RangeCopy(64, 64, 32)))
        assert side.called("copy") == [[16], [32], [16], [32]]
        assert len(side.called("wait")) == 1


async def test_a_pool_is_mapped_once_and_no_longer_than_its_peer_is_known(peer):
    async with Side() as side:
        for _ in range(2):
            await side.backend.add_peer("p.1", peer.offer)
            await side.read([1], [1])
        assert len(side.called("map")) == 1
        await side.backend.remove_peer("p.1")
        await side.backend.add_peer("p.1", peer.offer)
        await side.read([1], [1])
        assert (len(side.called("map")), len(side.called("unmap"))) == (2, 1)
        await side.backend.close()
        assert len(side.called("unmap")) == 2
        assert side.device.log[-2:] == [("drop_stream",), ("close",)]


async def test_a_removed_peer_stays_mapped_until_its_last_copy_has_ended(peer):
    async with Side() as side:
        await side.backend.add_peer("p.1", peer.offer)
        side.device.copies_begin.clear()
        reading = asyncio.ensure_future(side.read([7], [7]))
        assert await asyncio.to_thread(side.device.is_copying.wait, TIMEOUT_S)
        await side.backend.remove_peer("p.1")
        with pytest.raises(TransferFailed) as failed:
            await reading
        assert failed.value.may_still_land
        settled = asyncio.ensure_future(side.backend.settled([7]))
        await asyncio.sleep(0)
        assert not settled.done()
        assert side.called("unmap") == []
        side.device.copies_begin.set()
        async with asyncio.timeout(TIMEOUT_S):
            await settled
        await side.backend.add_peer("p.1", peer.offer)  # by the same thread, after what it still had to do
        assert [name for name, *_ in side.device.log][-3:] == ["wait", "unmap", "map"]
        assert (side.blocks[7] == peer.expected[7]).all()


async def test_a_source_that_dies_while_it_is_copied_fails_the_read_though_the_bytes_are_there():
    mortal = await asyncio.to_thread(PeerProcess, "cuda_ipc", "p.1", seed=5)
    async with Side() as side:
        await side.backend.add_peer("p.1", mortal.offer)
        side.device.copies_begin.clear()
        reading = asyncio.ensure_future(side.read([7], [7]))
        assert await asyncio.to_thread(side.device.is_copying.wait, TIMEOUT_S)
        await asyncio.to_thread(mortal.kill)
        side.device.copies_begin.set()
        with pytest.raises(TransferFailed) as failed:
            await reading
        assert not failed.value.may_still_land
        assert (side.blocks[7] == mortal.expected[7]).all()
    mortal.close()


async def test_a_copy_that_is_refused_fails_its_read_once_those_before_it_have_landed(peer):
    async with Side() as side:
        await side.backend.add_peer("p.1", peer.offer)
        side.device.failing["copy"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
        with pytest.raises(TransferFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS") as failed:
            await side.read([1, 5], [1, 9])
        assert not failed.value.may_still_land
        assert len(side.called("wait")) == 1
        side.device.failing.clear()
        assert await side.read([1], [1]) == [101]


async def test_a_pool_that_cannot_be_mapped_is_left_to_other_backends(peer):
    async with Side() as side:
        side.device.failing["map"] = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
        with pytest.raises(IncompatiblePeer, match=r"GPU-0{8}-.*PEER_ACCESS_UNSUPPORTED"):
            await side.backend.add_peer("p.1", peer.offer)
        with pytest.raises(TransferFailed):
            await side.read([1], [1])
        side.device.failing.clear()
        await side.backend.add_peer("p.1", peer.offer)
        assert await side.read([1], [1]) == [101]


async def test_offers_out_of_range_or_from_elsewhere_map_nothing(peer):
    parsed = msgspec.msgpack.decode(peer.offer, type=CudaIpcOffer)
    async with Side() as side:
        for fields in (
            {"host": "other/1"},
            {"handle": b"x" * 63},
            {"device_uuid": b""},
            {"pool_offset": -1},
            {"pool_offset": parsed.pool_offset + 1},
            {"allocation_bytes": parsed.allocation_bytes - 1},
            {"base_address": 0},
        ):
            with pytest.raises(IncompatiblePeer):
                await side.backend.add_peer("p.1", changed(peer.offer, **fields))
        assert side.called("map") == []


async def test_a_pool_of_this_process_is_read_without_a_mapping():
    async with Side("p.1") as source, Side() as reader:
        source.blocks[:] = 9
        await reader.backend.add_peer("p.1", source.backend.offer())
        assert await reader.read([3], [2]) == [3]
        assert (reader.blocks[2] == 9).all()
        assert reader.called("map") == []


async def test_host_memory_is_left_to_other_backends_without_a_warning(caplog):
    side = Side(device="cpu")
    manager = TransferManager([side.backend], memory=side.memory)
    with pytest.raises(SetupError, match="memory of GPUs"):
        await manager.start()
    assert (manager.left_out, caplog.text) == ({}, "")
    with pytest.raises(OtherMemory):
        await side.backend.start()


@pytest.mark.parametrize("name", ["allocation", "export", "make_stream"])
async def test_memory_that_cuda_does_not_share_is_a_reason_to_leave_the_backend_out(name):
    device = FakeDevice(0)
    device.failing[name] = "CUDA_ERROR_INVALID_VALUE"
    side = Side(opened=device)
    manager = TransferManager([side.backend], memory=side.memory)
    with pytest.raises(SetupError, match=r"does not share the KV pool .*CUDA_ERROR_INVALID_VALUE"):
        await manager.start()
    assert list(manager.left_out) == ["cuda_ipc"]
    assert device.log[-1] == ("close",)


async def test_a_machine_without_the_driver_is_a_reason_to_leave_the_backend_out(monkeypatch):
    monkeypatch.setattr("kv_transfer.backends.cuda_driver.LIBRARY", "libcuda-of-no-machine.so.1")
    cuda_driver._driver.cache_clear()
    side = Side()
    backend = CudaIpcBackend("d.1", side.memory, open_device=CudaDevice)
    with pytest.raises(SetupError, match="libcuda-of-no-machine"):
        await backend.start()


RANGES = st.sampled_from([(), (RangeCopy(0, 8, 8),), (RangeCopy(0, 0, 4), RangeCopy(4, 8, 4))])
PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=30)


@given(PAIRS, RANGES, st.integers(1, 100), st.integers(1, 5))
def test_the_copies_of_a_plan_are_its_bytes_once_and_no_two_could_be_one(pairs, ranges, step_bytes, iov_max):
    there, here, size = 10_000, 90_000, 16
    source, local = [s for s, _ in pairs], [t for _, t in pairs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cma_memory, "IOV_MAX", iov_max)
        plan = CopyPlan(
            source,
            local,
            ranges,
            source=(there, size),
            local=(here, size),
            step_bytes=step_bytes,
            last_step_bytes=step_bytes,
        )
    copied = []
    for index in range(plan.step_count):
        rows = plan.copies(index).tolist()
        for (to, came, length), (next_to, next_came, _) in pairwise(rows):
            assert (to + length, came + length) != (next_to, next_came)
        copied += [(came + i, to + i) for to, came, length in rows for i in range(length)]
    wanted = [
        (there + s * size + r.source + i, here + t * size + r.local + i)
        for s, t in pairs
        for r in ranges or (RangeCopy(0, 0, size),)
        for i in range(r.length)
    ]
    assert sorted(copied) == sorted(wanted)
