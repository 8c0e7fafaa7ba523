"""The interface of every directory: the control plane's (`memory.py`, reached through `remote.py`) and the
one in Redis (`redis_directory.py`). `connect.connect` makes the one that the configuration asks for."""

from collections.abc import Sequence
from typing import Protocol

from baton.core.ids import BlockHash, NodeId
from baton.core.store import BlockLocation, StoreChanges, StoreMember

GONE_S = 60.0
"""A node id that left is remembered this long, and messages from it change nothing meanwhile. No message
stays under way for longer."""


class DirectoryLost(Exception):
    """The directory does not answer within its own deadline. Callers go on with what they know and try again
    later."""


class Directory(Protocol):
    """The directory. Entries are leases: they end with their holder's. Every call has a deadline of its own,
    and may be repeated when it raised: it is not known then whether it arrived, and a second arrival changes
    nothing."""

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool:
        """Start or renew the node's lease. Raises DirectoryLost.

        False means that the directory knows nothing of the node's blocks (it is new, was flushed, fell back
        to an older state, or the lease had lapsed), and that the node must publish a snapshot. The answer is
        also False for a node that left.
        """
        ...

    async def leave(self, node_id: NodeId) -> None:
        """Forget the node and all it holds, for good. Raises DirectoryLost."""
        ...

    async def members(self) -> tuple[StoreMember, ...]:
        """Members whose lease runs, by node id. Raises DirectoryLost."""
        ...

    async def publish(self, changes: StoreChanges) -> bool:
        """Publish changes, in order of `sequence_number`. Raises DirectoryLost.

        False means a gap, or that nothing is known of the node: it renews its lease if that may have lapsed,
        and publishes a snapshot.
        """
        ...

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[BlockLocation, ...]]:
        """Holders of each block whose lease runs, by node id, draining ones included. Raises
        DirectoryLost."""
        ...

    async def close(self) -> None: ...
