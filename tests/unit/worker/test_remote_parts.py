"""KV in pools on other hosts, with the real link between leader and parts, real pools and real TCP reads."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from baton.config import Config, TransferConfig
from baton.core.errors import SetupError
from baton.core.ids import ReadId, WorkerId
from engine.execution.spread import FollowerSetup, Reach
from engine.kv.parts import PoolPart
from engine.kv.pool import KVPool
from engine.parallel.group import GroupBroken
from kv_transfer.layout import part_geometry
from kv_transfer.part_transfer import PartTransfer
from kv_transfer.read import BlockRead
from tests.kv_parts import GROUPED, PartedWorker, places_of_shape, random_blocks, started
from worker.part_thread import PartSetup, PartThread
from worker.remote_parts import RemoteParts, remote_ranks

REACH = Reach("127.0.0.1", "127.0.0.1")
BLOCKS = 6
WAIT_S = 60.0
TCP = TransferConfig(backends=["tcp"])


def part_thread(setup: PartSetup, places) -> PartThread:
    """A part with a pool of its own, in this process."""
    geometry = part_geometry(GROUPED, places)
    pool = KVPool(geometry, kv_bytes=BLOCKS * geometry.block_bytes, device=torch.device("cpu"))
    executor = SimpleNamespace(kv=pool, parts=(PoolPart(places.layers, places.heads, pool),))
    return PartThread(setup, executor)  # pyright: ignore[reportArgumentType] - all that it looks at


def setup_of(remote: RemoteParts, rank: int) -> PartSetup:
    setup = remote.setup(FollowerSetup(rank, "", (), "", "", "", ""))
    assert setup.part is not None
    return msgspec.json.decode(msgspec.json.encode(setup.part), type=PartSetup)


class Far:
    """A worker of two stages, both of them elsewhere, as seen from its leader."""

    def __init__(self) -> None:
        self.remote = RemoteParts.create(WorkerId("w.1"), (1, 2), REACH, TCP)
        self.generations = [100] * BLOCKS
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_lost(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    async def join(self) -> None:
        await self.remote.join(self.generations, self.on_lost)
        self.transfer = PartTransfer(GROUPED, self.remote.parts(GROUPED, block_count=BLOCKS))
        await self.transfer.start()

    async def read(self, source, local, *, timeout_s: float = WAIT_S):
        blocks = (tuple(source), tuple(local), tuple(100 + block for block in source))
        read = BlockRead(ReadId(7), WorkerId("p.1"), *blocks, timeout_s, GROUPED.block_bytes)
        return await self.transfer.read_checked(read)


@contextlib.asynccontextmanager
async def far_worker():
    far = Far()
    try:
        async with contextlib.AsyncExitStack() as stack:
            threads = [
                part_thread(setup_of(far.remote, rank), places)
                for rank, places in enumerate(places_of_shape(GROUPED, "pp2"), start=1)
            ]
            for thread in threads:
                stack.enter_context(thread)
            await far.join()
            stack.push_async_callback(far.remote.close)
            stack.push_async_callback(far.transfer.close)
            yield far, threads
    finally:
        await far.remote.close()


def owner() -> PartedWorker:
    return PartedWorker("tcp", "p.1", GROUPED, places_of_shape(GROUPED, "tp2"), random_blocks(GROUPED))


async def test_blocks_are_read_into_parts_elsewhere_and_out_of_them() -> None:
    source, back = owner(), PartedWorker("tcp", "d.1", GROUPED, places_of_shape(GROUPED, "1"))
    async with far_worker() as (far, threads), started(source, back):
        await far.transfer.add_peer(source.name, source.transfer.offers())
        done = await far.read([1, 2], [3, 4])
        assert not done.error
        assert done.byte_count == 2 * GROUPED.block_bytes
        assert far.transfer.counters["tcp"].bytes_read == done.byte_count
        assert far.transfer.peer_counts == {"tcp": 1}
        assert [int(thread._kv.generations[3]) for thread in threads] == [100, 100]
        await back.transfer.add_peer(WorkerId("w.1"), far.transfer.offers())
        assert not (await back.read("w.1", [3, 4], [0, 5], granted=[100, 100])).error
        assert (back.pools[0][[0, 5]] == random_blocks(GROUPED)[[1, 2]]).all()
        threads[1]._kv.raise_generations([4], [101])
        assert (await back.read("w.1", [4], [1], granted=[100])).is_stale
        assert not far.lost.done()
    assert not far.lost.done(), "an orderly end is no loss"


async def test_a_part_that_ends_ends_the_reads_into_it_and_the_worker() -> None:
    source = owner()
    async with far_worker() as (far, threads), started(source):
        await far.transfer.add_peer(source.name, source.transfer.offers())
        threads[0].__exit__()
        async with asyncio.timeout(WAIT_S):
            assert "rank 1" in await far.lost
        done = await far.read([1], [3])
        assert "rank 1" in done.error
        assert not done.is_settled


async def test_a_message_that_nobody_understands_ends_the_worker() -> None:
    async with far_worker() as (far, _):
        assert far.remote._link is not None
        far.remote._link.send(1, b"nonsense")
        async with asyncio.timeout(WAIT_S):
            assert "cannot be handled" in await far.lost


async def test_a_mistake_in_an_order_ends_the_worker() -> None:
    source = owner()
    async with far_worker() as (far, _), started(source):
        await far.transfer.add_peer(source.name, source.transfer.offers())
        done = await far.read([1, 2], [3])
        assert "ValueError" in done.error
        async with asyncio.timeout(WAIT_S):
            assert "ValueError" in await far.lost


async def test_a_part_with_another_model_is_refused() -> None:
    far = Far()
    try:
        places = places_of_shape(GROUPED, "pp2")
        with part_thread(setup_of(far.remote, 1), places[0]), part_thread(setup_of(far.remote, 2), places[1]):
            await far.remote.join(far.generations, far.on_lost)
            with pytest.raises(SetupError, match="different models or settings"):
                far.remote.parts(GROUPED, block_count=BLOCKS + 1)
            await far.remote.close()
    finally:
        await far.remote.close()


async def test_a_part_that_no_backend_can_read_does_not_start() -> None:
    remote = RemoteParts.create(WorkerId("w.1"), (1,), REACH, TCP)
    setup = setup_of(remote, 1)
    nobody = msgspec.structs.replace(setup, backends=())
    with pytest.raises(SetupError, match="no KV transfer backend"):
        part_thread(nobody, places_of_shape(GROUPED, "1")[0]).__enter__()
    elsewhere = msgspec.structs.replace(setup, link_address="nowhere")
    with pytest.raises(SetupError, match="no address"):
        part_thread(elsewhere, places_of_shape(GROUPED, "1")[0]).__enter__()
    await remote.close()


async def test_a_part_that_never_comes_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.remote_parts.JOIN_S", 0.05)
    far = Far()
    with pytest.raises(GroupBroken, match="rank 1 did not join"):
        await far.remote.join(far.generations, far.on_lost)
    await far.remote.close()


async def test_a_rank_without_a_pool_has_no_part() -> None:
    remote = RemoteParts.create(WorkerId("w.1"), (2,), REACH, TCP)
    assert remote.setup(FollowerSetup(3, "", (), "", "", "", "")).part is None
    assert setup_of(remote, 2).name == "w.1/rank2"
    await remote.close()


def test_the_leader_reaches_pools_of_its_host_only_where_they_are_shared() -> None:
    config = Config.model_validate({"engine": {"shape": "tp2pp2"}})
    assert remote_ranks(config) == ()
    assert remote_ranks(config, [1]) == (2, 3)
    own = Config.model_validate({"engine": {"shape": "tp2pp2", "collectives": "torch"}})
    assert remote_ranks(own) == remote_ranks(own, [1]) == (1, 2, 3)
    assert remote_ranks(Config.model_validate({"engine": {"collectives": "torch"}})) == ()
    on_gpus = {"engine": {"shape": "tp2"}, "model": {"device": "cuda"}}
    assert remote_ranks(Config.model_validate(on_gpus)) == (1,)


def test_checksums_need_all_parts_in_one_place() -> None:
    with pytest.raises(SetupError, match=r"transfer\.checksums"):
        RemoteParts.create(WorkerId("w.1"), (1,), REACH, TransferConfig(checksums=True))


PROCESS = """
import sys, msgspec
from tests.unit.worker.test_remote_parts import part_thread
from tests.kv_parts import GROUPED, places_of_shape
from baton.config import TlsConfig
from baton.wire.transport import secure
from worker.part_thread import PartSetup
secure(TlsConfig())
setup = msgspec.json.decode(sys.argv[1].encode(), type=PartSetup)
with part_thread(setup, places_of_shape(GROUPED, "1")[0]):
    sys.stdin.read()
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_loss_of_a_parts_process_ends_reads_at_once(sign: signal.Signals) -> None:
    far, source = Far(), owner()
    far.remote = RemoteParts.create(WorkerId("w.1"), (1,), REACH, TCP)
    setup = msgspec.json.encode(setup_of(far.remote, 1)).decode()
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", PROCESS, setup], stdin=subprocess.PIPE
    )
    try:
        async with started(source):
            await far.join()
            await far.transfer.add_peer(source.name, source.transfer.offers())
            assert not (await far.read([1, 2], [3, 4])).error
            os.kill(process.pid, sign)
            done = await far.read([1], [3], timeout_s=10 * WAIT_S)
            assert "rank 1" in done.error
            assert not done.is_settled
            async with asyncio.timeout(WAIT_S):
                assert "rank 1" in await far.lost
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
        await far.remote.close()


def test_tables_of_parts_are_their_own() -> None:
    """A part on another host cannot see the leader's table."""
    places = places_of_shape(GROUPED, "1")[0]
    one, other = (part_thread(PartSetup("", 1, WorkerId(""), ()), places) for _ in range(2))
    assert not np.shares_memory(one._kv.generations, other._kv.generations)
