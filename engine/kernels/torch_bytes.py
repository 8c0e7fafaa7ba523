"""Products of rounded activations with weights of 8 bits (W8A8), in plain torch.

Every row is rounded by itself: scale = largest magnitude / 127, whole numbers to the nearest, halves to even.
Sums of integers are exact, and the scales are applied in an order that is the same everywhere, so that the
native kernels give the same bits (vLLM's `dynamic_scaled_int8_quant` rounds the same way).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.weights import IntMatrix

ROUNDED_MAX = 127.0
ZERO_BELOW = 1e-30
"""A row of smaller magnitudes counts as zeros: 127 divided by them would not be finite."""


@dataclass(frozen=True, slots=True)
class ByteMatrix:
    """A matrix whose products round their activations."""

    values: Tensor
    """int8 [in, out], in the order of the groups"""
    scales: Tensor
    """float32 [groups, out]"""
    zeros: Tensor | None
    """float32 [groups, out]"""
    order: Tensor | None
    bias: Tensor | None


def byte_matrix(matrix: IntMatrix) -> ByteMatrix:
    return ByteMatrix(
        values=matrix.values.T.contiguous(),
        scales=matrix.scales.float().T.contiguous(),
        zeros=None if matrix.zeros is None else matrix.zeros.float().T.contiguous(),
        order=matrix.order,
        bias=matrix.bias,
    )


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in] -> int8 [rows, in], scales float32 [rows, 1]."""
    wide = x.float()
    most = wide.abs().amax(dim=1, keepdim=True)
    is_zero = most < ZERO_BELOW
    full = torch.full_like(most, ROUNDED_MAX)  # a number divided by a tensor would be rounded twice
    inverse = torch.where(is_zero, 0.0, full / most)
    scales = torch.where(is_zero, 0.0, most / full)
    return (wide * inverse).round().to(torch.int8), scales


def byte_product(x: Tensor, matrix: ByteMatrix) -> Tensor:
    """float32 [rows, out]: x @ W.T + bias with x rounded."""
    ordered = x if matrix.order is None else x[:, matrix.order]
    rounded, row_scales = round_rows(ordered)
    groups = matrix.scales.shape[0]
    total: Tensor | None = None
    for inputs, weights, g in zip(
        rounded.chunk(groups, dim=1), matrix.values.chunk(groups, dim=0), range(groups), strict=True
    ):
        # Float64 holds every sum of these integers exactly.
        value = (inputs.double() @ weights.double()).float()
        if matrix.zeros is not None:
            value = value - matrix.zeros[g] * inputs.sum(dim=1, keepdim=True, dtype=torch.int32).float()
        value = matrix.scales[g] * value
        total = value if total is None else total + value
    assert total is not None
    total = row_scales * total
    return total if matrix.bias is None else total + matrix.bias.float()
