"""Rotation of queries and keys, and writing keys and values to their blocks: one pass over both."""
# Triton's language is typed by its compiler: pyright knows neither its values nor its constants.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# ruff: noqa: ANN001

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.kernels.triton.quantize import E4M3_MAX, INT8_MAX, e4m3_encode, round_even


@dataclass(frozen=True, slots=True)
class RotaryConstants:
    heads: int
    """Heads that are rotated and returned."""
    kv_heads: int
    """0: nothing is stored."""
    head_dim: int
    half_used: int
    """Half of the rotated dimensions; 0: none is."""
    half: int
    """The power of two it lies in."""
    rest_used: int
    rest: int
    """Dimensions that are not rotated, and their power of two; 0: all are."""
    tile: int
    """Heads per program, a power of two."""
    parts: int
    """Programs per token that rotate queries."""
    kv_tile: int
    """kv_heads' power of two."""
    width: int
    """head_dim's."""
    positions: int
    """Positions in a block."""
    quant: int
    """0: none, 1: int8, 2: e4m3."""


@triton.jit
def _load(pointers, mask) -> tl.tensor:
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotated(rows, cos_ptr, sin_ptr, live, s: tl.constexpr) -> tuple:
    """The two halves of the rotated dimensions, fp32 [heads, half]."""
    columns = tl.arange(0, s.half)
    inside = columns < s.half_used
    mask = live[:, None] & inside[None, :]
    cos = _load(cos_ptr + columns, inside)[None, :]
    sin = _load(sin_ptr + columns, inside)[None, :]
    low = _load(rows[:, None] + columns[None, :], mask)
    high = _load(rows[:, None] + (columns + s.half_used)[None, :], mask)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _put(rows, first: tl.constexpr, used: tl.constexpr, x, live, WIDTH: tl.constexpr) -> None:
    columns = tl.arange(0, WIDTH)
    mask = live[:, None] & (columns < used)[None, :]
    tl.store(rows[:, None] + (first + columns)[None, :], x.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _scale_of(largest, s: tl.constexpr) -> tl.tensor:
    """largest: |x| over a vector, [heads]."""
    if s.quant == 2:
        scale = tl.div_rn(largest, tl.full(largest.shape, E4M3_MAX, tl.float32))
    else:
        scale = tl.div_rn(largest, tl.full(largest.shape, INT8_MAX, tl.float32))
    return scale


@triton.jit
def _stored(x, scale, s: tl.constexpr) -> tl.tensor:
    """Values as they lie in the pool, except for the pool's own rounding where it is not quantised."""
    if s.quant == 0:
        y = x
    else:
        divisor = tl.where(scale == 0.0, 1.0, scale)[:, None] + tl.zeros_like(x)
        y = tl.div_rn(x, divisor)
        if s.quant == 2:
            y = e4m3_encode(tl.minimum(tl.maximum(y, -E4M3_MAX), E4M3_MAX))
        else:
            y = round_even(tl.minimum(tl.maximum(y, -INT8_MAX), INT8_MAX)).to(tl.int8)
    return y


@triton.jit
def _store_key(rows, cos_ptr, sin_ptr, live, out, scale_out, s: tl.constexpr) -> None:
    largest = tl.full([s.kv_tile], 0, tl.float32)
    if s.half_used:
        low, high = _rotated(rows, cos_ptr, sin_ptr, live, s)
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    if s.rest:
        columns = tl.arange(0, s.rest)
        mask = live[:, None] & (columns < s.rest_used)[None, :]
        rest = _load(rows[:, None] + (2 * s.half_used + columns)[None, :], mask)
        largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
    scale = _scale_of(largest, s)
    if s.half_used:
        _put(out, 0, s.half_used, _stored(low, scale, s), live, s.half)
        _put(out, s.half_used, s.half_used, _stored(high, scale, s), live, s.half)
    if s.rest:
        _put(out, 2 * s.half_used, s.rest_used, _stored(rest, scale, s), live, s.rest)
    if s.quant:
        tl.store(scale_out, scale, mask=live)


@triton.jit
def _store_plain(rows, live, out, scale_out, s: tl.constexpr) -> None:
    columns = tl.arange(0, s.width)
    mask = live[:, None] & (columns < s.head_dim)[None, :]
    x = _load(rows[:, None] + columns[None, :], mask)
    scale = _scale_of(tl.max(tl.abs(x), 1), s)
    _put(out, 0, s.head_dim, _stored(x, scale, s), live, s.width)
    if s.quant:
        tl.store(scale_out, scale, mask=live)


@triton.jit
def _rotate_part(x_ptr, out_ptr, cos_ptr, sin_ptr, token, part, strides, s: tl.constexpr) -> None:
    """`tile` heads of x [T, heads, D] -> out, contiguous."""
    head = part * s.tile + tl.arange(0, s.tile)
    live = head < s.heads
    rows = x_ptr + (token * strides[0] + head * strides[1])
    out = out_ptr + ((token * s.heads + head) * s.head_dim)
    if s.half_used:
        low, high = _rotated(rows, cos_ptr, sin_ptr, live, s)
        _put(out, 0, s.half_used, low, live, s.half)
        _put(out, s.half_used, s.half_used, high, live, s.half)
    if s.rest:
        columns = tl.arange(0, s.rest)
        mask = live[:, None] & (columns < s.rest_used)[None, :]
        rest = _load(rows[:, None] + (2 * s.half_used + columns)[None, :], mask)
        _put(out, 2 * s.half_used, s.rest_used, rest, live, s.rest)


@triton.jit
def rotate_and_store(
    q_ptr, k_ptr, v_ptr, out_ptr, cos_ptr, sin_ptr, slots_ptr, kv_ptr, scales_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, rope_stride_t,
    block_stride, scale_stride, key_offset, value_offset, key_scale_offset, value_scale_offset,
    s: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, part): `parts` of queries, then one of keys and one of values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos_ptr += token * rope_stride_t
    sin_ptr += token * rope_stride_t
    if part < s.parts:
        _rotate_part(q_ptr, out_ptr, cos_ptr, sin_ptr, token, part, (q_stride_t, q_stride_h), s)
    elif s.kv_heads > 0:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            block = (slot // s.positions).to(tl.int64)
            position = slot % s.positions
            head = tl.arange(0, s.kv_tile)
            live = head < s.kv_heads
            in_plane = head * s.positions + position
            to = kv_ptr + (block * block_stride + key_offset + in_plane * s.head_dim)
            scale_to = scales_ptr + (block * scale_stride + key_scale_offset + in_plane)
            if part == s.parts:
                rows = k_ptr + (token * k_stride_t + head * k_stride_h)
                _store_key(rows, cos_ptr, sin_ptr, live, to, scale_to, s)
            else:
                rows = v_ptr + (token * v_stride_t + head * v_stride_h)
                _store_plain(rows, live, to + value_offset, scale_to + value_scale_offset, s)


@triton.jit
def store_latent(
    x_ptr, slots_ptr, kv_ptr, scales_ptr, x_stride_t, block_stride, scale_stride, key_offset,
    key_scale_offset, s: tl.constexpr,
) -> None:  # fmt: skip
    """One token's vector to the single head of the pool."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        block = (slot // s.positions).to(tl.int64)
        position = slot % s.positions
        head = tl.arange(0, 1)
        rows = x_ptr + (token * x_stride_t + head)
        to = kv_ptr + (block * block_stride + key_offset + position * s.head_dim + head)
        scale_to = scales_ptr + (block * scale_stride + key_scale_offset + position + head)
        _store_plain(rows, head == 0, to, scale_to, s)
