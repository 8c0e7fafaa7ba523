"""The checksum of a block's bytes: XXH3-64, as it travels with a block through all tiers.

It finds what disks, memory and broken writers do to bytes; it is no defence against who can write there.
"""

import xxhash


def checksum(payload: memoryview | bytes | bytearray) -> int:
    """The checksum as unsigned 64 bits. It releases the GIL for a payload of the size of a block."""
    return xxhash.xxh3_64_intdigest(payload)
