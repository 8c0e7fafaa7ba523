"""Launches of the kernels that read and write the pool."""

import torch
from torch import Tensor

from engine.kernels.interface import AttentionSpec
from engine.kernels.triton import attention, rotary
from engine.kernels.triton.attention import AttentionConstants
from engine.kernels.triton.device import DeviceFacts, dot_dtype, launch
from engine.kernels.triton.plan import AttentionLaunch, TritonPlan
from engine.kernels.triton.rotary import RotaryConstants
from engine.kernels.triton.tiles import AttentionShape, AttentionTile, power_of_two, tiles_for
from engine.kv.pool import KVPool

_LOG2E = 1.4426950408889634
_QUANT = {"int8": 1, "fp8": 2}
_MERGE_ROWS = 4
"""Rows per program of `merge`: enough programs for one decode to spread over the device."""


class PoolKernels:
    """Bound to one pool."""

    def __init__(self, pool: KVPool, dtype: torch.dtype, facts: DeviceFacts) -> None:
        self._geometry, self._dtype = pool.geometry, dtype
        self._has_fp8 = facts.has_fp8
        geometry = pool.geometry
        # e4m3 is handled as bytes: not every architecture has the type.
        is_fp8 = geometry.stored_dtype == "fp8"
        self._values = pool.blocks.view(torch.uint8) if is_fp8 else pool.blocks
        self._scales = pool.scales if pool.scales is not None else torch.empty(1, device=pool.device)
        self._block_stride = pool.blocks.stride(0)
        self._scale_stride = pool.scales.stride(0) if pool.scales is not None else 0
        self._plane_vectors = geometry.kv_head_count * geometry.block_tokens
        self._quant = _QUANT.get(geometry.kv_dtype, 0)
        # Made once: the host launches several kernels per layer, and is what a step of few tokens waits for.
        self._attention_made: dict[object, AttentionConstants] = {}
        self._rotary_made: dict[object, RotaryConstants] = {}

    def _offsets(self, layer: int) -> tuple[int, int, int, int]:
        """Offset of the layer's keys in a block and of its values from there; then the same two for
        scales."""
        vectors = layer * self._geometry.planes * self._plane_vectors
        dim = self._geometry.head_dim
        # A latent is key and value in one.
        between = self._plane_vectors if self._geometry.planes > 1 else 0
        return vectors * dim, between * dim, vectors, between

    # --- attention ---

    def attention(
        self, q: Tensor, spec: AttentionSpec, plan: TritonPlan, launches: tuple[AttentionLaunch, ...]
    ) -> Tensor:
        """Attention as `interface.Kernels.attention` defines it."""
        shape = AttentionShape(self._geometry, q.shape[1] // self._geometry.kv_head_count)
        out = torch.empty((*q.shape[:2], shape.value_dim), dtype=q.dtype, device=q.device)
        for read in launches:
            self._attend(q, out, spec, plan, read, shape)
        return out

    def _attend(
        self,
        q: Tensor,
        out: Tensor,
        spec: AttentionSpec,
        plan: TritonPlan,
        read: AttentionLaunch,
        shape: AttentionShape,
    ) -> None:
        s = self._attention_constants(shape, read.tile, spec)
        rows = read.slot_count * s.pairs * s.block_m
        parts = torch.empty((rows, s.value_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((rows, 2), dtype=torch.float32, device=q.device)
        key_offset, value_offset, key_scale_offset, value_scale_offset = self._offsets(spec.layer)
        softcap = spec.softcap * _LOG2E
        launch(
            attention.attend,
            (len(read.tasks) * s.pairs,),
            q,
            out,
            self._values,
            self._scales,
            spec.sinks if spec.sinks is not None else stats,
            parts,
            stats,
            read.tasks,
            plan.tables,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            self._block_stride,
            self._scale_stride,
            key_offset,
            value_offset,
            key_scale_offset,
            value_scale_offset,
            spec.scale / spec.softcap if spec.softcap else spec.scale * _LOG2E,
            softcap,
            spec.window,
            s=s,
            warps=read.tile.warps,
            stages=read.tile.stages,
        )
        if read.slot_count:
            tiles, row_groups = len(read.merges), tiles_for(s.block_m, _MERGE_ROWS)
            launch(
                attention.merge,
                (tiles, s.pairs, row_groups),
                out,
                parts,
                stats,
                read.merges,
                out.stride(0),
                s=s,
                ROWS=_MERGE_ROWS,
                warps=4,
            )

    def _attention_constants(
        self, shape: AttentionShape, tile: AttentionTile, spec: AttentionSpec
    ) -> AttentionConstants:
        key = (shape.group, tile, spec.softcap > 0, spec.window > 0, spec.sinks is not None)
        made = self._attention_made.get(key)
        if made is None:
            made = self._attention_made[key] = self._make_attention_constants(shape, tile, spec)
        return made

    def _make_attention_constants(
        self, shape: AttentionShape, tile: AttentionTile, spec: AttentionSpec
    ) -> AttentionConstants:
        geometry = self._geometry
        return AttentionConstants(
            kv_heads=geometry.kv_head_count,
            group=shape.group,
            heads=tile.heads,
            pairs=geometry.kv_head_count * tiles_for(shape.group, tile.heads),
            positions=geometry.block_tokens,
            head_dim=geometry.head_dim,
            value_dim=shape.value_dim,
            main=shape.main,
            main_used=shape.main_used,
            rest=shape.rest,
            rest_used=shape.rest_used,
            is_latent=geometry.planes == 1,
            quant=self._quant,
            native_fp8=self._has_fp8,
            has_softcap=spec.softcap > 0,
            has_window=spec.window > 0,
            has_sinks=spec.sinks is not None,
            has_phases=tile.has_phases,
            block_m=tile.block_m,
            block_n=tile.block_n,
            dot=dot_dtype(self._dtype),
            precision="ieee" if self._dtype == torch.float32 else "tf32",
        )

    # --- rotation and writing ---

    def rotate_and_store(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, plan: TritonPlan, *, rope: int, layer: int
    ) -> Tensor:
        """Rotated q, contiguous. k None: nothing is stored."""
        tokens, heads, head_dim = q.shape
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
        tables = plan.ropes.get(rope)
        if tables is None:
            cos = sin = torch.empty((1, 0), device=q.device)
        else:
            cos, sin = tables
        s = self._rotary_constants(heads, head_dim, cos.shape[-1], stores=k is not None)
        key_offset, value_offset, key_scale_offset, value_scale_offset = self._offsets(layer)
        k, v = (q if k is None else k), (q if v is None else v)
        launch(
            rotary.rotate_and_store,
            (tokens, s.parts + (2 if s.kv_heads else 0)),
            q,
            k,
            v,
            out,
            cos,
            sin,
            plan.slots,
            self._values,
            self._scales,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cos.stride(0),
            self._block_stride,
            self._scale_stride,
            key_offset,
            value_offset,
            key_scale_offset,
            value_scale_offset,
            s=s,
            warps=4 if s.tile * s.width >= 1024 else 1,
        )
        return out

    def store_latent(self, latent: Tensor, plan: TritonPlan, *, layer: int) -> None:
        s = self._rotary_constants(0, latent.shape[1], 0, stores=True)
        key_offset, _, key_scale_offset, _ = self._offsets(layer)
        launch(
            rotary.store_latent,
            (len(latent),),
            latent,
            plan.slots,
            self._values,
            self._scales,
            latent.stride(0),
            self._block_stride,
            self._scale_stride,
            key_offset,
            key_scale_offset,
            s=s,
            warps=2,
        )

    def _rotary_constants(self, heads: int, head_dim: int, half: int, *, stores: bool) -> RotaryConstants:
        key = (heads, head_dim, half, stores)
        made = self._rotary_made.get(key)
        if made is None:
            made = self._rotary_made[key] = self._make_rotary_constants(heads, head_dim, half, stores=stores)
        return made

    def _make_rotary_constants(
        self, heads: int, head_dim: int, half: int, *, stores: bool
    ) -> RotaryConstants:
        kv_heads = self._geometry.kv_head_count if stores else 0
        rest = head_dim - 2 * half
        # 2048 numbers per program: 16 of each thread.
        tile = min(power_of_two(max(heads, 1)), max(1, 2048 // power_of_two(head_dim)))
        return RotaryConstants(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            half_used=half,
            half=power_of_two(max(half, 1)),
            rest_used=rest,
            rest=power_of_two(rest) if rest else 0,
            tile=tile,
            parts=tiles_for(heads, tile),
            kv_tile=power_of_two(max(kv_heads, 1)),
            width=power_of_two(head_dim),
            positions=self._geometry.block_tokens,
            quant=self._quant,
        )
