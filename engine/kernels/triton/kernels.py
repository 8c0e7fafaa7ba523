"""The kernels' interface on a CUDA device.

Dense products go to cuBLAS through torch: for plain matrices of one dtype nothing written here would beat
it, and its addition of a residual costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.core.errors import SetupError
from engine.devices import TORCH_DTYPES
from engine.kernels.interface import Activation, AttentionSpec, BatchLayout, RopeTables
from engine.kernels.movable import MovableTensors
from engine.kernels.triton import blocks, norm
from engine.kernels.triton.attention_launch import PoolKernels
from engine.kernels.triton.device import INTERPRETED, DeviceFacts, launch
from engine.kernels.triton.packing import PackedMatrix, pack_expert_matrices, pack_matrix
from engine.kernels.triton.plan import AttentionLaunch, HostPlan, TritonPlan, TritonPlanner, upload
from engine.kernels.triton.products import Products, gate_rows
from engine.kernels.triton.tiles import power_of_two, tiles_for
from engine.kernels.weights import ExpertMatrices, Matrix
from engine.kv.pool import KVPool

_COPY_WORDS = 2048
"""Words of 4 bytes per program of `copy_rows`: 16 bytes for each thread of 4 warps, four times."""


@dataclass(frozen=True, slots=True)
class PackedExpertPair:
    gate_up: PackedMatrix
    down: PackedMatrix


class TritonKernels:
    """Implements `engine.kernels.interface.Kernels`."""

    is_batch_invariant = False

    def __init__(self, pool: KVPool, facts: DeviceFacts | None = None) -> None:
        """facts: other than the pool's device's, for compiling ahead of time.

        Raises SetupError: the pool is not on a CUDA device, or it is older than Ampere.
        """
        if pool.device.type == "cpu" and not INTERPRETED:
            raise SetupError(
                "engine.kernels=triton needs a CUDA device: use auto, native or torch on the CPU"
            )
        self._facts = facts or DeviceFacts.of(pool.device)
        if self._facts.capability < 80:
            raise SetupError(
                f"engine.kernels=triton needs compute capability 8.0 or later, {pool.device} has "
                f"{self._facts.capability / 10}: use engine.kernels=torch"
            )
        self._pool, self._dtype = pool, TORCH_DTYPES[pool.geometry.dtype]
        self.block_tokens = pool.geometry.block_tokens
        self._on_pool = PoolKernels(pool, self._dtype, self._facts)
        self._products = Products(self._dtype, self._facts)
        self._planner = TritonPlanner(pool.geometry, self._facts)
        self._group_sizes: dict[int, set[int]] = {}
        """Query heads per key-value head that were seen, by window. They are learnt from the model's calls,
        since nothing declares them earlier."""

    # --- weights ---

    def pack(self, matrix: Matrix) -> PackedMatrix:
        return pack_matrix(matrix, self._dtype)

    def pack_experts(self, experts: ExpertMatrices) -> PackedExpertPair:
        return PackedExpertPair(*pack_expert_matrices(experts, self._dtype))

    def movable(self, packed: Sequence[object]) -> MovableTensors:
        return MovableTensors(packed)

    # --- planning ---

    def plan(self, layout: BatchLayout, ropes: RopeTables, *, windows: frozenset[int]) -> TritonPlan:
        host = self._planner.plan(layout, reads=self._known_reads(windows))
        return host.on_device(upload(host.ints, self._pool.device), ropes)

    def host_plan(
        self, layout: BatchLayout, *, windows: frozenset[int], sequences: int = 0
    ) -> HostPlan | None:
        """Plan of decodes that are captured, see `TritonPlanner.plan`. None until a first step has run."""
        if not windows <= self._group_sizes.keys():
            return None
        return self._planner.plan(layout, reads=self._known_reads(windows), capacity=sequences)

    def _known_reads(self, windows: frozenset[int]) -> list[tuple[int, int]]:
        return sorted((window, g) for window in windows for g in self._group_sizes.get(window, ()))

    def _launches(self, plan: TritonPlan, window: int, group: int) -> tuple[AttentionLaunch, ...]:
        launches = plan.reads.get((window, group))
        if launches is None:
            # The first step with this kind of layer: planned now, remembered for the next one.
            self._group_sizes.setdefault(window, set()).add(group)
            host = self._planner.plan(plan.layout, reads=[(window, group)])
            late = host.on_device(upload(host.ints, self._pool.device), plan.ropes)
            launches = plan.reads[window, group] = late.reads[window, group]
        return launches

    # --- per step ---

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return F.embedding(tokens, table)

    def linear(self, x: Tensor, matrix: PackedMatrix, *, residual: Tensor | None = None) -> Tensor:
        if matrix.kind != "dense":
            return self._products.linear(x, matrix, residual=residual)
        if residual is None:
            return F.linear(x, matrix.values, matrix.bias)
        if matrix.bias is not None:
            return F.linear(x, matrix.values, matrix.bias).add_(residual)
        # In place: torch would copy the residual first.
        return residual.addmm_(x, matrix.values.T)

    def gated_linear(self, x: Tensor, matrix: PackedMatrix, activation: Activation) -> Tensor:
        if matrix.kind != "dense":
            out = self._products.gated_linear(x, matrix, activation)
            if out is not None:
                return out
        gate, up = self.linear(x, matrix).chunk(2, dim=-1)
        return self.gated(gate, up, activation)

    def logits(self, x: Tensor, matrix: PackedMatrix) -> Tensor:
        return self.linear(x, matrix).float()

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return gate_rows(gate, up, activation)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dim() > 3:
            x = x.reshape(-1, x.shape[-1])
        size, rows = x.shape[-1], x.numel() // x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = torch.empty_like(out) if residual is not None else out
        inner = x.shape[1] if x.dim() == 3 else 1
        width = power_of_two(size)
        # Short rows (a head's) share a program, long ones get more warps.
        together = max(1, 1024 // width)
        if rows:
            launch(
                norm.rms_norm,
                (tiles_for(rows, together),),
                x,
                x if residual is None else residual,
                weight,
                out,
                total,
                rows,
                inner,
                x.stride(0) if x.dim() > 1 else 0,
                x.stride(1) if x.dim() == 3 else 0,
                0 if residual is None else residual.stride(0),
                eps,
                SIZE=size,
                WIDTH=width,
                ROWS=together,
                HAS_RESIDUAL=residual is not None,
                warps=min(16, max(4, width // 512)),
            )
        return out, total

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, plan: TritonPlan
    ) -> Tensor:
        return self._on_pool.rotate_and_store(q, k, v, plan, rope=spec.rope, layer=spec.layer)

    def rotate(self, x: Tensor, *, rope: int, plan: TritonPlan) -> Tensor:
        return self._on_pool.rotate_and_store(x, None, None, plan, rope=rope, layer=0)

    def store_latent(self, latent: Tensor, *, layer: int, plan: TritonPlan) -> None:
        self._on_pool.store_latent(latent, plan, layer=layer)

    def attention(self, q: Tensor, *, spec: AttentionSpec, plan: TritonPlan) -> Tensor:
        group = q.shape[1] // self._pool.geometry.kv_head_count
        return self._on_pool.attention(q, spec, plan, self._launches(plan, spec.window, group))

    def experts(
        self, x: Tensor, experts: PackedExpertPair, chosen: Tensor, weights: Tensor, activation: Activation
    ) -> Tensor:
        return self._products.experts(x, experts.gate_up, experts.down, chosen, weights, activation)

    # --- blocks ---

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        words = self._words()
        for run in blocks.independent_runs(pairs):
            sources, destinations = (self._ids([pair[side] for pair in run]) for side in (0, 1))
            self._copy(words, words, len(run), sources, destinations)

    def gather_blocks(self, block_ids: Sequence[int], *, out: Tensor | None = None) -> Tensor:
        """out: uint8 [n, block_bytes], on the device or page-locked in host memory; its bytes are there
        once the stream is synchronised."""
        if out is None:
            shape = (len(block_ids), self._pool.block_bytes)
            out = torch.empty(shape, dtype=torch.uint8, device=self._pool.device)
        if block_ids:
            self._copy(self._words(), self._as_words(out), len(block_ids), self._ids(block_ids), None)
        return out

    def scatter_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        """data: on the device, or page-locked in host memory."""
        if block_ids:
            self._copy(self._as_words(data), self._words(), len(block_ids), None, self._ids(block_ids))

    def _copy(
        self, source: Tensor, target: Tensor, count: int, from_ids: Tensor | None, to_ids: Tensor | None
    ) -> None:
        row_words = source.shape[1]
        launch(
            blocks.copy_rows,
            (count, tiles_for(row_words, _COPY_WORDS)),
            source,
            target,
            from_ids if from_ids is not None else source,
            to_ids if to_ids is not None else source,
            row_words,
            HAS_FROM_IDS=from_ids is not None,
            HAS_TO_IDS=to_ids is not None,
            WORDS=_COPY_WORDS,
            warps=4,
        )

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int32, device=self._pool.device)

    def _words(self) -> Tensor:
        return self._as_words(self._pool.memory)

    def _as_words(self, data: Tensor) -> Tensor:
        """uint8 [n, block_bytes] as the widest numbers that blocks are a whole number of."""
        return data.view(torch.int32) if self._pool.block_bytes % 4 == 0 else data
