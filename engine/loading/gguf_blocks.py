"""ggml's blocks as integer matrices, exactly, where a block is integers with scales; dense otherwise.

Layouts: ggml's ggml-common.h and ggml-quants.c. R rows of n blocks; a row's blocks lie one after another.
Blocks of the K types hold 256 values in groups that have integer scales of their own.
"""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.weights import DenseMatrix, IntMatrix, Matrix

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_GROUPS = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16}
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4}
"""Others need 8."""
_ROWS_AT_ONCE = 1024


def is_exact(kind: str) -> bool:
    """Its blocks are integers with scales, so `blocks_to_matrix` keeps them as they are."""
    return kind in _GROUPS


def blocks_to_matrix(rows: Bytes, kind: str, dtype: torch.dtype) -> Matrix:
    """rows: uint8 [R, bytes of a row] of a type that is no float's. dtype: of a dense result."""
    if not is_exact(kind):
        return DenseMatrix(dequantize(rows, kind, dtype))
    pieces = [_integers(rows[i : i + _ROWS_AT_ONCE], kind) for i in range(0, len(rows), _ROWS_AT_ONCE)]
    zeros = [zero for _, _, zero in pieces if zero is not None]
    return IntMatrix(
        bits=_BITS.get(kind, 8),
        values=torch.cat([values for values, _, _ in pieces]),
        scales=torch.cat([scales for _, scales, _ in pieces]),
        zeros=torch.cat(zeros) if zeros else None,
        group_size=_GROUPS[kind],
    )


def dequantize(rows: Bytes, kind: str, dtype: torch.dtype) -> Tensor:
    """[R, n]. The numbers are those of gguf.dequantize, which takes sixteen rows at a time, and several times
    as long for a large vocabulary."""
    starts = range(0, len(rows), _ROWS_AT_ONCE)
    return torch.cat([_floats(rows[i : i + _ROWS_AT_ONCE], kind).to(dtype) for i in starts])


def _floats(rows: Bytes, kind: str) -> Tensor:
    """float32 [R, n]"""
    if not is_exact(kind):
        return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    values, scales, lows = _stored(rows, kind)
    floats = values.view(*scales.shape, -1).to(torch.float32).mul_(scales[..., None])
    return (floats if lows is None else floats.add_(lows[..., None])).view(len(rows), -1)


def _integers(rows: Bytes, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values int8 [R, n], scales and zeros float32 [R, groups]."""
    values, scales, lows = _stored(rows, kind)
    if lows is None:
        return values.to(torch.int8), scales, None
    return _with_zeros(values, scales, lows, bits=_BITS.get(kind, 8))


def _stored(rows: Bytes, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values [R, n], and scales and lowest values float32 [R, groups]: a number is scale * value + low."""
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = rows.reshape(-1, block_bytes)
    match kind:
        case "Q8_0":
            values, scales, lows = blocks[:, 2:].view(np.int8), _halves(blocks, 0), None
        case "Q4_0" | "Q5_0":
            unsigned, middle = (_nibbles(blocks[:, 2:]), 8) if kind == "Q4_0" else (_fives(blocks[:, 2:]), 16)
            values, scales, lows = unsigned.astype(np.int8) - np.int8(middle), _halves(blocks, 0), None
        case "Q4_1" | "Q5_1":
            values = _nibbles(blocks[:, 4:]) if kind == "Q4_1" else _fives(blocks[:, 4:])
            scales, lows = _halves(blocks, 0), _halves(blocks, 2)
        case "Q4_K" | "Q5_K":
            values = _k_values(blocks, has_fifth_bit=kind == "Q5_K")
            scales, lows = _k_scales(blocks)
        case _:
            values, scales, lows = *_sixes(blocks), None

    def by_row(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(len(rows), -1))

    return by_row(values), by_row(scales), None if lows is None else by_row(lows)


def _with_zeros(
    unsigned: Tensor, scales: Tensor, lows: Tensor, *, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """scale * value + low as scale * (value - zero). Groups of scale 0 are constant: one step from zero."""
    middle = 8 if bits == 4 else 0
    is_flat = scales == 0
    zeros = -lows / torch.where(is_flat, torch.ones_like(scales), scales) - middle
    group = unsigned.shape[1] // scales.shape[1]
    values = unsigned.to(torch.int8).sub_(middle)
    if not is_flat.any():
        return values, scales, zeros
    values.masked_fill_(is_flat.repeat_interleave(group, dim=1), 0)
    return values, torch.where(is_flat, lows, scales), torch.where(is_flat, -torch.ones_like(zeros), zeros)


def _halves(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, 16] -> [blocks, 32]: all low halves, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _fives(packed: Bytes) -> Bytes:
    """[blocks, 4 + 16] -> [blocks, 32]: the fifth bits, then nibbles."""
    fifth = np.unpackbits(np.ascontiguousarray(packed[:, :4]), axis=1, bitorder="little")
    return _nibbles(packed[:, 4:]) | fifth << np.uint8(4)


def _k_values(blocks: Bytes, *, has_fifth_bit: bool) -> Bytes:
    """[blocks, 256]. Each 32 bytes hold two groups, in low and high halves; a byte of fifth bits holds
    those of one place in all eight groups."""
    nibbles_at = 48 if has_fifth_bit else 16
    packed = blocks[:, nibbles_at:].reshape(-1, 4, 1, 32)
    values: Bytes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=2).reshape(-1, 8, 32)
    if has_fifth_bit:
        shifts = np.arange(8, dtype=np.uint8)[None, :, None]
        values = values | (blocks[:, None, 16:48] >> shifts & np.uint8(1)) << np.uint8(4)
    return values.reshape(-1, 256)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """[blocks, 8] of scales and of lowest values: 6-bit integers in 12 bytes, times a float16 each."""
    first, second, rest = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 2 & 48)], axis=1)
    lows = np.concatenate([second & 63, (rest >> 4) | (second >> 2 & 48)], axis=1)
    return _halves(blocks, 0) * scales, -(_halves(blocks, 2) * lows)


def _sixes(blocks: Bytes) -> tuple[npt.NDArray[np.int8], Floats]:
    """Values [blocks, 256] and scales [blocks, 16] of Q6_K: 128 bytes of low halves, 64 of two upper bits,
    16 scales, a float16. Each half of the block is four groups of 32 over the same bytes."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None] & 3
    values = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return values.reshape(-1, 256), _halves(blocks, 208) * scales
