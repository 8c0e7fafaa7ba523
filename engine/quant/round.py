"""Dense matrices to integers of 8 or 4 bits, or to fp8, when a model is loaded.

Rounding to nearest with the largest magnitude at the end of the range wastes levels on outliers. Here
a scale is chosen per row (8 bits) or per group (4 bits) by the squared error it causes: candidates
between the full range and a narrower one that clips, each followed by the least-squares scale for its
integers (the "MSE" observer of the PTQ literature, for example arXiv 2106.08295, section 3.1; the refit is
what llama.cpp's `make_qx_quants` does). The cost is some passes over the matrix, once.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.weights import DenseMatrix, Fp8Matrix, IntMatrix, to_dense

GROUP_SIZES = (128, 64, 32)
"""Group sizes of 4-bit weights, best first. The first that divides the row is used."""
_SHRINKS_8 = (1.0, 0.97, 0.94)
_SHRINKS_4 = (1.0, 0.96, 0.92, 0.88, 0.84, 0.80, 0.76, 0.72, 0.68)
_FP8_MAX = 448.0
"""Largest finite e4m3 value."""
_ZEROS_PAY = 0.9
"""Zero points are used where the squared error with them is at most this share of that without."""
_SAMPLE_ROWS = 64
_PIECE_VALUES = 1 << 20
"""Values worked on at once: what is needed beside the matrix and its integers stays small."""


def group_size_for(in_size: int) -> int:
    """Group size of 4-bit weights; 0 (the whole row) if no group size divides the row."""
    return next((size for size in GROUP_SIZES if in_size % size == 0), 0)


def round_int8(matrix: DenseMatrix) -> IntMatrix:
    """One symmetric scale per output channel."""
    return _round(matrix, bits=8, group_size=0, shrinks=_SHRINKS_8, asymmetric=False)


def round_w8a8(matrix: DenseMatrix) -> IntMatrix:
    """The same, for products that round their activations too."""
    return replace(round_int8(matrix), activation_bits=8)


def sample_rows(out_size: int) -> range:
    """Rows of a matrix that `pays_for_zeros` is asked about."""
    return range(0, out_size, max(1, out_size // _SAMPLE_ROWS))


def pays_for_zeros(sample: DenseMatrix, group_size: int) -> bool:
    """True if zero points lower the squared error of a sample of rows by enough to pay for reading them."""
    errors = [
        _squared_error(sample, round_int4(sample, group_size=group_size, asymmetric=asymmetric))
        for asymmetric in (False, True)
    ]
    return errors[1] < _ZEROS_PAY * errors[0]


def round_int4(
    matrix: DenseMatrix, *, group_size: int | None = None, asymmetric: bool | None = None
) -> IntMatrix:
    """A scale, and with `asymmetric` a zero point, per group of inputs. group_size: None for that of
    `group_size_for`, 0 for the whole row. asymmetric: None for what `pays_for_zeros` says."""
    if group_size is None:
        group_size = group_size_for(matrix.weight.shape[1])
    if asymmetric is None:
        rows = sample_rows(matrix.weight.shape[0])
        asymmetric = pays_for_zeros(DenseMatrix(matrix.weight[:: rows.step]), group_size)
    return _round(matrix, bits=4, group_size=group_size, shrinks=_SHRINKS_4, asymmetric=asymmetric)


def round_fp8(matrix: DenseMatrix) -> Fp8Matrix:
    """e4m3, one scale per output channel. Zero rows have scale 1."""
    weight = matrix.weight
    scales = weight.abs().amax(dim=1, keepdim=True).float() / _FP8_MAX
    scales[scales == 0] = 1.0
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    step = max(1, _PIECE_VALUES // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        scaled = (weight[rows].float() / scales[rows]).clamp(-_FP8_MAX, _FP8_MAX)
        values[rows] = scaled.to(torch.float8_e4m3fn)
    return Fp8Matrix(values, scales, bias=matrix.bias)


def _round(
    matrix: DenseMatrix, *, bits: int, group_size: int, shrinks: tuple[float, ...], asymmetric: bool
) -> IntMatrix:
    weight = matrix.weight
    out_size, in_size = weight.shape
    size = group_size or in_size
    groups = in_size // size
    values = torch.empty((out_size, in_size), dtype=torch.int8, device=weight.device)
    scales = torch.empty((out_size, groups), dtype=torch.float32, device=weight.device)
    zeros = torch.empty_like(scales) if asymmetric else None
    step = max(1, _PIECE_VALUES // in_size)
    for start in range(0, out_size, step):
        rows = slice(start, start + step)
        flat = weight[rows].float().reshape(-1, size)
        if zeros is None:
            integers, scale = _symmetric(flat, bits, shrinks)
        else:
            integers, scale, zero = _asymmetric(flat, bits, shrinks)
            zeros[rows] = zero.view(-1, groups)
        values[rows] = integers.to(torch.int8).view(-1, in_size)
        scales[rows] = scale.view(-1, groups)
    return IntMatrix(bits, values, scales, zeros, group_size, bias=matrix.bias)


def _symmetric(flat: Tensor, bits: int, shrinks: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """[n, size] -> integers as floats [n, size], scales [n, 1]. The range has one more level below
    zero: the scale takes the sign that puts the largest magnitude there."""
    low, high = -float(1 << (bits - 1)), float((1 << (bits - 1)) - 1)
    peak = flat.gather(1, flat.abs().argmax(dim=1, keepdim=True))
    full = peak / low
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for shrink in shrinks:
        scale = full * shrink
        integers = (flat / _nonzero(scale)).round_().clamp_(low, high)
        scale = _least_squares(flat, integers, scale)
        best = _better(best, flat, integers, scale, torch.zeros_like(scale))
    assert best is not None
    return best[0], best[1]


def _asymmetric(flat: Tensor, bits: int, shrinks: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """[n, size] -> integers as floats [n, size], scales and zeros [n, 1]. Zeros are whole numbers, which
    integer kernels want."""
    low, levels = -float(1 << (bits - 1)), float((1 << bits) - 1)
    least = flat.amin(dim=1, keepdim=True).clamp_(max=0.0)
    most = flat.amax(dim=1, keepdim=True).clamp_(min=0.0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    zero_of_best = torch.zeros_like(least)
    for shrink in shrinks:
        scale = (most - least) * (shrink / levels)
        zero = (low - least * shrink / _nonzero(scale)).round_()
        integers = (flat / _nonzero(scale)).add_(zero).round_().clamp_(low, low + levels)
        scale = _least_squares(flat, integers - zero, scale)
        before = best
        best = _better(best, flat, integers, scale, zero)
        is_new = best[2] < before[2] if before is not None else torch.ones_like(zero, dtype=torch.bool)
        zero_of_best = torch.where(is_new, zero, zero_of_best)
    assert best is not None
    return best[0], best[1], zero_of_best


def _least_squares(flat: Tensor, integers: Tensor, otherwise: Tensor) -> Tensor:
    """The scale that fits `integers` to `flat` best."""
    squares = (integers * integers).sum(dim=1, keepdim=True)
    products = (flat * integers).sum(dim=1, keepdim=True)
    fitted = products / squares.clamp(min=1.0)
    return torch.where((squares > 0) & (fitted != 0), fitted, otherwise)


def _better(
    best: tuple[Tensor, Tensor, Tensor] | None, flat: Tensor, integers: Tensor, scale: Tensor, zero: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(integers, scale, squared error) of whichever is nearer, row by row."""
    error = ((integers - zero) * scale - flat).square_().sum(dim=1, keepdim=True)
    if best is None:
        return integers, scale, error
    nearer = error < best[2]
    return (
        torch.where(nearer, integers, best[0]),
        torch.where(nearer, scale, best[1]),
        torch.where(nearer, error, best[2]),
    )


def _squared_error(matrix: DenseMatrix, rounded: IntMatrix) -> float:
    return float((to_dense(rounded, torch.float32).weight - matrix.weight.float()).square().sum())


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)
