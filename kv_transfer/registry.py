"""How each transfer backend of `baton.core.transfer_backends` is built."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.core.ids import WorkerId
from baton.core.transfer_backends import BackendName
from kv_transfer.backend import KVMemory, TransferBackend
from kv_transfer.backends.nccl import Pairs


@dataclass(frozen=True, slots=True)
class BackendSite:
    """What a process has to offer a backend."""

    name: WorkerId
    """How peers know this memory: a worker's id, or a store node's with the size of its blocks."""
    memory: KVMemory
    host: str
    """This machine, as peers reach it."""
    make_pairs: Callable[[], Pairs] | None = None
    """Makes process groups with one peer each; None: this process takes part in none."""


def _cuda_ipc(site: BackendSite) -> TransferBackend:
    from kv_transfer.backends.cuda_ipc import CudaIpcBackend

    return CudaIpcBackend(site.name, site.memory)


def _cma(site: BackendSite) -> TransferBackend:
    from kv_transfer.backends.cma import CmaBackend

    return CmaBackend(site.name, site.memory)


def _nixl(site: BackendSite) -> TransferBackend:
    from kv_transfer.backends.nixl import NixlBackend

    return NixlBackend(site.name, site.memory, host=site.host)


def _nccl(site: BackendSite) -> TransferBackend | None:
    from kv_transfer.backends.nccl import NcclBackend

    if site.make_pairs is None:
        return None
    return NcclBackend(site.name, site.memory, site.make_pairs(), host=site.host)


def _tcp(site: BackendSite) -> TransferBackend:
    from kv_transfer.backends.tcp import TcpBackend

    return TcpBackend(site.name, site.memory, host=site.host)


BUILDERS: dict[BackendName, Callable[[BackendSite], TransferBackend | None]] = {
    "cuda_ipc": _cuda_ipc,
    "cma": _cma,
    "nixl": _nixl,
    "nccl": _nccl,
    "tcp": _tcp,
}
"""None from a builder: the backend has no use for such a process. Modules are imported when they are
built."""


def build_backends(names: Iterable[BackendName], site: BackendSite) -> list[TransferBackend]:
    """Backends in the order of `names`, none started yet."""
    built = (BUILDERS[name](site) for name in names)
    return [backend for backend in built if backend is not None]
