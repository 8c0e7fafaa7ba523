"""Connections to a Redis of any kind: bounded, under a deadline, and made anew by themselves."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis import exceptions as rx
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialBackoff

from baton.core.errors import SetupError
from kv_store.directory.interface import DirectoryLost
from kv_store.directory.redis_probe import speaks_plain, speaks_tls
from kv_store.directory.redis_url import RedisKind, RedisUrl, masked, parse_redis_url

CONNECTIONS_MAX = 8
"""Connections of one process per server. Further calls wait, within their deadline."""

RETRIES, BACKOFF_FIRST_S, BACKOFF_MAX_S = 3, 0.01, 0.2

Command = tuple[Any, ...]


class RedisClient:
    """Runs commands, all of a call in one round trip. Errors contain nothing secret."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Raises SetupError for a URL that cannot be one."""
        self._url, self._timeout_s = masked(url), timeout_s
        self._parsed = parse_redis_url(url)
        self.is_cluster = self._parsed.kind is RedisKind.CLUSTER
        self._redis, self._sentinels = _open(self._parsed, timeout_s)
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)

    @asynccontextmanager
    async def deadline(self) -> AsyncGenerator[None]:
        """Put a deadline on everything that runs within. Raises DirectoryLost when it is over."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise DirectoryLost(f"{self._url}: no answer within {self._timeout_s:g} s") from None

    async def run(self, *commands: Command) -> list[Any]:
        """Run commands and return their answers in order. The keys of one command are in one slot. Raises
        DirectoryLost."""
        try:
            return await self._run(commands)
        except (rx.RedisError, rx.RedisClusterException, OSError) as error:
            raise DirectoryLost(f"{self._url}: {_text(error)}") from None

    async def check(self) -> None:
        """Raise SetupError for what the operator must change, DirectoryLost if the server just does not
        answer."""
        try:
            async with self.deadline():
                await self._run([("EVAL", "return redis.call('EXISTS', KEYS[1])", 1, "baton:check")])
        except DirectoryLost:
            await self._check_tls("no answer")
            raise
        except (rx.RedisError, rx.RedisClusterException, OSError) as error:
            if advice := _advice(error):
                raise SetupError(f"{self._url}: {advice} ({_text(error)})") from None
            await self._check_tls(_text(error))
            raise DirectoryLost(f"{self._url}: {_text(error)}") from None

    async def _check_tls(self, text: str) -> None:
        """Raise SetupError if the server wants TLS and the URL does not, or the other way round."""
        for host, port in self._parsed.hosts:
            if self._parsed.tls is None and await speaks_tls(host, port):
                advice = f"{host}:{port} speaks TLS: write rediss:// instead of redis://"
            elif self._parsed.tls is not None and await speaks_plain(host, port):
                advice = f"{host}:{port} does not speak TLS: write redis:// instead of rediss://"
            else:
                continue
            raise SetupError(f"{self._url}: {advice} ({text})")

    async def close(self) -> None:
        for client in (self._redis, *self._sentinels):
            await client.aclose()

    async def _run(self, commands: Sequence[Command]) -> list[Any]:
        async with self._slots:
            if len(commands) == 1:
                return [await self._redis.execute_command(*commands[0])]
            pipeline: Any = self._redis.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute()


def _open(url: RedisUrl, timeout_s: float) -> tuple[Redis | RedisCluster, Sequence[Redis]]:
    """Make what runs commands, and what it asks for the master. It opens no connection yet."""
    common: dict[str, Any] = {
        "username": url.username or None,
        "password": url.password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,  # all that is needed, and what every server and proxy speaks
        "driver_info": None,
        **_tls(url),
    }
    backoff = ExponentialBackoff(cap=BACKOFF_MAX_S, base=BACKOFF_FIRST_S)
    pool: dict[str, Any] = {"retry": Retry(backoff, RETRIES), "max_connections": 2 * CONNECTIONS_MAX}
    match url.kind:
        case RedisKind.CLUSTER:
            nodes = [ClusterNode(host, port) for host, port in url.hosts]
            return RedisCluster(startup_nodes=nodes, **pool, **common), ()
        case RedisKind.SENTINEL:
            # A host that is gone must leave time to ask the others.
            short_s = timeout_s / (len(url.hosts) + 1)
            own = {
                "username": url.sentinel_username or None,
                "password": url.sentinel_password or None,
                "socket_timeout": short_s,
                "socket_connect_timeout": short_s,
                "retry": Retry(backoff, 0),
            }
            sentinel = Sentinel(url.hosts, sentinel_kwargs={**common, **own})
            return sentinel.master_for(url.service, db=url.db, **pool, **common), sentinel.sentinels
        case RedisKind.SERVER if url.socket_path:
            return Redis(unix_socket_path=url.socket_path, db=url.db, **pool, **common), ()
        case RedisKind.SERVER:
            ((host, port),) = url.hosts
            return Redis(host=host, port=port, db=url.db, **pool, **common), ()


def _tls(url: RedisUrl) -> dict[str, Any]:
    if url.tls is None:
        return {}
    return {
        "ssl": True,
        "ssl_ca_certs": url.tls.ca or None,
        "ssl_certfile": url.tls.cert or None,
        "ssl_keyfile": url.tls.key or url.tls.cert or None,
        "ssl_cert_reqs": "none" if url.tls.verify == "none" else "required",
        "ssl_check_hostname": url.tls.verify == "full",
    }


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _advice(error: BaseException) -> str:
    """What the operator can do about the error; empty if it may pass by itself."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    text = " ".join(map(str, causes))
    if any(isinstance(x, ssl.SSLError) for x in causes):
        return "no TLS connection: do ca, cert and key fit, and the server's name?"
    if any(isinstance(x, rx.AuthenticationError | rx.AuthorizationError) for x in causes) or "NOAUTH" in text:
        return "the server refuses the user or password"
    if any(isinstance(x, rx.NoPermissionError) for x in causes):
        return "the user may not do this: it needs ~baton:* and +@all, or +eval and the commands within"
    if any(isinstance(x, rx.MovedError) for x in causes):
        return "this is a Redis Cluster: write redis+cluster:// instead of redis://"
    if "Cluster mode is not enabled" in text or "cluster support disabled" in text:
        return "this is no Redis Cluster: write redis:// instead of redis+cluster://"
    if "DB index is out of range" in text or "invalid DB index" in text:
        return "the server has no database of that number"
    return ""
