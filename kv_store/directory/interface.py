"""What every directory does: in memory (`memory.py`, for the control plane) and in Redis (`redis.py`)."""

from collections.abc import Sequence
from typing import Protocol

from baton.core.ids import BlockHash, NodeId
from baton.core.store import Holding, StoreChanges, StoreMember


class DirectoryLost(Exception):
    """It does not answer, in its own deadline. Callers go on with what they know and try again later."""


class Directory(Protocol):
    """Entries are leases: they end with their holder's. Every call has a deadline of its own."""

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool:
        """Starts or renews the node's lease. False: the directory knows nothing of the node's blocks (it is
        new, was flushed, or the lease had lapsed): the node publishes a snapshot. Raises DirectoryLost."""
        ...

    async def leave(self, node_id: NodeId) -> None:
        """The node and all it holds are gone, for good. Raises DirectoryLost."""
        ...

    async def members(self) -> tuple[StoreMember, ...]:
        """Those whose lease runs. Raises DirectoryLost."""
        ...

    async def publish(self, changes: StoreChanges) -> bool:
        """In order of `sequence_number`. False: a gap, or nothing is known of the node: publish a snapshot.
        Raises DirectoryLost."""
        ...

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[Holding, ...]]:
        """Holders of each whose lease runs; draining ones too. Raises DirectoryLost."""
        ...

    async def close(self) -> None: ...
