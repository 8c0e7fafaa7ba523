"""The interface every transfer backend implements, and the memory it moves.

Reads are one-sided and initiated by the decode worker. A backend knows blocks and addresses; leases,
epochs and sequences are the business of its callers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.core.errors import TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.layout import Ranges


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

    def __post_init__(self) -> None:
        table = self.generations
        assert table.dtype == np.uint64
        assert table.shape == (self.block_count,)
        assert table.flags.c_contiguous

    @property
    def pool_bytes(self) -> int:
        return self.block_bytes * self.block_count

    @property
    def is_host(self) -> bool:
        return self.device == "cpu"

    @property
    def device_index(self) -> int:
        """N of "cuda:N", as torch and CUDA count this process's devices."""
        return int(self.device.partition(":")[2] or 0)


class BlockStaging(Protocol):
    """Copies between device blocks and host memory, for backends that cannot touch the device.

    Called on transfer threads, several at once. Both return when the bytes are in place.
    """

    def to_host(self, blocks: Sequence[int], into: memoryview) -> None:
        """Block blocks[i] to into[i * block_bytes : (i + 1) * block_bytes]."""
        ...

    def to_device(self, data: memoryview, blocks: Sequence[int]) -> None:
        """The reverse."""
        ...


def check_blocks(
    memory: KVMemory, peer: WorkerId, peer_block_count: int, source: Sequence[int], local: Sequence[int]
) -> None:
    """Raises ValueError for a mistake of this process and TransferFailed for one of the peer's."""
    if len(source) != len(local):
        raise ValueError(f"{len(source)} source blocks for {len(local)} local ones")
    if any(not 0 <= block < memory.block_count for block in local):
        raise ValueError(f"local blocks outside 0..{memory.block_count - 1}: {list(local)[:8]}")
    if any(not 0 <= block < peer_block_count for block in source):
        raise TransferFailed(f"{peer} has blocks 0..{peer_block_count - 1}, not all of {list(source)[:8]}")


class TransferBackend(Protocol):
    """All coroutines run on the worker's event loop and never block it for longer than a
    millisecond; copying happens elsewhere (a transfer thread, the NIC)."""

    name: str

    async def start(self) -> None:
        """Raises SetupError if the backend cannot work on this machine, and OtherMemory, one of them, if it
        never works for memory of this kind."""
        ...

    def offer(self) -> bytes:
        """What a peer needs to read this worker's pool. Valid until `close`."""
        ...

    async def add_peer(self, peer: WorkerId, offer: bytes, *, block_bytes: int | None = None) -> None:
        """`block_bytes`: of the peer's blocks, if not of ours (another part of a block).
        Raises IncompatiblePeer (block size, layout, malformed offer) or TransferFailed."""
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
        ranges: Ranges = (),
    ) -> list[int]:
        """Copy source_blocks[i] of the peer to local_blocks[i] here, for every i: whole, or those `ranges`
        of each; other bytes of the local blocks stay as they are.

        Returns when all bytes are in place, with the peer's generations of source_blocks as they were
        *after* the last byte was copied: generations only rise, and rise before the first new byte, so
        equality with the granted ones proves that every byte belongs to the granted content.

        Raises TransferFailed: peer dead, unknown or out of time, or a source block it does not have;
        ValueError: lengths differ, a local block we do not have, a range outside a block (our own bug). With
        `may_still_land` set, the local blocks must stay out of use until `settled()` has returned
        for the same blocks. Cancelling the coroutine counts as running out of time: call `settled`.
        """
        ...

    async def settled(self, local_blocks: Sequence[int]) -> None:
        """Returns when no abandoned read can write into these blocks any more."""
        ...

    async def close(self) -> None:
        """Idempotent. Afterwards nothing writes into the pool."""
        ...
