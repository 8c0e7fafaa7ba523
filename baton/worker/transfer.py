"""Which transfer backends a worker has, over its own KV pool."""

from baton.config import Config
from baton.core.ids import WorkerId
from baton.engine.kv_pool import KVPool
from kv_transfer.backend import KVMemory, TransferBackend
from kv_transfer.backends.cma import CmaBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.backends.tcp import TcpBackend
from kv_transfer.manager import TransferManager


def transfer_manager(worker_id: WorkerId, pool: KVPool, config: Config, *, host: str) -> TransferManager:
    """Not started yet. `host`: this machine, as peers reach it."""
    memory = KVMemory(
        base_address=pool.base_address,
        block_bytes=pool.block_bytes,
        block_count=pool.block_count,
        generations=pool.generations,
        device=str(pool.device),
    )
    backends: list[TransferBackend] = []
    for name in config.transfer.backends:
        match name:
            case "cma":
                backends.append(CmaBackend(worker_id, memory))
            case "nixl":
                backends.append(NixlBackend(worker_id, memory))
            case "tcp":
                backends.append(TcpBackend(worker_id, memory, host=host))
    return TransferManager(backends, block_bytes=pool.block_bytes)
