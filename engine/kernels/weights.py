"""Matrices as loaders hand them to the kernels, before packing.

Every matrix maps `in_size` numbers to `out_size`: y = x @ W.T + bias. The rows of several matrices that
read the same input (q, k, v; gate, up) are put together by the loader into one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


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
    activation_bits: int = 0
    """8: its products round the activations too, row by row, to 8 bits (W8A8), by kernels that can; 0: they
    are taken as they are."""


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
    """One matrix per expert, [2 I, hidden]: rows of gate, then rows of up."""
    down: tuple[Matrix, ...]
    """One matrix per expert, [hidden, I]."""


def to_dense(matrix: Matrix, dtype: torch.dtype) -> DenseMatrix:
    """The dense matrix that a stored one stands for, computed in float32 and rounded once to `dtype`."""
    match matrix:
        case DenseMatrix():
            weight = matrix.weight.to(dtype)
        case IntMatrix():
            weight = _int_weight(matrix).to(dtype)
        case Fp8Matrix():
            weight = _fp8_weight(matrix).to(dtype)
    return DenseMatrix(weight, None if matrix.bias is None else matrix.bias.to(dtype))


def _int_weight(matrix: IntMatrix) -> Tensor:
    out_size, in_size = matrix.values.shape
    groups = matrix.scales.shape[1]
    numbers = matrix.values.float().view(out_size, groups, in_size // groups)
    if matrix.zeros is not None:
        numbers = numbers - matrix.zeros.float()[:, :, None]
    weight = (numbers * matrix.scales[:, :, None]).view(out_size, in_size)
    if matrix.order is None:
        return weight
    placed = torch.empty_like(weight)
    placed[:, matrix.order] = weight
    return placed


def _fp8_weight(matrix: Fp8Matrix) -> Tensor:
    scales = matrix.scales.float()
    if matrix.block:
        out_size, in_size = matrix.values.shape
        scales = scales.repeat_interleave(matrix.block, 0)[:out_size]
        scales = scales.repeat_interleave(matrix.block, 1)[:, :in_size]
    return matrix.values.float() * scales


def select_rows(matrix: Matrix, rows: Tensor, dtype: torch.dtype) -> Matrix:
    """The matrix whose row i is row rows[i]; dense in `dtype` where the format does not allow it."""
    bias = None if matrix.bias is None else matrix.bias[rows]
    match matrix:
        case DenseMatrix():
            return DenseMatrix(matrix.weight[rows], bias)
        case IntMatrix():
            zeros = None if matrix.zeros is None else matrix.zeros[rows]
            values, scales = matrix.values[rows], matrix.scales[rows]
            return replace(matrix, values=values, scales=scales, zeros=zeros, bias=bias)
        case Fp8Matrix():
            return DenseMatrix(to_dense(matrix, dtype).weight[rows], bias)


def cut_columns(matrix: Matrix, columns: range) -> Matrix:
    """The matrix of some of the inputs. Groups that the cut goes through become smaller ones of the same
    scale."""
    part = slice(columns.start, columns.stop)
    match matrix:
        case DenseMatrix():
            return DenseMatrix(matrix.weight[:, part].contiguous(), matrix.bias)
        case IntMatrix():
            assert matrix.order is None, "inputs in an order of their own"
            old = matrix.group_size or matrix.values.shape[1]
            is_within_one = columns.start // old == (columns.stop - 1) // old
            new = old if is_within_one else math.gcd(old, columns.start, columns.stop)
            groups = slice(columns.start // new, -(-columns.stop // new))

            def regrouped(values: Tensor) -> Tensor:
                return values.repeat_interleave(old // new, dim=1)[:, groups].contiguous()

            return IntMatrix(
                bits=matrix.bits,
                values=matrix.values[:, part].contiguous(),
                scales=regrouped(matrix.scales),
                zeros=None if matrix.zeros is None else regrouped(matrix.zeros),
                group_size=0 if is_within_one else new,
                bias=matrix.bias,
                activation_bits=matrix.activation_bits,
            )
        case Fp8Matrix():
            assert not matrix.block, "scales in blocks"
            return Fp8Matrix(matrix.values[:, part].contiguous(), matrix.scales, 0, matrix.bias)


def join_rows(matrices: Sequence[Matrix], dtype: torch.dtype | None = None) -> Matrix:
    """One matrix whose rows are those of all, in order; they have the same inputs.

    Integers of different bits or groups are kept in the larger and the finer of the two; activations are
    rounded if all of them round theirs. Matrices that
    cannot be put together (another kind or order) become one dense matrix of `dtype` (None: that of the
    first dense one, else bfloat16).
    """
    first, *others = matrices
    if not others:
        return first
    biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
    assert len(biases) in (0, len(matrices)), "all have a bias or none"
    bias = torch.cat(biases) if biases else None
    ints = [matrix for matrix in matrices if isinstance(matrix, IntMatrix)]
    if len(ints) == len(matrices) and all(_same_order(ints[0], other) for other in ints[1:]):
        return _join_ints(ints, bias)
    fp8s = [matrix for matrix in matrices if isinstance(matrix, Fp8Matrix)]
    if len(fp8s) == len(matrices) and all(_blocks_line_up(fp8s[0], other) for other in fp8s):
        return _join_fp8s(fp8s, bias)
    dtypes = [matrix.weight.dtype for matrix in matrices if isinstance(matrix, DenseMatrix)]
    common = dtype or (dtypes[0] if dtypes else torch.bfloat16)
    return DenseMatrix(torch.cat([to_dense(matrix, common).weight for matrix in matrices]), bias)


def _same_order(one: IntMatrix, other: IntMatrix) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _join_ints(matrices: Sequence[IntMatrix], bias: Tensor | None) -> IntMatrix:
    in_size = matrices[0].values.shape[1]
    group_size = math.gcd(*(matrix.group_size or in_size for matrix in matrices))
    groups = in_size // group_size
    has_zeros = any(matrix.zeros is not None for matrix in matrices)
    zeros = (
        [torch.zeros_like(m.scales) if m.zeros is None else m.zeros for m in matrices] if has_zeros else []
    )
    return IntMatrix(
        bits=max(matrix.bits for matrix in matrices),
        values=torch.cat([matrix.values for matrix in matrices]),
        scales=_regrouped([matrix.scales for matrix in matrices], groups),
        zeros=_regrouped(zeros, groups) if zeros else None,
        group_size=0 if groups == 1 else group_size,
        order=matrices[0].order,
        bias=bias,
        activation_bits=min(matrix.activation_bits for matrix in matrices),
    )


def _regrouped(per_group: Sequence[Tensor], groups: int) -> Tensor:
    """Each [rows, fewer groups] -> all rows, [rows, groups]"""
    return torch.cat([values.repeat_interleave(groups // values.shape[1], dim=1) for values in per_group])


def _blocks_line_up(one: Fp8Matrix, other: Fp8Matrix) -> bool:
    return one.block == other.block and (not one.block or other.values.shape[0] % one.block == 0)


def _join_fp8s(matrices: Sequence[Fp8Matrix], bias: Tensor | None) -> Fp8Matrix:
    values = torch.cat([matrix.values for matrix in matrices])
    block = matrices[0].block
    scales = [m.scales if block else m.scales.expand(m.values.shape[0], 1) for m in matrices]
    return Fp8Matrix(values, torch.cat(scales), block, bias)
