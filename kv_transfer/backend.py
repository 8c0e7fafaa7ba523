"""The interface every transfer backend implements, and the memory it moves.

Reads are one-sided and initiated by the decode worker. A backend knows blocks and addresses; leases,
epochs and sequences are the business of its callers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.core.ids import WorkerId


@dataclass(frozen=True, slots=True)
class KVMemory:
    """One worker's KV pool as a transfer backend sees it.

    Block i occupies [base_address + i * block_bytes, + block_bytes). `generations` (uint64, shape
    [block_count]) lives in host memory: entry i rises, before the first new byte is written, each
    time block i is given out for new content. Peers read it one-sided. The owner of the memory
    outlives the backend.
    """

    base_address: int
    block_bytes: int
    block_count: int
    generations: npt.NDArray[np.uint64]
    device: str = "cpu"
    """Torch device of the blocks: "cpu" or "cuda:N". The generations are always in host memory."""


class TransferBackend(Protocol):
    """All coroutines run on the worker's event loop and never block it for longer than a
    millisecond; copying happens elsewhere (a transfer thread, the NIC)."""

    name: str

    async def start(self) -> None:
        """Raises SetupError if the backend cannot work on this machine."""
        ...

    def offer(self) -> bytes:
        """What a peer needs to read this worker's pool. Valid until `close`."""
        ...

    async def add_peer(self, peer: WorkerId, offer: bytes) -> None:
        """Raises IncompatiblePeer (block size, layout, malformed offer) or TransferFailed."""
        ...

    async def remove_peer(self, peer: WorkerId) -> None:
        """Reads in flight from it end with TransferFailed. Unknown peer: nothing happens."""
        ...

    async def read(
        self,
        peer: WorkerId,
        source_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout_s: float,
    ) -> None:
        """Copy source_blocks[i] of the peer to local_blocks[i] here, for every i.

        Returns when all bytes are in place. Raises TransferFailed: peer dead, unknown or out of time.
        With `may_still_land` set, the local blocks must stay out of use until `settled()` has returned
        for the same blocks. Cancelling the coroutine counts as running out of time: call `settled`.
        """
        ...

    async def settled(self, local_blocks: Sequence[int]) -> None:
        """Returns when no abandoned read can write into these blocks any more."""
        ...

    async def read_generations(
        self, peer: WorkerId, source_blocks: Sequence[int], *, timeout_s: float
    ) -> list[int]:
        """The peer's current generations of these blocks. Raises TransferFailed."""
        ...

    async def close(self) -> None:
        """Idempotent. Afterwards nothing writes into the pool."""
        ...
