"""Every directory behind one face: a world gives clients of it, lets its time pass, and makes it forget."""

import itertools
from contextlib import asynccontextmanager

from redis.asyncio import Redis, RedisCluster

from baton.wire.server import start_server
from kv_store.directory.memory import MemoryDirectory
from kv_store.directory.redis_client import RedisClient
from kv_store.directory.redis_directory import RedisDirectory
from kv_store.directory.remote import RemoteDirectory

ENTRIES_MAX = 100_000
TIMEOUT_S = 5.0


class MemoryWorld:
    def __init__(self):
        self._now_s = 1000.0
        self.directory = self._new()

    def _new(self):
        return MemoryDirectory(entries_max=ENTRIES_MAX, clock=lambda: self._now_s)

    async def client(self):
        return self.directory

    async def advance(self, seconds):
        self._now_s += seconds
        self.directory.tick()

    async def close(self):
        self.directory.book.check()
        await self.directory.close()


class RemoteWorld(MemoryWorld):
    def __init__(self):
        super().__init__()
        self._server, self._clients = None, []

    async def start(self):
        self._server, self._port = await start_server("127.0.0.1", 0, store_directory=self)

    # What the server asks, so that a forgetful world can exchange the directory beneath it.
    def __getattr__(self, name):
        return getattr(self.directory, name)

    async def client(self):
        client = RemoteDirectory(f"127.0.0.1:{self._port}", timeout_s=TIMEOUT_S)
        self._clients.append(client)
        return client

    async def forget(self):
        await self.directory.close()
        self.directory = self._new()

    async def close(self):
        for client in self._clients:
            await client.close()
        await self._server.stop(None)
        await super().close()


class RedisWorld:
    """A part of a server that several tests share."""

    _numbers = itertools.count()

    def __init__(self, url):
        self.url, self.name = url, f"test-{next(self._numbers)}"
        cluster = url.startswith("redis+cluster://")
        if cluster:
            self.raw = RedisCluster.from_url(f"redis://{url.rpartition(',')[2]}")
        else:
            self.raw = Redis.from_url(url)
        self._clients = []

    async def client(self, timeout_s=TIMEOUT_S):
        client = RedisDirectory(RedisClient(self.url, timeout_s=timeout_s), name=self.name)
        self._clients.append(client)
        return client

    async def advance(self, seconds):
        """Every key comes that much closer to its end."""
        async for key in self.raw.scan_iter(f"baton:{self.name}:*"):
            left_ms = await self.raw.pttl(key)
            if left_ms >= 0:
                await self.raw.pexpire(key, left_ms - round(seconds * 1000))

    async def forget(self):
        await self.raw.flushall()

    async def close(self):
        for client in self._clients:
            await client.close()
        await self.raw.aclose()


@asynccontextmanager
async def redis_world(url):
    world = RedisWorld(url)
    try:
        yield world
    finally:
        await world.close()


@asynccontextmanager
async def memory_world():
    world = MemoryWorld()
    try:
        yield world
    finally:
        await world.close()


@asynccontextmanager
async def remote_world():
    world = RemoteWorld()
    await world.start()
    try:
        yield world
    finally:
        await world.close()
