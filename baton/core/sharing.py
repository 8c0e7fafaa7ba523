"""What routers of one cluster tell each other, so that none sends work where another just did.

A share is the load that its router has at a worker and that the worker's own reports do not show yet. It is
told as it is, not as a change: hearing one twice, or missing one before another, does no harm.
"""

import msgspec

from baton.core.ids import BlockHash, RouterId, WorkerId
from baton.core.wire_types import UInt64


class WorkerShare(msgspec.Struct, frozen=True):
    """The load that one router has at one worker."""

    worker_id: WorkerId
    sequences: int = 0
    tokens: UInt64 = 0
    """Prompt tokens that are still to be computed."""
    blocks: int = 0


class ExpectedBlocks(msgspec.Struct, frozen=True):
    """Blocks that sequences just placed at a worker will leave behind."""

    worker_id: WorkerId
    hashes: tuple[BlockHash, ...]


class RouterUpdate(msgspec.Struct, frozen=True):
    """What changed at one router, or all of it."""

    router_id: RouterId
    is_snapshot: bool = False
    """All is told: workers that are not named have no share."""
    shares: tuple[WorkerShare, ...] = ()
    """Shares that changed."""
    expected: tuple[ExpectedBlocks, ...] = ()


class RouterMember(msgspec.Struct, frozen=True):
    """A router as the directory lists it, for as long as it watches."""

    router_id: RouterId
    address: str = ""
    """The address where other routers follow it; empty: it is not listed."""
    metrics_address: str = ""
    host: str = ""
    pid: int = 0
