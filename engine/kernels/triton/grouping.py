"""Assignment of tokens to experts. Counting, ordering and cutting into tiles all happen on the device, so
that no step waits for the host to see the choice."""
# Triton's language is typed by its compiler: pyright knows neither its values nor its constants.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# ruff: noqa: ANN001

import triton
import triton.language as tl


@triton.jit
def count_rows(chosen_ptr, counts_ptr, row_count, STEP: tl.constexpr) -> None:
    """counts[e]: rows that chose expert e, one program per expert."""
    expert = tl.program_id(0)
    count = tl.full([STEP], 0, tl.int32)
    for start in tl.range(0, row_count, STEP):
        row = start + tl.arange(0, STEP)
        count += (tl.load(chosen_ptr + row, mask=row < row_count, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count, 0))


@triton.jit
def place_rows(
    chosen_ptr, counts_ptr, row_ids_ptr, tile_experts_ptr, row_count,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """Rows of one expert, in their order, into tiles of BLOCK of its own; the last is padded with
    `row_count`, as are tiles' experts (-1), before this runs."""
    expert = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    counts = tl.load(counts_ptr + lane, mask=lane < EXPERTS, other=0)
    tiles = (counts + BLOCK - 1) // BLOCK
    first_tile = tl.sum(tl.where(lane < expert, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(lane == expert, tiles, 0), 0)
    for i in tl.range(0, own_tiles):
        tl.store(tile_experts_ptr + first_tile + i, expert)
    placed = first_tile * BLOCK
    for start in tl.range(0, row_count, STEP):
        row = start + tl.arange(0, STEP)
        mine = (tl.load(chosen_ptr + row, mask=row < row_count, other=-1) == expert).to(tl.int32)
        at = placed + tl.cumsum(mine, 0) - 1
        tl.store(row_ids_ptr + at, row, mask=mine != 0)
        placed += tl.sum(mine, 0)


@triton.jit
def add_choices(parts_ptr, out_ptr, SIZE: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr) -> None:
    """out [T, SIZE] = parts [T, CHOICES, SIZE] summed over the choices in order, in fp32."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < SIZE
    y = tl.full([WIDTH], 0, tl.float32)
    for j in tl.static_range(CHOICES):
        y += tl.load(parts_ptr + (t * CHOICES + j) * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * SIZE + column, y.to(out_ptr.dtype.element_ty), mask=mask)
