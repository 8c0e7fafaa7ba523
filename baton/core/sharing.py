"""The messages by which the routers of one cluster report their load to each other.

They keep one router from sending work to a worker that another router has just filled. A report carries the
router's whole unreported load at a worker and not a change of it, so a repeated or a lost report does no
harm.
"""

import msgspec

from baton.core.ids import BlockHash, RouterId, WorkerId
from baton.core.wire_types import UInt64


class UnreportedLoad(msgspec.Struct, frozen=True):
    """The load that one router has at one worker and that the worker's own reports do not show yet."""

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
    """What changed at one router, or a snapshot of everything."""

    router_id: RouterId
    is_snapshot: bool = False
    """The update is complete: the router has no unreported load at workers that it does not name."""
    loads: tuple[UnreportedLoad, ...] = ()
    """Loads that changed. A load of zero takes back what was reported before."""
    expected: tuple[ExpectedBlocks, ...] = ()


class RouterMember(msgspec.Struct, frozen=True):
    """A router as the directory lists it, for as long as it watches."""

    router_id: RouterId
    address: str = ""
    """The address where other routers follow it; empty: it is not listed."""
    metrics_address: str = ""
    host: str = ""
    pid: int = 0
