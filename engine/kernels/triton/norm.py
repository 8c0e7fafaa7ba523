"""Root mean square norm over the last dimension, with or without a residual: a row is read once."""
# Triton's language is typed by its compiler: pyright knows neither its values nor its constants.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# ruff: noqa: ANN001

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, row_count, inner_count, outer_stride, inner_stride,
    residual_stride, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows of x [outer, inner, SIZE], strided; out and sum are contiguous.

    HAS_RESIDUAL: what is normed is x + residual, rounded to sum's dtype and stored there.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < row_count)[:, None] & (column < SIZE)[None, :]
    start = (row // inner_count) * outer_stride + (row % inner_count) * inner_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        pointers = residual_ptr + row[:, None] * residual_stride + column[None, :]
        x += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row[:, None] * SIZE + column[None, :], rounded, mask=mask)
        x = rounded.to(tl.float32)
    mean = tl.sum(x * x, 1) / SIZE
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(mean + eps)[:, None] * weight[None, :]
    tl.store(out_ptr + row[:, None] * SIZE + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
