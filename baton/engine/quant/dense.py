"""Quantised matrices back to dense ones: the definition that every kernel is tested against."""

import torch
from torch import Tensor

from baton.engine.kernels.weights import DenseMatrix, Fp8Matrix, IntMatrix, Matrix


def to_dense(matrix: Matrix, dtype: torch.dtype) -> DenseMatrix:
    """Computed in float32, rounded once to `dtype`. A dense matrix is converted."""
    match matrix:
        case DenseMatrix(weight, bias):
            return DenseMatrix(weight.to(dtype), None if bias is None else bias.to(dtype))
        case IntMatrix():
            weight = _int_weight(matrix, dtype)
        case Fp8Matrix():
            weight = _fp8_weight(matrix, dtype)
    return DenseMatrix(weight, None if matrix.bias is None else matrix.bias.to(dtype))


def _int_weight(matrix: IntMatrix, dtype: torch.dtype) -> Tensor:
    out_size, in_size = matrix.values.shape
    groups = matrix.scales.shape[1]
    numbers = matrix.values.float().view(out_size, groups, in_size // groups)
    if matrix.zeros is not None:
        numbers = numbers - matrix.zeros.float()[:, :, None]
    weight = (numbers * matrix.scales[:, :, None]).view(out_size, in_size)
    if matrix.order is not None:
        placed = torch.empty_like(weight)
        placed[:, matrix.order] = weight
        weight = placed
    return weight.to(dtype)


def _fp8_weight(matrix: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    scales = matrix.scales.float()
    if matrix.block:
        out_size, in_size = matrix.values.shape
        scales = scales.repeat_interleave(matrix.block, 0)[:out_size]
        scales = scales.repeat_interleave(matrix.block, 1)[:, :in_size]
    return (matrix.values.float() * scales).to(dtype)
