"""Where responses are kept: in this process, or in the Redis that all routers share."""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from baton.config import Config
from baton.core.errors import PeerFailure
from kv_store.directory.interface import DirectoryLost
from router.responses.store import Absence, ResponseStore, StoreBounds, StoredResponse

if TYPE_CHECKING:
    from kv_store.directory.redis_client import RedisClient


class ResponseKeeper(Protocol):
    is_shared: bool
    """True if all routers have the same responses."""

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        """Keep a response. Returns False if it is too large. Raises PeerFailure."""
        ...

    async def get(self, tenant: str, response_id: str) -> StoredResponse | Absence:
        """Return a response, or why it is not there. Raises PeerFailure."""
        ...

    async def delete(self, tenant: str, response_id: str) -> StoredResponse | Absence:
        """Forget a response. Returns what it was. Raises PeerFailure."""
        ...

    async def close(self) -> None: ...


class LocalResponses:
    """Responses in this process. Other routers do not have them, and they end with it."""

    is_shared = False

    def __init__(self, bounds: StoreBounds) -> None:
        self._store = ResponseStore(bounds)

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        return self._store.put(tenant, response_id, stored, _now_s())

    async def get(self, tenant: str, response_id: str) -> StoredResponse | Absence:
        return self._store.get(tenant, response_id, _now_s())

    async def delete(self, tenant: str, response_id: str) -> StoredResponse | Absence:
        return self._store.delete(tenant, response_id, _now_s())

    async def close(self) -> None:
        pass


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# KEYS: hash of responses, sorted set of ids by time of use, hash of sizes, all of one tenant and one slot.
# ARGV: id, value, its size, seconds to keep, most responses, most bytes. The oldest make room.
PUT = """
local now = tonumber(redis.call('TIME')[1])
local function drop(id)
  local size = redis.call('HGET', KEYS[3], id)
  redis.call('HDEL', KEYS[1], id) redis.call('ZREM', KEYS[2], id)
  if size then
    redis.call('HDEL', KEYS[3], id) redis.call('HINCRBY', KEYS[3], '', -tonumber(size))
  end
end
drop(ARGV[1])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[4]))) do drop(id) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
redis.call('HINCRBY', KEYS[3], '', tonumber(ARGV[3]))
while redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[5])
    or tonumber(redis.call('HGET', KEYS[3], '')) > tonumber(ARGV[6]) do
  drop(redis.call('ZRANGE', KEYS[2], 0, 0)[1])
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, tonumber(ARGV[4])) end
return 1
"""

# KEYS: as above. ARGV: id, seconds to keep, '1' to delete it. Returns the value, or nil.
GET = """
local now = tonumber(redis.call('TIME')[1])
local at = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not at or tonumber(at) <= now - tonumber(ARGV[2]) then return nil end
local value = redis.call('HGET', KEYS[1], ARGV[1])
if ARGV[3] == '1' then
  local size = redis.call('HGET', KEYS[3], ARGV[1])
  redis.call('HDEL', KEYS[1], ARGV[1]) redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('HDEL', KEYS[3], ARGV[1])
  redis.call('HINCRBY', KEYS[3], '', -tonumber(size))
end
return value
"""


class RedisResponses:
    """Responses in Redis, which all routers share. Bounds in bytes are those of each tenant there."""

    is_shared = True

    def __init__(self, client: "RedisClient", *, name: str, bounds: StoreBounds) -> None:
        self._client, self._name, self._bounds = client, name, bounds

    def _keys(self, tenant: str) -> tuple[str, str, str]:
        root = f"baton:{{responses:{self._name}:{tenant}}}"
        return root, f"{root}:used", f"{root}:sizes"

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        bounds = self._bounds
        if stored.size > bounds.one_bytes_max:
            return False
        value = msgspec.msgpack.encode(stored)
        limits = (max(1, int(bounds.keep_s)), bounds.count_max, bounds.bytes_max)
        await self._run(("EVAL", PUT, 3, *self._keys(tenant), response_id, value, stored.size, *limits))
        return True

    async def get(self, tenant: str, response_id: str) -> StoredResponse | Absence:
        return await self._found(tenant, response_id, "0")

    async def delete(self, tenant: str, response_id: str) -> StoredResponse | Absence:
        return await self._found(tenant, response_id, "1")

    async def _found(self, tenant: str, response_id: str, is_deleted: str) -> StoredResponse | Absence:
        keep_s = max(1, int(self._bounds.keep_s))
        value = await self._run(("EVAL", GET, 3, *self._keys(tenant), response_id, keep_s, is_deleted))
        return Absence.UNKNOWN if value is None else msgspec.msgpack.decode(value, type=StoredResponse)

    async def _run(self, command: tuple[Any, ...]) -> Any:
        try:
            async with self._client.deadline():
                (answer,) = await self._client.run(command)
        except DirectoryLost as error:
            raise PeerFailure(f"the store of responses does not answer: {error}") from None
        return answer

    async def close(self) -> None:
        await self._client.close()


def keeper_of(config: Config) -> ResponseKeeper:
    """Return where the configuration keeps responses. Raises SetupError for a bad URL."""
    router, store = config.router, config.store
    bounds = StoreBounds(router.responses_max, router.responses_bytes_max, router.responses_keep_s)
    if url := router.state_url or store.directory:
        from kv_store.directory.redis_client import RedisClient  # Only clusters with a Redis load its client.

        client = RedisClient(url, timeout_s=store.directory_timeout_s)
        return RedisResponses(client, name=store.directory_name, bounds=bounds)
    return LocalResponses(bounds)
