"""Of a block's bytes: XXH3-64, as it travels with a block through all tiers.

It finds what disks, memory and broken writers do to bytes; it is no defence against who can write there.
"""

import xxhash


def checksum(payload: memoryview | bytes | bytearray) -> int:
    """Unsigned 64 bits. Releases the GIL for the size of a block."""
    return xxhash.xxh3_64_intdigest(payload)
