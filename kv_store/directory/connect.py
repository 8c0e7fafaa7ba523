"""The directory that the configuration asks for."""

import logging

from baton.config import StoreConfig
from baton.core.errors import SetupError
from kv_store.directory.interface import Directory, DirectoryLost
from kv_store.directory.remote import RemoteDirectory

log = logging.getLogger(__name__)


async def connect(config: StoreConfig, *, control_address: str) -> Directory:
    """Connect to Redis where `store.directory` names it, else to the control plane's directory at
    `control_address` (host:port).

    A directory that does not answer now is no error: its calls raise DirectoryLost until it does. Raises
    SetupError for what the operator must change: a bad URL, a wrong password, a server that does not speak
    TLS.
    """
    if config.directory:
        return await _connect_redis(config)
    if not control_address:
        raise SetupError("no directory: name the control plane with --control, or a Redis with --store")
    return RemoteDirectory(control_address, timeout_s=config.directory_timeout_s)


async def _connect_redis(config: StoreConfig) -> Directory:
    from kv_store.directory.redis_client import RedisClient  # only users of Redis wait for its client
    from kv_store.directory.redis_directory import RedisDirectory

    client = RedisClient(config.directory, timeout_s=config.directory_timeout_s)
    try:
        await client.check()
    except DirectoryLost as error:
        log.warning("the directory does not answer, going on without: %s", error)
    except SetupError:
        await client.close()
        raise
    return RedisDirectory(client, name=config.directory_name)
