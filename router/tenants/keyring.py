"""A live view of keys: a file that is read again when it changes, or a Redis. The last good version
serves."""

import asyncio
import json
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from baton.core.errors import SetupError
from kv_store.directory.interface import DirectoryLost
from router.tenants.key_files import read_file
from router.tenants.keys import KeyBook, KeyRecord, Keyring, Tenant, read_book

if TYPE_CHECKING:
    from kv_store.directory.redis_client import RedisClient

log = logging.getLogger(__name__)

FILE_LOOK_S = 1.0
REDIS_LOOK_S = 2.0
"""Interval of looks at Redis. A revoked key works for at most this long."""


class KeySource(Protocol):
    look_s: float

    async def read(self, *, first: bool) -> KeyBook | None:
        """Return the keys; None: they did not change. Raises SetupError for an error in them, DirectoryLost
        if there is no answer."""
        ...

    async def close(self) -> None: ...


class FileSource:
    look_s = FILE_LOOK_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    async def read(self, *, first: bool) -> KeyBook | None:
        return await asyncio.to_thread(self._read)

    def _read(self) -> KeyBook | None:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise SetupError(f"keys: cannot read {self._path}: {error}") from None
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return None
        book = read_file(self._path)
        self._seen = seen
        return book

    async def close(self) -> None:
        pass


def redis_key(name: str) -> str:
    return f"baton:{{keys:{name}}}"


class RedisSource:
    """A source with one hash: `version`, `tenant:NAME` and `key:SHA256`, whose values are JSON."""

    look_s = REDIS_LOOK_S

    def __init__(self, client: "RedisClient", name: str) -> None:
        self._client, self._key = client, redis_key(name)
        self._version: bytes | None = None

    async def read(self, *, first: bool) -> KeyBook | None:
        async with self._client.deadline():
            (version,) = await self._client.run(("HGET", self._key, "version"))
            if version == self._version and not first:
                return None
            (pairs,) = await self._client.run(("HGETALL", self._key))
        book = self._book(pairs)
        self._version = version
        return book

    def _book(self, pairs: list[bytes]) -> KeyBook:
        fields: dict[str, Any] = {"tenants": {}, "keys": []}
        flat = (
            list(pairs.items())
            if isinstance(pairs, dict)
            else list(zip(pairs[::2], pairs[1::2], strict=True))
        )
        try:
            for name, value in flat:
                kind, _, rest = name.decode().partition(":")
                if kind == "tenant":
                    fields["tenants"][rest] = json.loads(value)
                elif kind == "key":
                    fields["keys"].append(json.loads(value) | {"sha256": rest})
        except (ValueError, TypeError) as error:
            raise SetupError(f"keys in Redis: {error}") from None
        return read_book(fields, "keys in Redis")

    async def put(self, name: str, tenant: Tenant | None, record: KeyRecord) -> None:
        """Add a key. `tenant` is None if the tenant exists already."""
        fields = msgspec.to_builtins(record)
        del fields["sha256"]
        pairs: list[str] = [f"key:{record.sha256}", json.dumps(fields)]
        if tenant is not None:
            pairs += [f"tenant:{name}", json.dumps(msgspec.to_builtins(tenant))]
        async with self._client.deadline():
            await self._client.run(("HSET", self._key, *pairs), self._changed())

    async def remove(self, digests: list[str]) -> None:
        names = [f"key:{digest}" for digest in digests]
        async with self._client.deadline():
            await self._client.run(("HDEL", self._key, *names), self._changed())

    def _changed(self) -> tuple[str, ...]:
        """Set a version that was never there before, even in a Redis that lost its data."""
        return ("HSET", self._key, "version", secrets.token_hex(8))

    async def close(self) -> None:
        await self._client.close()


def source_of(place: str, *, name: str, timeout_s: float) -> FileSource | RedisSource:
    """Return the source at `place`, a file's path or a Redis URL. Raises SetupError."""
    if "://" not in place:
        return FileSource(Path(place))
    from kv_store.directory.redis_client import RedisClient  # Only clusters with a Redis load its client.

    return RedisSource(RedisClient(place, timeout_s=timeout_s), name)


class LiveKeys:
    """The keys that count now. A task looks for changes whether requests come or not, so that a key revoked
    in a quiet hour is gone before the next request."""

    def __init__(self, source: KeySource) -> None:
        self._source = source
        self._ring = Keyring(KeyBook())
        self._task: asyncio.Task[None] | None = None
        self.trouble = ""
        """Error of the last look. The keys before it count."""

    async def open(self) -> None:
        """Read the keys. Raises SetupError if the first look fails, since without keys nobody could be
        served."""
        try:
            book = await self._source.read(first=True)
        except DirectoryLost as error:
            raise SetupError(f"keys: {error}") from None
        self._use(book or KeyBook())
        self._task = asyncio.create_task(self._keep_looking())

    def _use(self, book: KeyBook) -> None:
        self._ring = Keyring(book)
        log.info("%d keys of %d tenants", len(book.keys), len(book.tenants))

    def tenant_of(self, key: str) -> tuple[str, Tenant] | None:
        """Return the tenant of a key, by the last look."""
        name = self._ring.tenant_of(key)
        return None if name is None else (name, self._ring.book.tenants[name])

    def tenant_named(self, name: str) -> Tenant | None:
        """Return a tenant by its name, by the last look."""
        return self._ring.book.tenants.get(name)

    async def look(self) -> None:
        """Look for changes now. Tests and callers that cannot wait use it."""
        try:
            book = await self._source.read(first=False)
        except (SetupError, DirectoryLost) as error:
            if str(error) != self.trouble:
                log.warning("keys as before, because: %s", error)
            self.trouble = str(error)
            return
        self.trouble = ""
        if book is not None:
            self._use(book)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._source.look_s)
            try:
                await self.look()
            except Exception:
                log.exception("looking at keys failed; they are as before")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._source.close()
