"""The KV transfer backends that exist, and what is known of each without loading it.

Config, workers, store nodes, benches, `baton doctor` and the dashboard read this table; how a backend is
built is in `kv_transfer.registry`. A new backend is a row here, a builder there, and its own module."""

from typing import Literal, NamedTuple

BackendName = Literal["cuda_ipc", "cma", "nixl", "nccl", "tcp"]


class BackendFacts(NamedTuple):
    summary: str
    """How the bytes move, for the documentation of `transfer.backends`."""
    is_default: bool
    is_same_host_only: bool
    """Peers on other hosts need another backend."""
    reads_device_memory: bool
    """Blocks may be in a GPU's memory."""
    reads_host_memory: bool = True
    is_last_resort: bool = False
    """`baton doctor` and the dashboard say so when all KV moves over it while something better works."""


BACKENDS: dict[BackendName, BackendFacts] = {
    "cuda_ipc": BackendFacts(
        "a GPU copies from the memory of a process of the same host, on that GPU or another",
        is_default=True,
        is_same_host_only=True,
        reads_device_memory=True,
        reads_host_memory=False,
    ),
    "cma": BackendFacts(
        "the kernel copies from the host memory of a process of the same host",
        is_default=True,
        is_same_host_only=True,
        reads_device_memory=False,
    ),
    "nixl": BackendFacts(
        "RDMA, NVLink, shared memory or TCP over UCX",
        is_default=True,
        is_same_host_only=False,
        reads_device_memory=True,
    ),
    "nccl": BackendFacts(
        "torch.distributed between workers, with NCCL between GPUs and gloo between pools in host memory",
        is_default=False,
        is_same_host_only=False,
        reads_device_memory=True,
    ),
    "tcp": BackendFacts(
        "plain sockets",
        is_default=True,
        is_same_host_only=False,
        reads_device_memory=False,
        is_last_resort=True,
    ),
}
"""Most preferred first."""

DEFAULT_BACKENDS: tuple[BackendName, ...] = tuple(
    name for name, facts in BACKENDS.items() if facts.is_default
)

LAST_RESORTS: frozenset[BackendName] = frozenset(
    name for name, facts in BACKENDS.items() if facts.is_last_resort
)


def described() -> str:
    """What `transfer.backends` may name, for its documentation."""
    return " ".join(f"{name}: {facts.summary}." for name, facts in BACKENDS.items())
