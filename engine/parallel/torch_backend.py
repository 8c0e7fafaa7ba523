"""Process groups of torch.distributed for the ranks of one worker: NCCL on GPUs, gloo in host memory.

Each is an object of its own, with a store of its own. The default group of the process is left alone.
"""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from baton.core.errors import SetupError

_c10d: Any = dist
_options: Any = distributed_c10d
"""Its groups, stores and options are public, and not declared so."""
STORE_S = 120.0
"""The longest time for rank 0 to wait for what another rank puts into the store."""
NCCL_PATIENCE = 4
"""torch ends a process whose NCCL calls are late. Its time is so many times the group's own deadline, which
ends the call and not the process."""


def check_backend(device: torch.device) -> None:
    """Raises SetupError: this torch has no collectives for tensors on the device."""
    is_cuda = device.type == "cuda"
    if not dist.is_available() or not (dist.is_nccl_available() if is_cuda else dist.is_gloo_available()):
        raise SetupError(f"this torch was built without {'NCCL' if is_cuda else 'gloo'}")


def serve_store(host: str) -> tuple[Any, int]:
    """Make a group's store as rank 0, at a free port of an address of this machine, and return both. Raises
    SetupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise SetupError(f"ranks cannot listen on {host}: {error.strerror or error}") from error
    port = listener.getsockname()[1]
    try:
        store = _store(host, port, STORE_S, descriptor=listener.detach())
    except RuntimeError as error:
        raise SetupError(f"ranks have no store on {host}: {error}") from error
    return store, port


def join_store(host: str, port: int, *, timeout_s: float) -> Any:
    """Join a group's store as another rank. Raises RuntimeError."""
    return _store(host, port, timeout_s, descriptor=None)


def _store(host: str, port: int, timeout_s: float, *, descriptor: int | None) -> Any:
    return _c10d.TCPStore(
        *(host, port, None, descriptor is not None, timedelta(seconds=timeout_s)),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def make_backend(
    store: Any, rank: int, size: int, device: torch.device, *, host: str, timeout_s: float, deadline_s: float
) -> Any:
    """Make this rank's process group, at the same time as the other ranks. `host` is an address of this
    machine. Raises RuntimeError."""
    if device.type == "cuda":
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NCCL_PATIENCE * deadline_s)
        options.config.blocking = 0  # so that `abort` ends whatever a call waits for
        with torch.cuda.device(device):
            group = _c10d.ProcessGroupNCCL(store, rank, size, options)
            group.eager_connect_single_device(device)
            return group
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=max(timeout_s, deadline_s))
    return gloo(store, rank, size, options)


def gather_to(root: int) -> Any:
    options = _options.GatherOptions()
    options.rootRank = root
    return options


def broadcast_from(root: int) -> Any:
    options = _options.BroadcastOptions()
    options.rootRank = root
    return options
