"""Matrices as loaders hand them to the kernels, before packing.

Every matrix maps `in_size` numbers to `out_size`: y = x @ W.T + bias. The rows of several matrices that
read the same input (q, k, v; gate, up) are put together by the loader into one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    weight: Tensor
    """[out, in], float32, bfloat16 or float16."""
    bias: Tensor | None = None
    """[out]"""


@dataclass(frozen=True, slots=True)
class IntMatrix:
    """W[o, i] = scales[o, g] * (values[o, i] - zeros[o, g]) with g = i // group_size."""

    bits: int
    """4 or 8."""
    values: Tensor
    """int8 [out, in]: -128 … 127 for 8 bits, -8 … 7 for 4 bits (one per byte here; kernels pack them)."""
    scales: Tensor
    """float32 [out, groups]"""
    zeros: Tensor | None = None
    """float32 [out, groups]; None: symmetric."""
    group_size: int = 0
    """0: one group, the whole row."""
    order: Tensor | None = None
    """int64 [in]: column i of `values` belongs to input order[i] (GPTQ's act-order)."""
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """W = values * scales, e4m3."""

    values: Tensor
    """float8_e4m3fn [out, in]"""
    scales: Tensor
    """float32 [out or 1, 1], or [ceil(out / b), ceil(in / b)] in blocks of b = `block`."""
    block: int = 0
    """0: per row or per tensor."""
    bias: Tensor | None = None


Matrix = DenseMatrix | IntMatrix | Fp8Matrix


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One layer's routed experts; each is a gated MLP."""

    gate_up: tuple[Matrix, ...]
    """Per expert, [2 I, hidden]: rows of gate, then of up."""
    down: tuple[Matrix, ...]
    """Per expert, [hidden, I]."""


def join_rows(matrices: Sequence[Matrix]) -> Matrix:
    """One matrix whose rows are those of all, in order. They are of one kind and have the same inputs."""
    first, *others = matrices
    if not others:
        return first
    dense = [matrix for matrix in matrices if isinstance(matrix, DenseMatrix)]
    if len(dense) < len(matrices):
        raise SetupError("quantised matrices cannot be put together")
    biases = [matrix.bias for matrix in dense if matrix.bias is not None]
    assert len(biases) in (0, len(dense)), "all have a bias or none"
    return DenseMatrix(torch.cat([matrix.weight for matrix in dense]), torch.cat(biases) if biases else None)
