"""The control plane's directory when the control plane is away, hangs, or hears nonsense."""

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from baton.config import StoreConfig
from baton.core.errors import SetupError
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.server import start_server
from baton.wire.store_directory import LOOK_UP_HASHES_MAX
from baton.wire.transport import channel_to
from kv_store.directory.connect import connect
from kv_store.directory.interface import DirectoryLost
from kv_store.directory.memory import MemoryDirectory
from tests.contract.test_store_directory import LEASE_S, h, holders, join, location, member

QUICK_S = 0.3


@asynccontextmanager
async def serving(handler, port=0):
    server, bound = await start_server("127.0.0.1", port, store_directory=handler)
    try:
        yield bound
    finally:
        await server.stop(None)
        await handler.close()


@asynccontextmanager
async def connected(port, timeout_s=5.0):
    config = StoreConfig(directory_timeout_s=timeout_s)
    directory = await connect(config, control_address=f"127.0.0.1:{port}")
    try:
        yield directory
    finally:
        await directory.close()


async def test_a_restarted_control_plane_knows_nothing_and_is_told_again():
    async with serving(MemoryDirectory(entries_max=9)) as port, connected(port) as directory:
        await join(directory, "a", 1)
        async with asyncio.timeout(20):
            assert await holders(directory, 1) == (location("a"),)
    async with connected(port) as directory:
        with pytest.raises(DirectoryLost):
            await directory.members()
        async with serving(MemoryDirectory(entries_max=9), port):
            async with asyncio.timeout(20):
                while True:
                    try:
                        assert await directory.members() == ()
                        break
                    except DirectoryLost:
                        continue
            await join(directory, "a", 1, number=2)
            assert await holders(directory, 1) == (location("a"),)


class Hanging(MemoryDirectory):
    async def look_up(self, hashes):
        return await asyncio.Event().wait()


async def test_one_that_hangs_is_lost_at_the_deadline():
    async with serving(Hanging(entries_max=9)) as port, connected(port, QUICK_S) as directory:
        async with asyncio.timeout(20):
            with pytest.raises(DirectoryLost, match="DEADLINE_EXCEEDED"):
                await holders(directory, 1)
        assert await directory.members() == ()


async def test_a_control_plane_without_a_directory_says_so():
    server, port = await start_server("127.0.0.1", 0)
    async with connected(port) as directory:
        with pytest.raises(DirectoryLost, match="UNIMPLEMENTED"):
            await directory.renew(member("a"), lease_s=LEASE_S)
    await server.stop(None)


async def test_nonsense_is_refused_and_the_next_call_served():
    async with (
        serving(MemoryDirectory(entries_max=9)) as port,
        channel_to(f"127.0.0.1:{port}", Party.CONTROL) as channel,
    ):
        stub = pb_grpc.StoreDirectoryStub(channel)
        renewals = [pb.RenewStoreRequest(lease_s=x) for x in (0, -1, float("nan"), float("inf"))]
        for call, requests in (
            (stub.Renew, renewals),
            (stub.Publish, [pb.StoreChanges(stored=b"short"), pb.StoreChanges(stored=h(1))]),
            (stub.LookUp, [pb.LookUpRequest(hashes=h(1) * (LOOK_UP_HASHES_MAX + 1))]),
        ):
            for request in requests:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(request)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await stub.LookUp(pb.LookUpRequest(hashes=h(1)))).count == 1


async def test_neither_a_control_plane_nor_a_redis_is_a_wrong_setup():
    with pytest.raises(SetupError, match="--store"):
        await connect(StoreConfig(), control_address="")
