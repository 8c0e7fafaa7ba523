"""The transfer backends of a node, over one arena."""

from baton.config import TransferConfig
from baton.core.ids import NodeId, WorkerId
from kv_transfer.backend import KVMemory, TransferBackend
from kv_transfer.manager import TransferManager


def transfer_manager(
    node_id: NodeId, memory: KVMemory, config: TransferConfig, *, host: str
) -> TransferManager:
    """Make the manager, without starting it. `host` is this machine as peers reach it."""
    name = WorkerId(f"{node_id}/{memory.block_bytes}")
    backends: list[TransferBackend] = []
    for backend in config.backends:
        match backend:
            case "cma":
                from kv_transfer.backends.cma import CmaBackend

                backends.append(CmaBackend(name, memory))
            case "nixl":
                from kv_transfer.backends.nixl import NixlBackend

                backends.append(NixlBackend(name, memory, host=host))
            case "tcp":
                from kv_transfer.backends.tcp import TcpBackend

                backends.append(TcpBackend(name, memory, host=host))
            case "nccl":
                pass  # a group of workers, which nodes are not in
    return TransferManager(backends, block_bytes=memory.block_bytes)
