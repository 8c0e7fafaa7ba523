"""Matrices as the products want them in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.kernels.weights import DenseMatrix, ExpertMatrices, Fp8Matrix, IntMatrix, Matrix

Kind = Literal["dense", "int8", "int4", "fp8"]
INT4_HALF_MAX = 64
"""Inputs whose low nibbles follow one another; the high nibbles of the same bytes are the next ones."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    kind: Kind
    out_size: int
    in_size: int
    values: Tensor
    """[..., out, bytes of a row] (dense: numbers), uint8 unless dense or int8; [...]: experts, if many.
    int4: byte j of every `half` bytes has input j in its low and input half + j in its high nibble, each
    plus 8."""
    scales: Tensor | None = None
    """[..., groups, out], float16 where that is exact, else float32."""
    zeros: Tensor | None = None
    """Zero points, in the shape of `scales`."""
    group: int = 0
    """Inputs that share a scale; 0: all of a row."""
    half: int = 0
    order: Tensor | None = None
    """int64 [in]: of the inputs; None: as they come."""
    bias: Tensor | None = None
    """[..., out]"""


def pack_matrix(matrix: Matrix, dtype: torch.dtype) -> PackedMatrix:
    """dtype: the model's, for what cannot be computed with as it is: groups whose size is no power of two
    or less than 16 are dequantised."""
    match matrix:
        case DenseMatrix():
            out_size, in_size = matrix.weight.shape
            return PackedMatrix("dense", out_size, in_size, matrix.weight.contiguous(), bias=matrix.bias)
        case IntMatrix():
            return _pack_int(matrix, dtype)
        case Fp8Matrix():
            return _pack_fp8(matrix, dtype)


def pack_expert_matrices(experts: ExpertMatrices, dtype: torch.dtype) -> tuple[PackedMatrix, PackedMatrix]:
    """(gate and up, down), each of all experts. Raises SetupError: experts are not alike."""
    return _stack(experts.gate_up, dtype), _stack(experts.down, dtype)


def dequantized(matrix: Matrix, dtype: torch.dtype) -> DenseMatrix:
    match matrix:
        case DenseMatrix():
            return matrix
        case IntMatrix():
            group = matrix.group_size or matrix.values.shape[1]
            numbers = matrix.values.float()
            if matrix.zeros is not None:
                numbers -= _spread(matrix.zeros, group, numbers.shape[1])
            numbers *= _spread(matrix.scales, group, numbers.shape[1])
            if matrix.order is not None:
                numbers = torch.empty_like(numbers).index_copy_(1, matrix.order, numbers)
        case Fp8Matrix():
            scales = matrix.scales
            if matrix.block:
                scales = scales.repeat_interleave(matrix.block, 0)[: matrix.values.shape[0]]
                scales = _spread(scales, matrix.block, matrix.values.shape[1])
            numbers = matrix.values.float() * scales
    return DenseMatrix(numbers.to(dtype), matrix.bias)


def _spread(per_group: Tensor, group: int, in_size: int) -> Tensor:
    return per_group.repeat_interleave(group, 1)[:, :in_size]


def _is_computable(group: int, in_size: int) -> bool:
    if group == 0 or group >= in_size:
        return True
    return group >= 16 and group & (group - 1) == 0


def _pack_int(matrix: IntMatrix, dtype: torch.dtype) -> PackedMatrix:
    out_size, in_size = matrix.values.shape
    if not _is_computable(matrix.group_size, in_size):
        return pack_matrix(dequantized(matrix, dtype), dtype)
    group = 0 if matrix.group_size >= in_size else matrix.group_size
    half = min(group or INT4_HALF_MAX, INT4_HALF_MAX) if matrix.bits == 4 else 0
    return PackedMatrix(
        "int4" if matrix.bits == 4 else "int8",
        out_size,
        in_size,
        pack_nibbles(matrix.values, half) if half else matrix.values.contiguous(),
        scales=_narrow(matrix.scales.T),
        zeros=None if matrix.zeros is None else _narrow(matrix.zeros.T),
        group=group,
        half=half,
        order=matrix.order,
        bias=matrix.bias,
    )


def _pack_fp8(matrix: Fp8Matrix, dtype: torch.dtype) -> PackedMatrix:
    out_size, in_size = matrix.values.shape
    group = 0 if matrix.block >= in_size else matrix.block
    if not _is_computable(group, in_size):
        return pack_matrix(dequantized(matrix, dtype), dtype)
    scales = matrix.scales
    if matrix.block:
        scales = scales.repeat_interleave(matrix.block, 0)[:out_size]
    scales = scales.expand(out_size, -1)
    values = matrix.values.view(torch.uint8).contiguous()
    return PackedMatrix(
        "fp8", out_size, in_size, values, scales=_narrow(scales.T), group=group, bias=matrix.bias
    )


def _stack(matrices: Sequence[Matrix], dtype: torch.dtype) -> PackedMatrix:
    if any(isinstance(matrix, IntMatrix) and matrix.order is not None for matrix in matrices):
        # Every expert orders its inputs differently, and they read one x.
        matrices = [dequantized(matrix, dtype) for matrix in matrices]
    parts = [pack_matrix(matrix, dtype) for matrix in matrices]
    first = parts[0]
    facts = {(part.kind, part.out_size, part.in_size, part.group, part.zeros is None) for part in parts}
    if len(facts) != 1 or len({part.bias is None for part in parts}) != 1:
        raise SetupError("the experts of one layer differ in shape or quantisation: quantise them alike")
    return PackedMatrix(
        first.kind,
        first.out_size,
        first.in_size,
        torch.stack([part.values for part in parts]),
        scales=_stacked([part.scales for part in parts]),
        zeros=_stacked([part.zeros for part in parts]),
        group=first.group,
        half=first.half,
        bias=_stacked([part.bias for part in parts]),
    )


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    # Whether float16 is exact was decided for each.
    dtype = torch.float32 if any(t.dtype == torch.float32 for t in present) else present[0].dtype
    return torch.stack([tensor.to(dtype) for tensor in present])


def pack_nibbles(values: Tensor, half: int) -> Tensor:
    """int8 [out, in] of -8 … 7 -> uint8 [out, ceil(in / 2 half) * half]."""
    padding = -values.shape[1] % (2 * half)
    nibbles = torch.nn.functional.pad((values + 8).to(torch.uint8), (0, padding))
    pairs = nibbles.view(len(values), -1, 2, half)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(len(values), -1).contiguous()


def _narrow(numbers: Tensor) -> Tensor:
    """Numbers as float16 if nothing is lost. Most checkpoints hold their scales so, and scales are read with
    every group of weights."""
    half = numbers.to(torch.float16)
    is_exact = bool(torch.equal(half.float(), numbers.float()))
    return (half if is_exact else numbers.float()).contiguous()
