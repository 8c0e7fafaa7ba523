"""What a read of KV blocks is, and how it ended: one description for workers, store nodes and benches."""

from typing import NamedTuple

import msgspec

from baton.core.ids import ReadId, WorkerId
from kv_transfer.layout import Ranges


class BlockRead(msgspec.Struct, frozen=True):
    """Copy source_blocks[i] of the owner's memory to local_blocks[i] here, then compare generations and
    checksums.

    A read that is started is always answered by one ReadDone, within `timeout_s` and a little. Blocks are
    numbers of a worker's KV pool or slots of a store node's arena. Where a worker has several ranks, a read
    of its blocks becomes reads of parts of them (`kv_transfer.part_transfer`), each with `ranges`.
    """

    read_id: ReadId
    owner: WorkerId
    """The peer whose memory is read, by the name that the transfer manager knows."""
    source_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    """Generations of the source blocks as they were granted: they must be the same after the copy."""
    timeout_s: float
    """The lease has at least this much time left."""
    block_bytes: int
    """Bytes of content in one block. A store node has one arena, and one transfer manager, for each size."""
    checksums: tuple[int, ...] = ()
    """XXH3-64 of each block's content; 0 stands for one that nobody computed, empty for none at all."""
    ranges: Ranges = ()
    """Parts of every block that are copied; empty: whole blocks."""

    @property
    def byte_count(self) -> int:
        per_block = sum(piece.length for piece in self.ranges) or self.block_bytes
        return per_block * len(self.source_blocks)


class ReadDone(msgspec.Struct, frozen=True):
    """How a BlockRead ended. `error` empty: the bytes are in place and the generations still matched."""

    read_id: ReadId
    error: str = ""
    is_settled: bool = True
    """False: bytes may yet land in the local blocks, and a ReadSettled follows."""
    is_stale: bool = False
    """The owner gave the blocks to new content: reading them again is pointless."""
    corrupt: tuple[int, ...] = ()
    """Positions of blocks whose bytes are not those that the checksums were made of. The others are good."""
    seconds: float = 0.0
    """Time that the read took, well or not."""
    byte_count: int = 0
    """Bytes that were copied with their generations right."""


class ReadSettled(msgspec.Struct, frozen=True):
    """Nothing of the read can land any more."""

    read_id: ReadId


ReadEvent = ReadDone | ReadSettled


class ReadVerdict(NamedTuple):
    """Whether a reader may use what a read brought."""

    fault: str = ""
    """Empty: every block that is not named corrupt is good."""
    may_repeat: bool = True
    """The same blocks may be read again: the grant still stands."""


def judge(done: ReadDone, *, lease_end_s: float, now_s: float) -> ReadVerdict:
    """A read is good if it has settled, its generations matched, and it ended before the lease did."""
    if done.is_stale:
        return ReadVerdict("the owner gave the blocks to new content", may_repeat=False)
    fault = done.error
    if not fault and now_s >= lease_end_s:
        fault = "it ended after the lease"
    if not fault and not done.is_settled:
        fault = "it has not settled"
    return ReadVerdict(fault, may_repeat=now_s < lease_end_s)
