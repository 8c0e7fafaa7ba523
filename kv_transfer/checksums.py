"""XXH3-64 of blocks in host memory: about 30 GB/s, with the GIL free for blocks of more than a few KiB.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import ctypes
from collections.abc import Sequence

import xxhash

from kv_transfer.backend import KVMemory


def checksum_blocks(memory: KVMemory, blocks: Sequence[int]) -> list[int]:
    """Of each block's bytes, in this order. Takes about 30 µs per MB: not on an event loop."""
    assert memory.is_host
    pool = (ctypes.c_char * memory.pool_bytes).from_address(memory.base_address)
    view, size = memoryview(pool).cast("B"), memory.block_bytes
    return [xxhash.xxh3_64_intdigest(view[block * size : (block + 1) * size]) for block in blocks]
