"""Products with packed weights: one matrix, or the experts of a mixture, whose tokens are grouped.

Output features are the tile's rows and tokens its columns. So weights are the first operand, which may come
out of registers, where they are dequantised; and few tokens make narrow tiles rather than padded ones.
"""
# Triton's language is typed by its compiler: pyright knows neither its values nor its constants.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# ruff: noqa: ANN001, SIM108

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.kernels.triton.gated import activate
from engine.kernels.triton.quantize import E4M3_DECODE_SCALE, e4m3_decode

DENSE, INT8, INT4, FP8 = range(4)
"""`ProductConstants.kind`."""


@dataclass(frozen=True, slots=True)
class ProductConstants:
    kind: int
    group: int
    """Inputs that share a scale; 0: the whole row, and the scale is applied at the end."""
    has_zeros: bool
    scales_weights: bool
    """group > 0: scale weights before the product (many tokens) rather than sums after it (few)."""
    is_grouped: bool
    """Tokens come by expert, see `experts`."""
    activation: int
    """-1: none; else of `gated`: features f and f + `features` are gate and up."""
    has_bias: bool
    has_residual: bool
    has_row_weights: bool
    is_split: bool
    """Partial sums over a part of the inputs are written, in fp32, for `add_splits`."""
    is_even: bool
    """The inputs are a whole number of steps."""
    block_t: int
    block_f: int
    nibble_offset: float
    """INT4: what `nibbles_plus` adds, and 8, for values are stored as 0 … 15."""
    block_k: int
    """Inputs per step; of INT4 half of them, and the other half lies in the same bytes."""
    halves: int
    """2 of INT4, else 1."""
    dot: tl.dtype
    native_fp8: bool
    precision: str


@triton.jit
def nibbles_plus(bits, s: tl.constexpr) -> tl.tensor:
    """0 … 15 (int16) -> the number, plus 128 in bfloat16 (or 1024 in float16): set as mantissa bits of a
    float whose unit is 1, which takes no conversion instruction."""
    if s.dot == tl.bfloat16:
        y = (bits | 0x4300).to(tl.bfloat16, bitcast=True)
    elif s.dot == tl.float16:
        y = (bits | 0x6400).to(tl.float16, bitcast=True)
    else:
        y = bits.to(s.dot)
    return y


@triton.jit
def _weights(raw, high: tl.constexpr, s: tl.constexpr) -> tl.tensor:
    """Loaded bytes -> numbers, up to zero and scale. high: of INT4, the upper half."""
    if s.kind == 2:
        wide = raw.to(tl.int16)
        bits = (wide >> 4) & 0xF if high else wide & 0xF
        y = nibbles_plus(bits, s) - s.nibble_offset
    elif s.kind == 3:
        if s.native_fp8:
            y = raw.to(tl.float8e4nv, bitcast=True).to(s.dot)
        else:
            y = e4m3_decode(raw, s.dot)
    else:
        y = raw.to(s.dot)
    return y.to(s.dot)


@triton.jit
def _scales_at(side, row, step_start, live, s: tl.constexpr) -> tuple:
    """Scale and zero of each feature for inputs from step_start on, fp32 [block_f]."""
    scales_ptr, zeros_ptr, scale_stride, depth = side
    # The last step may reach beyond the inputs (where x is zeros), and so beyond the scales.
    live = live & (row * 0 + step_start < depth)
    at = row
    if s.group:
        at = row + (step_start // s.group) * scale_stride
    scale = tl.load(scales_ptr + at, mask=live, other=0.0).to(tl.float32)
    if s.kind == 3 and not s.native_fp8:
        scale *= E4M3_DECODE_SCALE
    zero = scale
    if s.has_zeros:
        zero = tl.load(zeros_ptr + at, mask=live, other=0.0).to(tl.float32)
    return scale, zero


@triton.jit
def _half_step(acc, raw, row, live, x, start, side, high: tl.constexpr, s: tl.constexpr) -> tl.tensor:
    """acc [block_f, block_t] += weights [block_f, block_k] of inputs start … @ x [block_t, block_k].T"""
    w = _weights(raw, high, s)
    scale, zero = 1.0, 0.0
    if s.group or s.has_zeros:
        scale, zero = _scales_at(side, row, start, live, s)
    if s.has_zeros:
        w = (w.to(tl.float32) - zero[:, None]).to(s.dot)
    if s.group and s.scales_weights:
        w = (w.to(tl.float32) * scale[:, None]).to(s.dot)
    if s.group and not s.scales_weights:
        acc += tl.dot(w, tl.trans(x), input_precision=s.precision) * scale[:, None]
    else:
        acc = tl.dot(w, tl.trans(x), acc=acc, input_precision=s.precision)
    return acc


@triton.jit
def _inputs(x_rows, x_live, at, depth, s: tl.constexpr) -> tl.tensor:
    """[block_t, block_k]"""
    mask = x_live[:, None]
    if not s.is_even:
        mask = mask & (at < depth)[None, :]
    return tl.load(x_rows[:, None] + at[None, :], mask=mask, other=0.0).to(s.dot)


@triton.jit
def _tile(
    x_rows, x_live, w_ptr, up_offset, row, live, side, begin, end, depth, w_stride, s: tl.constexpr
) -> tuple:
    """Sums over inputs begin … end - 1: of features `row`, and of those `up_offset` further."""
    acc = tl.full([s.block_f, s.block_t], 0, tl.float32)
    up = tl.full([s.block_f, s.block_t], 0, tl.float32)
    lane = tl.arange(0, s.block_k)
    w_rows = w_ptr + row.to(tl.int64) * w_stride
    up_rows = w_rows + tl.cast(up_offset, tl.int64) * w_stride
    for start in tl.range(begin, end, s.block_k * s.halves):
        byte = start // s.halves + lane
        mask = live[:, None]
        if not s.is_even:
            mask = mask & (byte < w_stride)[None, :]
        raw = tl.load(w_rows[:, None] + byte[None, :], mask=mask, other=0)
        if s.activation >= 0:
            raw_up = tl.load(up_rows[:, None] + byte[None, :], mask=mask, other=0)
        x = _inputs(x_rows, x_live, start + lane, depth, s)
        acc = _half_step(acc, raw, row, live, x, start, side, False, s)
        if s.activation >= 0:
            up = _half_step(up, raw_up, row + up_offset, live, x, start, side, False, s)
        if s.halves == 2:
            second = start + s.block_k
            x = _inputs(x_rows, x_live, second + lane, depth, s)
            acc = _half_step(acc, raw, row, live, x, second, side, True, s)
            if s.activation >= 0:
                up = _half_step(up, raw_up, row + up_offset, live, x, second, side, True, s)
    if s.kind != 0 and s.group == 0:
        scale, _ = _scales_at(side, row, 0, live, s)
        acc *= scale[:, None]
        if s.activation >= 0:
            up_scale, _ = _scales_at(side, row + up_offset, 0, live, s)
            up *= up_scale[:, None]
    return acc, up


@triton.jit
def _finished(acc, up, bias_ptr, row, live, up_offset, s: tl.constexpr) -> tl.tensor:
    if s.has_bias:
        acc += tl.load(bias_ptr + row, mask=live, other=0.0).to(tl.float32)[:, None]
    if s.activation >= 0:
        if s.has_bias:
            up += tl.load(bias_ptr + row + up_offset, mask=live, other=0.0).to(tl.float32)[:, None]
        acc = activate(acc, up, s.activation)
    return acc


@triton.jit
def _place(tokens, features, s: tl.constexpr) -> tuple:
    """(tile of tokens, tile of features) of this program. Neighbours share 8 tiles of tokens, so that
    what they read stays in the L2 cache."""
    f_tiles = tl.cdiv(features, s.block_f)
    pid = tl.program_id(0)
    if s.is_grouped:
        return pid // f_tiles, pid % f_tiles
    t_tiles = tl.cdiv(tokens, s.block_t)
    first = pid // (8 * f_tiles) * 8
    size = tl.minimum(t_tiles - first, 8)
    inside = pid % (8 * f_tiles)
    return first + inside % size, inside // size


@triton.jit
def product(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, row_ids_ptr, tile_experts_ptr,
    row_weights_ptr, tokens, features, depth, x_stride, w_stride, scale_stride, out_stride, residual_stride,
    expert_w_stride, expert_scale_stride, expert_bias_stride, rows_per_x, split_depth, s: tl.constexpr,
) -> None:  # fmt: skip
    """out[t, f] = sum over i of W[f, i] x[t, i], and what `s` adds.

    Grouped: column c of tile j is row row_ids[j * block_t + c] of out (`tokens` or more: none), computed
    from row id // rows_per_x of x with the matrices of expert tile_experts[j] (-1: no tile).
    Split: program_id(1) sums inputs from split_depth * id on, into out [splits, tokens, features].
    """
    tile, f_tile = _place(tokens, features, s)
    column = tile * s.block_t + tl.arange(0, s.block_t)
    f = f_tile * s.block_f + tl.arange(0, s.block_f)
    live = f < features
    up_offset = 0
    if s.activation >= 0:
        up_offset = features
    x_row = column
    if s.is_grouped:
        expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
        if expert < 0:
            return
        column = tl.load(row_ids_ptr + column)
        x_row = column // rows_per_x
        w_ptr += expert * expert_w_stride
        scales_ptr += expert * expert_scale_stride
        zeros_ptr += expert * expert_scale_stride
        bias_ptr += expert * expert_bias_stride
    used = column < tokens
    begin, end = 0, depth
    if s.is_split:
        begin = tl.program_id(1) * split_depth
        end = tl.minimum(begin + split_depth, depth)
        out_ptr += tl.program_id(1).to(tl.int64) * tokens * out_stride
    x_rows = x_ptr + x_row.to(tl.int64) * x_stride
    side = (scales_ptr, zeros_ptr, scale_stride, depth)
    acc, up = _tile(x_rows, used, w_ptr, up_offset, f, live, side, begin, end, depth, w_stride, s)
    y = tl.trans(_finished(acc, up, bias_ptr, f, live, up_offset, s))
    mask = used[:, None] & live[None, :]
    at = column.to(tl.int64)[:, None]
    if s.has_residual:
        y += tl.load(residual_ptr + at * residual_stride + f[None, :], mask=mask, other=0.0).to(tl.float32)
    if s.has_row_weights:
        y *= tl.load(row_weights_ptr + column, mask=used, other=0.0)[:, None]
    tl.store(out_ptr + at * out_stride + f[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_splits(
    parts_ptr, bias_ptr, residual_ptr, out_ptr, tokens, features, splits, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """out [tokens, features] = the sum of parts [splits, tokens, features] in order, bias, residual."""
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = f < features
    y = tl.full([WIDTH], 0, tl.float32)
    for i in tl.range(0, splits):
        y += tl.load(parts_ptr + (i * tokens + t) * features + f, mask=live, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + f, mask=live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + t * residual_stride + f, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * features + f, y.to(out_ptr.dtype.element_ty), mask=live)
