"""Sizes of KV blocks, and the fingerprint that two processes must share before KV moves between them."""

import hashlib
from typing import Literal

import msgspec

DTypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[DTypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

QuantName = Literal["int8", "fp8"]
"""int8: symmetric. fp8: e4m3. One float32 scale per layer, plane, head and position."""
KVDTypeName = Literal["auto", "int8", "fp8"]
STORED_BYTES: dict[DTypeName | QuantName, int] = {**DTYPE_BYTES, "int8": 1, "fp8": 1}
SCALE_BYTES = 4

KV_LAYOUT = "block-major/LCHPD+S"
"""Version tag of the memory layout of one block, see `KVGeometry`."""


class KVGeometry(msgspec.Struct, frozen=True):
    """A block's bytes: values [layers, planes, kv heads, positions, head dim] of `kv_dtype`; where that
    is quantised, scales [layers, planes, kv heads, positions] in float32 follow."""

    layer_count: int
    kv_head_count: int
    head_dim: int
    block_tokens: int
    dtype: DTypeName
    """Data type of weights and activations."""
    planes: int = 2
    """2: keys and values. 1: one vector per head and position is the key, and its first `value_dim`
    numbers are the value (multi-head latent attention)."""
    value_dim: int = 0
    """Width of the value; used with planes=1 only."""
    kv_dtype: KVDTypeName = "auto"
    """Data type of the stored KV. auto: the same as `dtype`."""

    @property
    def stored_dtype(self) -> DTypeName | QuantName:
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def is_quantized(self) -> bool:
        return self.kv_dtype != "auto"

    @property
    def vector_count(self) -> int:
        """Vectors of `head_dim` numbers in one block."""
        return self.planes * self.layer_count * self.kv_head_count * self.block_tokens

    @property
    def values_bytes(self) -> int:
        """Bytes of one block without the scales."""
        return self.vector_count * self.head_dim * STORED_BYTES[self.stored_dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.values_bytes + (self.vector_count * SCALE_BYTES if self.is_quantized else 0)

    def blocks_for(self, token_count: int) -> int:
        return blocks_for(token_count, self.block_tokens)


def blocks_for(token_count: int, block_tokens: int) -> int:
    """Return the blocks that hold `token_count` tokens; the last may be part filled."""
    return -(-token_count // block_tokens)


def fingerprint(*, model: str, weights_digest: str, geometry: KVGeometry, wire_version: int) -> str:
    """Return the fingerprint of a worker's KV. KV moves only between equal fingerprints.

    The text has 32 hex digits and is the same in every process for the same facts.
    """
    facts = {
        "model": model,
        "weights": weights_digest,
        "layout": KV_LAYOUT,
        "wire": wire_version,
        **msgspec.structs.asdict(geometry),
    }
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:32]
