"""What routers of one cluster tell each other, so that none sends work where another just did.

A share is what its router has at a worker and the worker's own reports do not show yet. It is told as it
is, not as a change: hearing one twice, or missing one before another, does no harm.
"""

import msgspec

from baton.core.ids import BlockHash, RouterId, WorkerId
from baton.core.wire_types import UInt64


class WorkerShare(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    sequences: int = 0
    tokens: UInt64 = 0
    """Of prompts, to compute."""
    blocks: int = 0


class ExpectedBlocks(msgspec.Struct, frozen=True):
    """Blocks that sequences just placed there will leave behind."""

    worker_id: WorkerId
    hashes: tuple[BlockHash, ...]


class RouterUpdate(msgspec.Struct, frozen=True):
    router_id: RouterId
    is_snapshot: bool = False
    """Workers that are not named have no share."""
    shares: tuple[WorkerShare, ...] = ()
    """Those that changed."""
    expected: tuple[ExpectedBlocks, ...] = ()


class RouterMember(msgspec.Struct, frozen=True):
    """A router as the directory lists it, for as long as it watches."""

    router_id: RouterId
    address: str = ""
    """Where other routers follow it; empty: it is not listed."""
    metrics_address: str = ""
    host: str = ""
    pid: int = 0
