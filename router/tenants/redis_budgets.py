"""Budgets in Redis: one script, one round trip, by the server's clock. See `baton.core.budgets.Ledger`."""

import asyncio
import math
from typing import Any

from baton.core.budgets import ROUTER_SEEN_S, SETTLE_S, Ask, Grant, Scarce, Settle
from kv_store.directory.redis_client import RedisClient

COUNT_EVERY_S = 5.0

# KEYS: hash of instants (seconds), sorted set of leases by their end; one slot. ARGV: tokens, requests per
# minute, tokens per minute, concurrent, lease, its seconds, seconds that it may be settled later. Returns
# what is scarce ('': granted), seconds to wait ('inf'), seconds until requests and until tokens are whole.
TAKE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local tokens, rpm, tpm, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local known = redis.call('HMGET', KEYS[1], 'r', 't')
local r, t = math.max(tonumber(known[1] or '0'), now), math.max(tonumber(known[2] or '0'), now)
local after_r, after_t = r, t
if rpm > 0 then after_r = r + 60 / rpm end
if tpm > 0 then after_t = t + tokens * 60 / tpm end
local scarce, wait = '', 0
if most > 0 then
  local running = redis.call('ZCOUNT', KEYS[2], '(' .. string.format('%.6f', now), '+inf')
  if running >= most then scarce, wait = 'concurrent', 1 end
end
if tpm > 0 and tokens > tpm then scarce, wait = 'tokens', math.huge
elseif after_t - now - 60 > 1e-6 then scarce, wait = 'tokens', after_t - now - 60 end
if after_r - now - 60 > math.max(1e-6, wait) then scarce, wait = 'requests', after_r - now - 60 end
if scarce == '' then
  r, t = after_r, after_t
  redis.call('HSET', KEYS[1], 'r', string.format('%.6f', r), 't', string.format('%.6f', t))
  redis.call('PEXPIRE', KEYS[1], math.ceil((math.max(r, t) - now) * 1000) + 1000)
  if most > 0 or tpm > 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.6f', now - tonumber(ARGV[7])))
    redis.call('ZADD', KEYS[2], string.format('%.6f', now + tonumber(ARGV[6])), ARGV[5])
    local last = tonumber(redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2])
    redis.call('PEXPIRE', KEYS[2], math.ceil((last - now + tonumber(ARGV[7])) * 1000) + 1000)
  end
end
return {scarce, wait == math.huge and 'inf' or string.format('%.6f', wait),
        string.format('%.6f', r - now), string.format('%.6f', t - now)}
"""

# KEYS: as above. ARGV: seconds of tokens to give back, lease, seconds that it may be settled later. A lease
# that is not there was settled before, or took nothing.
SETTLE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local lease_end = redis.call('ZSCORE', KEYS[2], ARGV[2])
if not lease_end then return 0 end
redis.call('ZREM', KEYS[2], ARGV[2])
if tonumber(lease_end) + tonumber(ARGV[3]) <= now then return 0 end
local known = redis.call('HMGET', KEYS[1], 'r', 't')
if not known[2] then return 0 end
local t = math.max(tonumber(known[2]), now) - tonumber(ARGV[1])
local whole = math.max(t, tonumber(known[1]), now)
redis.call('HSET', KEYS[1], 't', string.format('%.6f', t))
redis.call('PEXPIRE', KEYS[1], math.ceil((whole - now) * 1000) + 1000)
return 1
"""

# KEYS: sorted set of routers by when they were seen. ARGV: this one, seconds that it counts. Returns a count.
COUNT = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('EXPIRE', KEYS[1], 2 * tonumber(ARGV[2]))
return redis.call('ZCARD', KEYS[1])
"""


class RedisBudgets:
    def __init__(self, client: RedisClient, *, name: str, router_id: str) -> None:
        self._client, self._name, self._router_id = client, name, router_id
        self._router_count, self._count_due_s = 1, float("-inf")

    def _keys(self, tenant: str) -> tuple[str, str]:
        root = f"baton:{{budget:{self._name}:{tenant}}}"
        return root, f"{root}:leases"

    async def take(self, ask: Ask) -> Grant:
        """Take from the budgets. Raises DirectoryLost."""
        keys = self._keys(ask.tenant)
        limits = (ask.requests_per_minute, ask.tokens_per_minute, ask.concurrent_max)
        async with self._client.deadline():
            await self._count_routers()
            command = ("EVAL", TAKE, 2, *keys, ask.tokens, *limits, ask.lease, ask.lease_s, SETTLE_S)
            (answer,) = await self._client.run(command)
        scarce, wait, requests_s, tokens_s = (_text(part) for part in answer)
        return Grant(
            Scarce(scarce) if scarce else None,
            math.inf if wait == "inf" else float(wait),
            float(requests_s),
            float(tokens_s),
            self._router_count,
        )

    async def settle(self, settle: Settle) -> None:
        """Give back the refund. Raises DirectoryLost."""
        per_minute = settle.tokens_per_minute
        refund_s = settle.refund_tokens * 60 / per_minute if per_minute else 0.0
        async with self._client.deadline():
            keys = self._keys(settle.tenant)
            await self._client.run(("EVAL", SETTLE, 2, *keys, refund_s, settle.lease, SETTLE_S))

    async def _count_routers(self) -> None:
        """Count the routers that share the budgets, now and then. It is a command of its own, since its key
        is in another slot."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._count_due_s:
            return
        self._count_due_s = now_s + COUNT_EVERY_S
        key = f"baton:{{routers:{self._name}}}"
        (count,) = await self._client.run(("EVAL", COUNT, 1, key, self._router_id, int(ROUTER_SEEN_S)))
        self._router_count = max(1, int(count))

    async def close(self) -> None:
        await self._client.close()


def _text(part: Any) -> str:
    return part.decode() if isinstance(part, bytes) else str(part)
