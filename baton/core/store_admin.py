"""An operator's requests to a store node, over its local socket or its gRPC server."""

import msgspec

from baton.core.ids import NodeId
from baton.core.store import Tier


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for the status. The answer is NodeStatus."""


class AskClear(msgspec.Struct, frozen=True, tag=True):
    """Drop blocks. The answer is Done with the number dropped at once; pinned blocks go when they are
    unpinned."""

    tier: Tier | None = None
    """Tier to clear. None: all."""
    tenant: str | None = None
    """Tenant whose blocks are dropped. None: all tenants."""


class AskDrain(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new and offer the most valuable blocks to the peers. The answer is Done at once, and the
    status says when the node is drained. The process runs until it is told to end."""


StoreRequest = AskStatus | AskClear | AskDrain


class Done(msgspec.Struct, frozen=True, tag=True):
    text: str
    """One line for a person."""


class Declined(msgspec.Struct, frozen=True, tag=True):
    text: str


class NodeStatus(msgspec.Struct, frozen=True, tag=True):
    """A store node's status, with its counters since its start by name."""

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
    """Occupancy, hits, bytes and more, see `docs/operations.md`."""
    tenants: tuple[tuple[str, int, int], ...] = ()
    """The tenants with most bytes: (tenant, bytes of host memory, bytes of SSD)."""
    peers: tuple[tuple[str, str], ...] = ()
    """Known peers: (node id, address)."""
    notes: tuple[str, ...] = ()
    """Remarks for people that no number expresses."""


StoreReply = NodeStatus | Done | Declined
