"""What an operator asks a store node, over its local socket or its gRPC server."""

import msgspec

from baton.core.ids import NodeId
from baton.core.store import Tier


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """Answered by NodeStatus."""


class AskClear(msgspec.Struct, frozen=True, tag=True):
    """Answered by Done, with how many blocks went at once; pinned ones go when they are unpinned."""

    tier: Tier | None = None
    """None: all."""
    tenant: str | None = None
    """None: all."""


class AskDrain(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new and offer the most valuable blocks to the peers. Answered by Done at once; the status
    says when it is drained. The process goes on until it is told to end."""


StoreRequest = AskStatus | AskClear | AskDrain


class Done(msgspec.Struct, frozen=True, tag=True):
    text: str
    """One line for a person."""


class Declined(msgspec.Struct, frozen=True, tag=True):
    text: str


class NodeStatus(msgspec.Struct, frozen=True, tag=True):
    """A store node's account of itself; counters since its start, by name."""

    node_id: NodeId
    host: str
    pid: int
    address: str
    """host:port of its gRPC server."""
    socket: str
    metrics_address: str
    uptime_s: float
    policy: str
    is_draining: bool
    is_drained: bool
    accounts: dict[str, float]
    """Occupancy, hits, bytes and more; see `docs/operations.md`."""
    tenants: tuple[tuple[str, int, int], ...] = ()
    """(tenant, bytes of host memory, bytes of SSD) of those that hold most."""
    peers: tuple[tuple[str, str], ...] = ()
    """(node id, address)"""
    notes: tuple[str, ...] = ()
    """What people should know and no number says."""


StoreReply = NodeStatus | Done | Declined
