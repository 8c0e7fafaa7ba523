"""The pool's vectors as rows that torch reads and writes by index, quantised or not.

Position row r of a plane is `(block * layers * planes * K + head) * P + offset` away from the plane's
first; block row r is the P of them from `r * P` on. The same indices serve all layers and planes.
"""

from typing import Protocol

import torch
from torch import Tensor

from baton.core.geometry import KVGeometry, QuantName
from engine.devices import TORCH_DTYPES
from engine.kv.pool import KVPool

_LARGEST: dict[QuantName, float] = {"int8": 127.0, "fp8": 448.0}


class KVRows(Protocol):
    def write(self, layer: int, plane: int, rows: Tensor, vectors: Tensor) -> None:
        """rows int64 [n] of position rows, vectors [n, D] in the model's dtype."""
        ...

    def gather(self, layer: int, plane: int, rows: Tensor) -> Tensor:
        """rows int64 [n] of block rows -> [n, P * D] in the model's dtype, valid until the next gather of
        the same plane."""
        ...


def kv_rows(pool: KVPool) -> KVRows:
    return QuantizedRows(pool) if pool.geometry.is_quantized else DenseRows(pool)


class DenseRows:
    def __init__(self, pool: KVPool) -> None:
        geometry = pool.geometry
        self._heads, self._planes = geometry.kv_head_count, geometry.planes
        self._positions = geometry.block_tokens
        self._position_rows = pool.blocks.view(-1, geometry.head_dim)
        self._block_rows = pool.blocks.view(-1, geometry.block_tokens * geometry.head_dim)
        # Kept from call to call: fresh memory of this size costs more in page faults than the copy.
        self._gathered = self._block_rows.new_empty((self._planes, 0, self._block_rows.shape[1]))

    def write(self, layer: int, plane: int, rows: Tensor, vectors: Tensor) -> None:
        first = (self._planes * layer + plane) * self._heads * self._positions
        self._position_rows[first:].index_copy_(0, rows, vectors)

    def gather(self, layer: int, plane: int, rows: Tensor) -> Tensor:
        if self._gathered.shape[1] < len(rows):
            self._gathered = self._block_rows.new_empty((self._planes, len(rows), self._block_rows.shape[1]))
        out = self._gathered[plane, : len(rows)]
        first = (self._planes * layer + plane) * self._heads
        return torch.index_select(self._block_rows[first:], 0, rows, out=out)


class QuantizedRows:
    """Rounded when they are written, multiplied with their scales when they are gathered."""

    def __init__(self, pool: KVPool) -> None:
        geometry = pool.geometry
        assert pool.scales is not None
        assert geometry.kv_dtype != "auto"
        self._kind: QuantName = geometry.kv_dtype
        self._dtype = TORCH_DTYPES[geometry.dtype]
        self._geometry: KVGeometry = geometry
        self._heads, self._planes = geometry.kv_head_count, geometry.planes
        self._per_block = geometry.layer_count * geometry.planes * geometry.kv_head_count
        shape = (self._per_block, geometry.block_tokens)
        # Seen as bytes: torch has no indexed writes for fp8.
        self._values = pool.blocks.view(torch.uint8).flatten(1, 3).unflatten(1, (shape[0],))
        self._scales = pool.scales.flatten(1, 3)
        self._value_dtype = pool.blocks.dtype

    def write(self, layer: int, plane: int, rows: Tensor, vectors: Tensor) -> None:
        positions = self._geometry.block_tokens
        head_rows, offsets = rows // positions, rows % positions
        blocks, heads = self._place(layer, plane, head_rows)
        values, scales = quantize(vectors, self._kind)
        self._values[blocks, heads, offsets] = values.view(torch.uint8)
        self._scales[blocks, heads, offsets] = scales

    def gather(self, layer: int, plane: int, rows: Tensor) -> Tensor:
        blocks, heads = self._place(layer, plane, rows)
        values = self._values[blocks, heads].view(self._value_dtype).float()
        return (values * self._scales[blocks, heads][..., None]).to(self._dtype).flatten(1)

    def _place(self, layer: int, plane: int, head_rows: Tensor) -> tuple[Tensor, Tensor]:
        heads = head_rows % self._per_block + (self._planes * layer + plane) * self._heads
        return head_rows // self._per_block, heads


def quantize(vectors: Tensor, kind: QuantName) -> tuple[Tensor, Tensor]:
    """vectors [..., D] -> values [..., D] in `kind`, scales float32 [...]. Symmetric; the largest magnitude
    becomes 127, or e4m3's 448; rounded to nearest, ties to even."""
    wide = vectors.float()
    scales = wide.abs().amax(-1) / _LARGEST[kind]
    steps = wide / torch.where(scales > 0, scales, 1.0)[..., None]
    if kind == "int8":
        return steps.round().to(torch.int8), scales
    return steps.to(torch.float8_e4m3fn), scales
