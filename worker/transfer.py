"""The transfer backends of a worker over its own KV pool, and the checksums of what it sends."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.ids import WorkerId
from engine.kv.pairs import TorchPairs
from engine.kv.pool import KVPool
from kv_transfer.backend import KVMemory
from kv_transfer.checksums import checksum_blocks
from kv_transfer.manager import TransferManager
from kv_transfer.registry import BackendSite, build_backends
from worker.grant_checksums import GrantChecksums, Send


def kv_memory(pool: KVPool) -> KVMemory:
    return KVMemory(
        base_address=pool.base_address,
        block_bytes=pool.block_bytes,
        block_count=pool.block_count,
        generations=pool.generations,
        device=str(pool.device),
    )


def transfer_manager(worker_id: WorkerId, pool: KVPool, config: Config, *, host: str) -> TransferManager:
    """Make the manager, without starting it. `host` is this machine as peers reach it. Raises SetupError for
    checksums of blocks that are not in host memory."""
    memory = kv_memory(pool)
    if config.transfer.checksums and not memory.is_host:
        raise SetupError(
            f"transfer.checksums needs a KV pool in host memory, not on {memory.device}: set it to false"
        )
    site = BackendSite(worker_id, memory, host, make_pairs=lambda: TorchPairs(pool.memory, host=host))
    return TransferManager(build_backends(config.transfer.backends, site), memory=memory)


def grant_sender(
    pool: KVPool,
    config: Config,
    send: Send,
    *,
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
) -> Send:
    """Return `send`, with checksums filled into grants on the way if so configured."""
    if not config.transfer.checksums:
        return send
    return GrantChecksums(functools.partial(checksum_blocks, kv_memory(pool)), send, spawn=spawn).send
