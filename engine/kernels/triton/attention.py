"""Attention over paged keys and values, for decodes and prompt chunks alike.

One kernel, several shapes of tile. A *task* is a tile of queries (some tokens, with all the query heads
that share a key-value head, or as many as fit) against a range of keys. Decodes are tiles of one token,
their keys split over several tasks so that a small batch fills the device; chunks are tiles of many. A
tile whose keys are split leaves unnormalised partial sums that `merge` adds up; others write their result.

After Dao, "FlashAttention-2" (2023), sections 3.1-3.2, and Dao et al., "Flash-Decoding" (2023).
"""
# Triton's language is typed by its compiler: pyright knows neither its values nor its constants.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# ruff: noqa: ANN001

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.kernels.triton.quantize import E4M3_DECODE_SCALE, e4m3_decode

# Tiles begin as tl.full: the Triton 3.7 that torch 2.13's builds with CUDA require compiles no tl.zeros whose
# shape comes out of a dataclass.
_LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """Constants for which one kernel is compiled."""

    kv_heads: int
    group: int
    """Query heads per key-value head."""
    heads: int
    """Query heads per tile."""
    pairs: int
    """Programs per task: kv_heads * ceil(group / heads)."""
    positions: int
    """Positions in a block."""
    head_dim: int
    value_dim: int
    main: int
    """Width of the tiles of keys and values, a power of two, of which the first `main_used` count."""
    main_used: int
    rest: int
    """Width of what keys have beyond `main_used`; 0: nothing."""
    rest_used: int
    is_latent: bool
    """The value is the key's first part."""
    quant: int
    """0: none, 1: int8, 2: e4m3."""
    native_fp8: bool
    """The device converts e4m3 by itself."""
    has_softcap: bool
    has_window: bool
    has_sinks: bool
    has_phases: bool
    """Tiles of keys that every row sees wholly skip the mask, in a loop of their own."""
    block_m: int
    block_n: int
    dot: tl.dtype
    precision: str


@triton.jit
def _load_rows(
    rows, live, first: tl.constexpr, used: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """[n, WIDTH]: numbers first … first + used - 1 at each pointer, zeros beyond and where not live."""
    columns = tl.arange(0, WIDTH)
    pointers = rows[:, None] + (first + columns)[None, :]
    if MASKED and used != WIDTH:
        loaded = tl.load(pointers, mask=live[:, None] & (columns < used)[None, :], other=0)
    elif MASKED:
        loaded = tl.load(pointers, mask=live[:, None], other=0)
    elif used != WIDTH:
        loaded = tl.load(pointers, mask=(columns < used)[None, :], other=0)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def _as_operand(x, s: tl.constexpr) -> tl.tensor:
    """Keys or values up to their scale."""
    if s.quant == 2 and s.native_fp8:
        y = x.to(tl.float8e4nv, bitcast=True).to(s.dot)
    elif s.quant == 2:
        y = e4m3_decode(x, s.dot)
    else:
        y = x.to(s.dot)
    return y


@triton.jit
def _scores(
    q_main, q_rest, k_main, rows, live, scores_of, s: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """q·k in base 2 (softcap included), [block_m, block_n]."""
    scales, factor, softcap = scores_of
    scores = tl.dot(q_main, tl.trans(k_main), input_precision=s.precision)
    if s.rest:
        k_rest = _as_operand(_load_rows(rows, live, s.main_used, s.rest_used, s.rest, MASKED), s)
        scores = tl.dot(q_rest, tl.trans(k_rest), acc=scores, input_precision=s.precision)
    if s.quant:
        scores *= tl.load(scales, mask=live, other=0.0)[None, :]
    scores *= factor
    if s.has_softcap:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), without loss where x is large.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2E)) + 1.0))
    return scores


@triton.jit
def _walk(
    state, queries, begin, end, key_end, memory, numbers, s: tl.constexpr, MASKED: tl.constexpr
) -> tuple:
    """Take in keys begin … end - 1. state: sums [block_m, main], the softmax's running maximum (base 2)
    and total."""
    acc, high, total = state
    q_main, q_rest, position = queries
    kv_ptr, value_offset, scales_ptr, value_scale_offset, tables_ptr, block_stride, scale_stride = memory
    factor, softcap, window = numbers
    for start in tl.range(begin, end, s.block_n):
        keys = start + tl.arange(0, s.block_n)
        live = keys < key_end
        if MASKED:
            block = tl.load(tables_ptr + keys // s.positions, mask=live, other=0).to(tl.int64)
        else:
            block = tl.load(tables_ptr + keys // s.positions).to(tl.int64)
        rows = kv_ptr + (block * block_stride + (keys % s.positions) * s.head_dim)
        scales = scales_ptr + (block * scale_stride + keys % s.positions)
        k_main = _as_operand(_load_rows(rows, live, 0, s.main_used, s.main, MASKED), s)
        scores = _scores(q_main, q_rest, k_main, rows, live, (scales, factor, softcap), s, MASKED)
        if MASKED:
            seen = (keys[None, :] <= position[:, None]) & live[None, :]
            if s.has_window:
                seen = seen & (keys[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_high = tl.maximum(high, tl.max(scores, 1))
        # A row that has seen no key yet: any finite number, lest -inf - -inf be NaN.
        origin = tl.where(new_high == float("-inf"), 0.0, new_high)
        weights = tl.exp2(scores - origin[:, None])
        shrink = tl.exp2(high - origin)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if s.quant:
            weights *= tl.load(scales + value_scale_offset, mask=live, other=0.0)[None, :]
        if s.is_latent:
            values = k_main
        else:
            values = _as_operand(_load_rows(rows + value_offset, live, 0, s.main_used, s.main, MASKED), s)
        acc = tl.dot(weights.to(s.dot), values, acc=acc, input_precision=s.precision)
        high = new_high
    return acc, high, total


@triton.jit
def _walk_phases(
    state, queries, key_begin, key_end, first_position, tokens, memory, numbers, s: tl.constexpr
) -> tuple:
    """Keys key_begin … key_end - 1; those that all rows see in a loop without a mask."""
    plain_end = tl.minimum(key_end, first_position + 1)
    plain_end = tl.maximum(plain_end // s.block_n * s.block_n, key_begin)
    plain_begin = key_begin
    if s.has_window:
        oldest = tl.maximum(first_position + tokens - numbers[2], 0)
        plain_begin = tl.maximum((oldest + s.block_n - 1) // s.block_n * s.block_n, key_begin)
        plain_begin = tl.minimum(plain_begin, plain_end)
        state = _walk(state, queries, key_begin, plain_begin, key_end, memory, numbers, s, True)
    state = _walk(state, queries, plain_begin, plain_end, key_end, memory, numbers, s, False)
    return _walk(state, queries, plain_end, key_end, key_end, memory, numbers, s, True)


@triton.jit
def _first_state(sinks_ptr, head, takes_sinks, s: tl.constexpr) -> tuple:
    """`_walk`'s state before any key. A sink is a key whose value is zero."""
    high = tl.full([s.block_m], float("-inf"), tl.float32)
    total = tl.full([s.block_m], 0, tl.float32)
    if s.has_sinks:
        sinks = tl.load(sinks_ptr + head) * _LOG2E
        high = tl.where(takes_sinks != 0, sinks, high)
        total = tl.where(takes_sinks != 0, 1.0, total)
    return tl.full([s.block_m, s.main], 0, tl.float32), high, total


@triton.jit
def _finish(state, slot, pair, rows, outputs, s: tl.constexpr) -> None:
    """Write the result (slot < 0), or the partial sums of slot `slot`."""
    acc, high, total = state
    # Large numbers are added to scalars: addresses of a whole tile would fill the registers.
    first_row, row, token, head, used = rows
    out_ptr, out_stride_t, part_ptr, part_stats_ptr = outputs
    columns = tl.arange(0, s.main)
    mask = used[:, None] & (columns < s.value_dim)[None, :]
    if slot < 0:
        # A row without any key (padding of a captured step) gets zeros.
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_ptr += first_row.to(tl.int64) * out_stride_t
        place = token * out_stride_t + head * s.value_dim
        tl.store(out_ptr + (place[:, None] + columns[None, :]), out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        first = (slot.to(tl.int64) * s.pairs + pair) * s.block_m
        part_ptr += first * s.value_dim
        part_stats_ptr += first * 2
        tl.store(part_ptr + (row[:, None] * s.value_dim + columns[None, :]), acc, mask=mask)
        tl.store(part_stats_ptr + row * 2, high, mask=used)
        tl.store(part_stats_ptr + row * 2 + 1, total, mask=used)


@triton.jit
def attend(
    q_ptr, out_ptr, kv_ptr, scales_ptr, sinks_ptr, part_ptr, part_stats_ptr, tasks_ptr, tables_ptr,
    q_stride_t, q_stride_h, out_stride_t, block_stride, scale_stride, key_offset, value_offset,
    key_scale_offset, value_scale_offset, factor, softcap, window, s: tl.constexpr,
) -> None:  # fmt: skip
    """One task and one key-value head.

    tasks: int32 [n, 8]: first row of the batch, tokens (0: nothing to do), position of the first, start in
    the block tables, first key, end of the keys, partial slot (-1: none), whether the sinks belong here.
    factor: scale * log2(e), or scale / softcap where there is one; softcap: times log2(e). Offsets of
    values count from the key.
    """
    pair = tl.program_id(0) % s.pairs
    task = tasks_ptr + (tl.program_id(0) // s.pairs) * 8
    first_row, tokens, first_position = tl.load(task), tl.load(task + 1), tl.load(task + 2)
    if tokens == 0:
        return
    table_start, key_begin, key_end = tl.load(task + 3), tl.load(task + 4), tl.load(task + 5)
    kv_head = pair % s.kv_heads
    row = tl.arange(0, s.block_m)
    in_group = (pair // s.kv_heads) * s.heads + row % s.heads
    used = (row // s.heads < tokens) & (in_group < s.group)
    head = kv_head * s.group + tl.minimum(in_group, s.group - 1)
    token = row // s.heads

    q_rows = q_ptr + first_row.to(tl.int64) * q_stride_t + (token * q_stride_t + head * q_stride_h)
    q_main = _load_rows(q_rows, used, 0, s.main_used, s.main, True).to(s.dot)
    q_rest = q_main
    if s.rest:
        q_rest = _load_rows(q_rows, used, s.main_used, s.rest_used, s.rest, True).to(s.dot)
    if s.quant == 2 and not s.native_fp8:
        factor *= E4M3_DECODE_SCALE
    memory = (
        kv_ptr + (key_offset + kv_head * (s.positions * s.head_dim)), value_offset,
        scales_ptr + (key_scale_offset + kv_head * s.positions), value_scale_offset,
        tables_ptr + table_start, block_stride, scale_stride,
    )  # fmt: skip
    queries = (q_main, q_rest, first_position + token)
    numbers = (factor, softcap, window)
    state = _first_state(sinks_ptr, head, tl.load(task + 7), s)
    if s.has_phases:
        state = _walk_phases(state, queries, key_begin, key_end, first_position, tokens, memory, numbers, s)
    else:
        state = _walk(state, queries, key_begin, key_end, key_end, memory, numbers, s, True)
    if s.quant == 2 and not s.native_fp8:
        state = (state[0] * E4M3_DECODE_SCALE, state[1], state[2])
    outputs = (out_ptr, out_stride_t, part_ptr, part_stats_ptr)
    _finish(state, tl.load(task + 6), pair, (first_row, row, token, head, used), outputs, s)


@triton.jit
def merge(
    out_ptr, part_ptr, part_stats_ptr, merges_ptr, out_stride_t, s: tl.constexpr, ROWS: tl.constexpr
) -> None:  # fmt: skip
    """Add up the partial sums of ROWS rows of a tile, in the order of their keys.

    merges: int32 [tiles, 4]: first row of the batch, tokens, first slot, slots (0: nothing to do).
    """
    fields = merges_ptr + tl.program_id(0) * 4
    first_row, tokens = tl.load(fields), tl.load(fields + 1)
    slot, count = tl.load(fields + 2), tl.load(fields + 3)
    pair = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    in_group = (pair // s.kv_heads) * s.heads + row % s.heads
    head = (pair % s.kv_heads) * s.group + in_group
    used = (row // s.heads < tokens) & (in_group < s.group)
    columns = tl.arange(0, s.main)
    mask = used[:, None] & (columns < s.value_dim)[None, :]
    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0, tl.float32)
    acc = tl.full([ROWS, s.main], 0, tl.float32)
    for i in tl.range(0, count):
        index = ((slot + i).to(tl.int64) * s.pairs + pair) * s.block_m + row
        part_high = tl.load(part_stats_ptr + index * 2, mask=used, other=float("-inf"))
        part_total = tl.load(part_stats_ptr + index * 2 + 1, mask=used, other=0.0)
        part = tl.load(part_ptr + index[:, None] * s.value_dim + columns[None, :], mask=mask, other=0.0)
        new_high = tl.maximum(high, part_high)
        origin = tl.where(new_high == float("-inf"), 0.0, new_high)
        shrink, part_shrink = tl.exp2(high - origin), tl.exp2(part_high - origin)
        total = total * shrink + part_total * part_shrink
        acc = acc * shrink[:, None] + part * part_shrink[:, None]
        high = new_high
    if count > 0:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        token = (first_row + row // s.heads).to(tl.int64)
        pointers = out_ptr + token[:, None] * out_stride_t + head[:, None] * s.value_dim + columns[None, :]
        tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=mask)
