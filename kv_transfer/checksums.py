"""XXH3-64 of blocks in host memory: about 30 GB/s, with the GIL free for blocks of more than a few KiB.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import ctypes
from collections.abc import Sequence

import xxhash

from kv_transfer.backend import KVMemory


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
