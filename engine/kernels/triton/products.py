"""Launches of `product`: which sizes of tile, how many splits, which arguments."""

from dataclasses import dataclass, replace

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.interface import Activation
from engine.kernels.triton import gated as gated_kernels
from engine.kernels.triton import grouping, product
from engine.kernels.triton.device import DeviceFacts, dot_dtype, launch
from engine.kernels.triton.packing import PackedMatrix
from engine.kernels.triton.product import ProductConstants
from engine.kernels.triton.tiles import power_of_two, tiles_for

ACTIVATIONS: dict[Activation, int] = {
    "silu": gated_kernels.SILU,
    "gelu": gated_kernels.GELU,
    "gelu_tanh": gated_kernels.GELU_TANH,
    "swiglu_oai": gated_kernels.SWIGLU_OAI,
}
_KINDS = {"dense": product.DENSE, "int8": product.INT8, "int4": product.INT4, "fp8": product.FP8}
_SPLITS_MAX = 8
_SPLIT_INPUTS_MIN = 512
"""A split with fewer inputs spends its time starting up."""
_NIBBLE_BIAS = {tl.bfloat16: 128.0, tl.float16: 1024.0}
"""The number that `product.nibbles_plus` adds, by dtype."""
_STEP = 1024
"""Rows that `grouping` looks at at once."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    block_t: int
    block_f: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Tokens by expert."""

    row_ids: Tensor
    """int32 [tiles * block_t]: t * k + j, or T * k: none."""
    tile_experts: Tensor
    """int32 [tiles], -1: none."""


def product_tile(
    packed: PackedMatrix, facts: DeviceFacts, tokens: int, *, is_gated: bool, is_fp32: bool
) -> ProductTile:
    """tokens: of one matrix, roughly. Few tokens: bound by reading weights, so small tiles, many bytes in
    flight. Many: by the matrix units, so tiles as large as registers allow."""
    block_t = min(128, power_of_two(tokens, 16))
    if is_fp32:
        # No matrix units: sums lie in registers, 8 of each thread.
        block_k = packed.half or min(32, packed.group or 32)
        return ProductTile(min(block_t, 32), 32, block_k, 4, 2)
    if block_t <= 64:
        # Wide steps for few tokens: each thread has more bytes on their way.
        is_bytes = packed.kind in ("int8", "fp8")
        block_f, block_k, stages = 64, (128 if is_bytes and block_t <= 32 else 64), 4
        warps = 4 if block_t <= 32 or facts.has_wgmma else 8
    elif is_gated:
        # Two sums: half as many features.
        block_f, block_k, warps, stages = 64, 64, 8, 3
    else:
        block_f = 128 if facts.has_wgmma or packed.zeros is None else 64
        block_k, warps, stages = 64, 8, 4 if facts.has_wgmma else 3
    if packed.half:
        block_k = packed.half
    elif packed.group:
        block_k = min(block_k, packed.group)
    return ProductTile(block_t, block_f, block_k, warps, stages)


def split_count(tokens: int, features: int, depth: int, tile: ProductTile, facts: DeviceFacts) -> int:
    """Parts of the inputs summed by programs of their own, so that a small matrix keeps the device busy."""
    programs = -(-tokens // tile.block_t) * -(-features // tile.block_f)
    splits = 1
    while (
        splits < _SPLITS_MAX
        and programs * splits < 2 * facts.sm_count
        and depth // (2 * splits) >= _SPLIT_INPUTS_MIN
    ):
        splits *= 2
    return splits


class Products:
    def __init__(self, dtype: torch.dtype, facts: DeviceFacts) -> None:
        self._dtype, self._facts = dtype, facts
        self._dot, self._is_fp32 = dot_dtype(dtype), dtype == torch.float32
        # fp32 means fp32: no rounding of the operands to ten bits (TF32).
        self._precision = "ieee" if dtype == torch.float32 else "tf32"

    # --- one matrix ---

    def linear(self, x: Tensor, packed: PackedMatrix, *, residual: Tensor | None = None) -> Tensor:
        """Product of a quantised matrix, as `interface.Kernels.linear` defines it."""
        x = self._ordered(x, packed)
        tokens, features = len(x), packed.out_size
        out = torch.empty((tokens, features), dtype=self._dtype, device=x.device)
        if not tokens:
            return out
        tile = product_tile(packed, self._facts, tokens, is_gated=False, is_fp32=self._is_fp32)
        splits = split_count(tokens, features, packed.in_size, tile, self._facts)
        if splits == 1:
            self._launch(x, packed, out, tile, residual=residual)
            return out
        parts = torch.empty((splits, tokens, features), dtype=torch.float32, device=x.device)
        self._launch(x, packed, parts, tile, splits=splits)
        launch(
            product.add_splits,
            (tokens, tiles_for(features, 1024)),
            parts,
            packed.bias if packed.bias is not None else x,
            residual if residual is not None else x,
            out,
            tokens,
            features,
            splits,
            residual.stride(0) if residual is not None else 0,
            HAS_BIAS=packed.bias is not None,
            HAS_RESIDUAL=residual is not None,
            WIDTH=1024,
            warps=4,
        )
        return out

    def gated_linear(self, x: Tensor, packed: PackedMatrix, activation: Activation) -> Tensor | None:
        """None: a product and `gated` after it are better, for the inputs need splitting, or registers do
        not hold two sums and two dequantised tiles."""
        features = packed.out_size // 2
        tile = product_tile(packed, self._facts, len(x), is_gated=True, is_fp32=self._is_fp32)
        if (
            not _takes_gate(packed, tile)
            or split_count(len(x), features, packed.in_size, tile, self._facts) > 1
        ):
            return None
        out = torch.empty((len(x), features), dtype=self._dtype, device=x.device)
        if len(x):
            self._launch(self._ordered(x, packed), packed, out, tile, activation=ACTIVATIONS[activation])
        return out

    def _ordered(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        return x if packed.order is None else x.index_select(1, packed.order)

    # --- experts ---

    def experts(
        self,
        x: Tensor,
        gate_up: PackedMatrix,
        down: PackedMatrix,
        chosen: Tensor,
        weights: Tensor,
        activation: Activation,
    ) -> Tensor:
        """Product of the chosen experts, as `interface.Kernels.experts` defines it."""
        tokens, choices = chosen.shape
        rows, experts = tokens * choices, len(gate_up.values)
        out = torch.empty((tokens, down.out_size), dtype=self._dtype, device=x.device)
        if not tokens:
            return out
        per_expert = -(-rows // experts)
        up_tile = product_tile(gate_up, self._facts, per_expert, is_gated=True, is_fp32=self._is_fp32)
        down_tile = product_tile(down, self._facts, per_expert, is_gated=False, is_fp32=self._is_fp32)
        down_tile = replace(down_tile, block_t=up_tile.block_t)
        groups = self.group(chosen, experts, up_tile.block_t)
        takes_gate = _takes_gate(gate_up, up_tile)
        if not takes_gate:
            plain = product_tile(gate_up, self._facts, per_expert, is_gated=False, is_fp32=self._is_fp32)
            up_tile = replace(plain, block_t=up_tile.block_t)
        inner_size = gate_up.out_size // 2 if takes_gate else gate_up.out_size
        inner = torch.empty((rows, inner_size), dtype=self._dtype, device=x.device)
        fused = ACTIVATIONS[activation] if takes_gate else -1
        self._launch(x, gate_up, inner, up_tile, activation=fused, groups=groups, rows_per_x=choices)
        if not takes_gate:
            gate, up = inner.chunk(2, dim=-1)
            inner = gate_rows(gate, up, activation)
        parts = torch.empty((rows, down.out_size), dtype=self._dtype, device=x.device)
        self._launch(inner, down, parts, down_tile, groups=groups, row_weights=weights.contiguous())
        width = min(1024, power_of_two(down.out_size))
        launch(
            grouping.add_choices,
            (tokens, tiles_for(down.out_size, width)),
            parts,
            out,
            SIZE=down.out_size,
            CHOICES=choices,
            WIDTH=width,
            warps=4,
        )
        return out

    def group(self, chosen: Tensor, experts: int, block_t: int) -> Groups:
        rows = chosen.numel()
        # An expert that is chosen at all fills its last tile in part.
        tiles = rows // block_t + min(experts, rows)
        counts = torch.empty(experts, dtype=torch.int32, device=chosen.device)
        row_ids = torch.full((tiles * block_t,), rows, dtype=torch.int32, device=chosen.device)
        tile_experts = torch.full((tiles,), -1, dtype=torch.int32, device=chosen.device)
        chosen = chosen.contiguous()
        launch(grouping.count_rows, (experts,), chosen, counts, rows, STEP=_STEP, warps=4)
        launch(
            grouping.place_rows,
            (experts,),
            chosen,
            counts,
            row_ids,
            tile_experts,
            rows,
            EXPERTS=experts,
            WIDTH=power_of_two(experts),
            BLOCK=block_t,
            STEP=_STEP,
            warps=4,
        )
        return Groups(row_ids, tile_experts)

    # --- both ---

    def _launch(
        self,
        x: Tensor,
        packed: PackedMatrix,
        out: Tensor,
        tile: ProductTile,
        *,
        residual: Tensor | None = None,
        activation: int = -1,
        splits: int = 1,
        groups: Groups | None = None,
        rows_per_x: int = 1,
        row_weights: Tensor | None = None,
    ) -> None:
        """out: [rows, features], or [splits, rows, features]."""
        assert x.stride(-1) == 1, "rows are contiguous"
        step = tile.block_k * (2 if packed.half else 1)
        s = ProductConstants(
            kind=_KINDS[packed.kind],
            group=packed.group,
            has_zeros=packed.zeros is not None,
            scales_weights=tile.block_t > 64,
            is_grouped=groups is not None,
            activation=activation,
            has_bias=packed.bias is not None and splits == 1,
            has_residual=residual is not None,
            has_row_weights=row_weights is not None,
            is_split=splits > 1,
            is_even=packed.in_size % step == 0,
            block_t=tile.block_t,
            block_f=tile.block_f,
            block_k=tile.block_k,
            nibble_offset=8.0 + _NIBBLE_BIAS.get(self._dot, 0.0),
            halves=2 if packed.half else 1,
            dot=self._dot,
            native_fp8=self._facts.has_fp8,
            precision=self._precision,
        )
        self._start(x, packed, out, tile, s, residual, splits, groups, rows_per_x, row_weights)

    def _start(
        self,
        x: Tensor,
        packed: PackedMatrix,
        out: Tensor,
        tile: ProductTile,
        s: ProductConstants,
        residual: Tensor | None,
        splits: int,
        groups: Groups | None,
        rows_per_x: int,
        row_weights: Tensor | None,
    ) -> None:
        step = tile.block_k * (2 if packed.half else 1)
        rows, features = out.shape[-2:]
        tiles = len(groups.tile_experts) if groups else tiles_for(rows, tile.block_t)
        many = groups is not None
        launch(
            product.product,
            (tiles * tiles_for(features, tile.block_f), splits),
            x,
            packed.values,
            _or(packed.scales, x),
            _or(packed.zeros, x),
            _or(packed.bias, x),
            _or(residual, x),
            out,
            groups.row_ids if groups else x,
            groups.tile_experts if groups else x,
            _or(row_weights, x),
            rows,
            features,
            packed.in_size,
            x.stride(0),
            packed.values.stride(-2),
            packed.scales.stride(-2) if packed.scales is not None else 0,
            features,
            residual.stride(0) if residual is not None else 0,
            packed.values.stride(0) if many else 0,
            packed.scales.stride(0) if many and packed.scales is not None else 0,
            packed.bias.stride(0) if many and packed.bias is not None else 0,
            rows_per_x,
            _up_to_step(tiles_for(packed.in_size, splits), max(step, packed.group)),
            s=s,
            warps=tile.warps,
            stages=tile.stages,
        )


def _takes_gate(packed: PackedMatrix, tile: ProductTile) -> bool:
    return packed.kind == "dense" or tile.block_t <= (32 if packed.half else 64)


def gate_rows(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, [rows, size]."""
    rows, size = gate.shape
    out = torch.empty((rows, size), dtype=gate.dtype, device=gate.device)
    width = min(1024, power_of_two(size))
    if rows:
        launch(
            gated_kernels.gated,
            (rows, tiles_for(size, width)),
            gate,
            up,
            out,
            gate.stride(0),
            up.stride(0),
            SIZE=size,
            WIDTH=width,
            ACTIVATION=ACTIVATIONS[activation],
            warps=4,
        )
    return out


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Kernels take pointers for what they do not read, too."""
    return stand_in if tensor is None else tensor


def _up_to_step(n: int, step: int) -> int:
    return -(-n // step) * step
