"""What every directory does: the control plane's (`memory.py`, reached through `remote.py`) and the one in
Redis (`redis_directory.py`). `connect.connect` makes the one that the configuration asks for."""

from collections.abc import Sequence
from typing import Protocol

from baton.core.ids import BlockHash, NodeId
from baton.core.store import Holding, StoreChanges, StoreMember

GONE_S = 60.0
"""A node id that left is remembered this long: what it still says then changes nothing. No message stays
under way for longer."""


class DirectoryLost(Exception):
    """It does not answer, in its own deadline. Callers go on with what they know and try again later."""


class Directory(Protocol):
    """Entries are leases: they end with their holder's. Every call has a deadline of its own, and may be
    repeated when it raised: whether it was heard is not known then, and hearing it twice changes nothing."""

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool:
        """Starts or renews the node's lease. False: the directory knows nothing of the node's blocks (it is
        new, was flushed, fell back to an older state, or the lease had lapsed): the node publishes a
        snapshot. False also for a node that left. Raises DirectoryLost."""
        ...

    async def leave(self, node_id: NodeId) -> None:
        """The node and all it holds are gone, for good. Raises DirectoryLost."""
        ...

    async def members(self) -> tuple[StoreMember, ...]:
        """Those whose lease runs, by node id. Raises DirectoryLost."""
        ...

    async def publish(self, changes: StoreChanges) -> bool:
        """In order of `sequence_number`. False: a gap, or nothing is known of the node: it renews its lease
        if that may have lapsed, and publishes a snapshot. Raises DirectoryLost."""
        ...

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[Holding, ...]]:
        """Holders of each whose lease runs, by node id; draining ones too. Raises DirectoryLost."""
        ...

    async def close(self) -> None: ...
