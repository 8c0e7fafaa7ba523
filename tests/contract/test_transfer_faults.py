"""Whatever goes wrong on the way, by seed: what a checked read calls good is what the source granted."""

import asyncio

import pytest

from kv_transfer.checksums import checksum_blocks
from kv_transfer.manager import TransferManager
from tests.contract.transfer_peer import BLOCK_COUNT, PeerProcess, Pool, block_read, make_backend
from tests.faulty_backend import FAULTS, SILENT, Fault, FaultPlan, FaultyBackend
from tests.loopback_backend import LoopbackFabric

READS = 60
SOURCE, LOCAL = [5, 3, 4, 60, 0, 1], [9, 20, 21, 22, 63, 0]


@pytest.mark.parametrize("kind", ["cma", "tcp"])
async def test_a_read_called_good_is_right_and_a_wrong_one_is_read_again(kind):
    peer = await asyncio.to_thread(PeerProcess, kind, "p.1")
    same = Pool(1)  # as the peer's; it owns what `memory` points to
    sums = checksum_blocks(same.memory, SOURCE)
    granted = [100 + block for block in SOURCE]
    pool = Pool(0)
    plan = FaultPlan(seed=4, probability=0.6, faults=(*FAULTS, *SILENT), delay_s=0.001)
    backend = FaultyBackend(
        make_backend(kind, "d.1", pool.memory, LoopbackFabric()), plan, memory=pool.memory
    )
    manager = TransferManager([backend], memory=pool.memory)
    await manager.start()
    try:
        await manager.add_peer("p.1", {kind: peer.offer})
        good = 0
        for _ in range(READS):
            pool.blocks[:] = 0
            outcome = await manager.read_checked(
                block_read("p.1", SOURCE, LOCAL, granted, timeout_s=0.05, checksums=sums)
            )
            if not (outcome.error or outcome.corrupt):
                good += 1
                assert (pool.blocks[LOCAL] == peer.expected[SOURCE]).all()
            await manager.settled(LOCAL)
            others = sorted(set(range(BLOCK_COUNT)) - set(LOCAL))
            assert not pool.blocks[others].any()
        assert all(backend.happened[fault] for fault in (Fault.NONE, *FAULTS, *SILENT))
        silent = sum(backend.happened[fault] for fault in SILENT)
        assert 0 < manager.counters[kind].reads_corrupt <= silent  # fewer: some were slow as well
        assert 0 < manager.counters[kind].reads_stale <= backend.happened[Fault.STALE]
        assert 0 < good <= backend.happened[Fault.NONE] + backend.happened[Fault.DELAY]
    finally:
        await manager.close()
        await asyncio.to_thread(peer.close)
