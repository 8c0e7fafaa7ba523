"""Content addresses of KV blocks.

hash(block i) = BLAKE2b-128(hash(block i-1) ‖ token ids of block i as little-endian uint32)

The chain starts at `root_hash(fingerprint, salt)`: equal prefixes under the same model, layout and
tenant have equal hashes in every process, anything else differs. Only full blocks have a hash.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from baton.core.ids import BlockHash

HASH_BYTES = 16


def root_hash(fingerprint: str, salt: bytes) -> BlockHash:
    """Return the root of a chain. `salt` is the tenant's, set by the router; clients cannot choose it."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=HASH_BYTES, key=salt[:64])
    return BlockHash(digest.digest())


def chain(root: BlockHash, tokens: Sequence[int], block_tokens: int) -> Iterator[BlockHash]:
    """Yield the hashes of the full blocks of `tokens`, first block first. `root` may be any block's hash;
    `tokens` are then those that follow that block."""
    words = array("I", tokens)
    assert words.itemsize == 4
    raw, width = words.tobytes(), block_tokens * words.itemsize
    hashed = hashlib.blake2b
    parent: bytes = root
    for start in range(0, len(raw) - width + 1, width):
        # One call with both parts: half the price of an object that is updated.
        parent = hashed(parent + raw[start : start + width], digest_size=HASH_BYTES).digest()
        yield BlockHash(parent)


def block_hashes(root: BlockHash, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
    return list(chain(root, tokens, block_tokens))


def tail_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Return the hash of the first `len(tokens)` positions of a block that is not full. It never equals the
    hash of a full block, whatever follows."""
    digest = hashlib.blake2b(parent, digest_size=HASH_BYTES, person=b"tail")
    digest.update(array("I", tokens).tobytes())
    return BlockHash(digest.digest())
