"""Sizes of KV blocks, and the fingerprint two processes must share before KV moves between them."""

import hashlib
from typing import Literal

import msgspec

DTypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[DTypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

KV_LAYOUT = "block-major/L2HPD"
"""Version tag of the memory layout of one block: [layers, 2 (K,V), kv heads, positions, head dim]."""


class KVGeometry(msgspec.Struct, frozen=True):
    layer_count: int
    kv_head_count: int
    head_dim: int
    block_tokens: int
    dtype: DTypeName

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        head_bytes = self.head_dim * DTYPE_BYTES[self.dtype]
        return 2 * self.layer_count * self.block_tokens * self.kv_head_count * head_bytes

    def blocks_for(self, token_count: int) -> int:
        return blocks_for(token_count, self.block_tokens)


def blocks_for(token_count: int, block_tokens: int) -> int:
    """Blocks that hold `token_count` tokens; the last may be part filled."""
    return -(-token_count // block_tokens)


def fingerprint(*, model: str, weights_digest: str, geometry: KVGeometry, wire_version: int) -> str:
    """KV moves only between workers that agree on model, weights, dtype, layout, block and wire.

    Returns 32 hex digits. The same facts give the same text in every process.
    """
    facts = {
        "model": model,
        "weights": weights_digest,
        "layout": KV_LAYOUT,
        "wire": wire_version,
        **msgspec.structs.asdict(geometry),
    }
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:32]
