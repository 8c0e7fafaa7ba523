"""XXH3-64 of blocks in host memory: about 30 GB/s, with the GIL free for blocks of more than a few KiB.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from baton.core.geometry import KVGeometry
from kv_transfer.backend import KVMemory
from kv_transfer.layout import Places, whole_places
from kv_transfer.part_copies import PartCopies, rows_at


def checksum_blocks(
    memory: KVMemory, blocks: Sequence[int], *, content_bytes: int | None = None
) -> list[int]:
    """Checksums of the first `content_bytes` of each block, or of whole blocks, in this order. Takes about 30
    µs per MB: not on an event loop."""
    assert memory.is_host
    pool = (ctypes.c_char * memory.pool_bytes).from_address(memory.base_address)
    view, size = memoryview(pool).cast("B"), memory.block_bytes
    length = size if content_bytes is None else content_bytes
    return [xxhash.xxh3_64_intdigest(view[block * size : block * size + length]) for block in blocks]


class WholeChecksums:
    """Checksums of a worker's whole blocks, whatever its shape: they are those of the bytes that a worker of
    one rank has, so that any worker can compare them. Not on an event loop; on several threads at once."""

    def __init__(self, whole: KVGeometry, parts: Sequence[tuple[Places, KVMemory]]) -> None:
        self._whole = whole
        self._only = parts[0][1] if len(parts) == 1 and parts[0][0] == whole_places(whole) else None
        self._rows = [
            (places, rows_at(memory.base_address, memory.block_bytes, memory.block_count))
            for places, memory in parts
        ]

    def __call__(self, blocks: Sequence[int]) -> list[int]:
        if self._only is not None:
            return checksum_blocks(self._only, blocks)
        return [checksum for checksum, _ in self._gathered(blocks)]

    def wrong(self, blocks: Sequence[int], expected: Sequence[int]) -> tuple[int, ...]:
        """Positions of blocks that do not have the expected checksum, or whose parts that should hold the
        same bytes do not. An expected 0 stands for a checksum that nobody computed."""
        if self._only is not None:
            found = [(checksum, True) for checksum in checksum_blocks(self._only, blocks)]
        else:
            found = list(self._gathered(blocks))
        pairs = enumerate(zip(found, expected, strict=True))
        return tuple(i for i, ((there, agree), wanted) in pairs if wanted and (there != wanted or not agree))

    def _gathered(self, blocks: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """The checksum of each block, and whether its replicas agree."""
        scratch = np.empty((1, self._whole.block_bytes), np.uint8)
        copies = PartCopies(self._whole, scratch, self._rows)
        for block in blocks:
            copies.gather(block, 0)
            yield xxhash.xxh3_64_intdigest(scratch.data), copies.agree(block, 0)
