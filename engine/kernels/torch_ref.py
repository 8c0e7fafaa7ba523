"""The kernels in plain torch, for any device. The other implementations are tested against them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.devices import TORCH_DTYPES
from engine.kernels.interface import Activation, AttentionSpec, BatchLayout, RopeTables
from engine.kernels.movable import MovableTensors
from engine.kernels.torch_attention import TorchAttention
from engine.kernels.torch_bytes import ByteMatrix, byte_matrix, byte_product
from engine.kernels.torch_kv import kv_rows
from engine.kernels.torch_plan import TorchPlan, TorchPlanner
from engine.kernels.weights import DenseMatrix, ExpertMatrices, IntMatrix, Matrix, to_dense
from engine.kv.pool import KVPool

TorchMatrix = DenseMatrix | ByteMatrix

_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """Matrices of all experts of one layer, one entry per expert."""

    gate_up: tuple[TorchMatrix, ...]
    down: tuple[TorchMatrix, ...]


class TorchKernels:
    """Implements `engine.kernels.interface.Kernels`."""

    is_batch_invariant = False

    def __init__(self, pool: KVPool) -> None:
        geometry = pool.geometry
        self._pool = pool
        self.block_tokens = pool.geometry.block_tokens
        self._dtype = TORCH_DTYPES[geometry.dtype]
        self._planner = TorchPlanner(geometry, pool.device)
        self._rows = kv_rows(pool)
        self._attention = TorchAttention(geometry, self._rows)

    # --- weights ---

    def pack(self, matrix: Matrix) -> TorchMatrix:
        """Quantised matrices become dense here, once: they compute what they mean, and save no memory. Those
        that round their activations stay as they are."""
        if isinstance(matrix, IntMatrix) and matrix.activation_bits:
            return byte_matrix(matrix)
        return matrix if isinstance(matrix, DenseMatrix) else to_dense(matrix, self._dtype)

    def pack_experts(self, experts: ExpertMatrices) -> TorchExperts:
        return TorchExperts(
            tuple(self.pack(matrix) for matrix in experts.gate_up),
            tuple(self.pack(matrix) for matrix in experts.down),
        )

    def movable(self, packed: Sequence[object]) -> MovableTensors:
        return MovableTensors(packed)

    # --- per step ---

    def plan(self, layout: BatchLayout, ropes: RopeTables, *, windows: frozenset[int]) -> TorchPlan:
        return self._planner.plan(layout, ropes, windows)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return F.embedding(tokens, table)

    def linear(self, x: Tensor, matrix: TorchMatrix, *, residual: Tensor | None = None) -> Tensor:
        if isinstance(matrix, ByteMatrix):
            wide = byte_product(x, matrix)
            return (wide if residual is None else wide + residual.float()).to(x.dtype)
        y = F.linear(x, matrix.weight, matrix.bias)
        return y if residual is None else y.add_(residual)

    def gated_linear(self, x: Tensor, matrix: TorchMatrix, activation: Activation) -> Tensor:
        gate, up = self.linear(x, matrix).chunk(2, dim=-1)
        return self.gated(gate, up, activation)

    def logits(self, x: Tensor, matrix: TorchMatrix) -> Tensor:
        if isinstance(matrix, ByteMatrix):
            return byte_product(x, matrix)
        return self.linear(x, matrix).float()

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        match activation:
            case "silu":
                return F.silu(gate).mul_(up)
            case "gelu":
                return F.gelu(gate).mul_(up)
            case "gelu_tanh":
                return F.gelu(gate, approximate="tanh").mul_(up)
            case "swiglu_oai":
                gate = gate.clamp(max=_OAI_LIMIT)
                up = up.clamp(-_OAI_LIMIT, _OAI_LIMIT)
                return (up + 1) * gate * torch.sigmoid(gate * _OAI_ALPHA)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype == x.dtype:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, plan: TorchPlan
    ) -> Tensor:
        head_count, head_dim = q.shape[1], k.shape[2]
        rotated = _rotate(torch.cat((q, k), dim=1), *plan.ropes[spec.rope])
        # The softmax scale goes in here, in fp32, where it costs least.
        rotated[:, :head_count].mul_(spec.scale)
        rotated = rotated.to(q.dtype)
        keys = rotated[:, head_count:].reshape(-1, head_dim)
        self._rows.write(spec.layer, 0, plan.write_rows, keys)
        self._rows.write(spec.layer, 1, plan.write_rows, v.reshape(-1, head_dim))
        return rotated[:, :head_count]

    def rotate(self, x: Tensor, *, rope: int, plan: TorchPlan) -> Tensor:
        return _rotate(x, *plan.ropes[rope]).to(x.dtype)

    def store_latent(self, latent: Tensor, *, layer: int, plan: TorchPlan) -> None:
        self._rows.write(layer, 0, plan.write_rows, latent)

    def attention(self, q: Tensor, *, spec: AttentionSpec, plan: TorchPlan) -> Tensor:
        return self._attention(q, spec, plan.reads[spec.window])

    def experts(
        self, x: Tensor, experts: TorchExperts, chosen: Tensor, weights: Tensor, activation: Activation
    ) -> Tensor:
        per_token = chosen.shape[1]
        # Tokens of one expert follow one another: each expert's matrices are read once.
        by_expert = torch.argsort(chosen.reshape(-1), stable=True)
        inputs = x[by_expert // per_token]
        outputs = torch.empty_like(inputs)
        start = 0
        for expert, count in enumerate(torch.bincount(chosen.reshape(-1)).tolist()):
            if count:
                rows = slice(start, start + count)
                inner = self.gated_linear(inputs[rows], experts.gate_up[expert], activation)
                outputs[rows] = self.linear(inner, experts.down[expert])
                start += count
        by_token = torch.empty_like(outputs)
        by_token[by_expert] = outputs
        mixed = by_token.view(*chosen.shape, -1).float().mul_(weights[..., None])
        total = mixed[:, 0]
        for j in range(1, per_token):
            total = total + mixed[:, j]
        return total.to(x.dtype)

    # --- blocks ---

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._pool.block_view(destination).copy_(self._pool.block_view(source))

    def gather_blocks(self, block_ids: Sequence[int]) -> Tensor:
        return torch.stack([self._pool.block_view(block_id) for block_id in block_ids])

    def scatter_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        for block_id, block in zip(block_ids, data, strict=True):
            self._pool.block_view(block_id).copy_(block)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first R dimensions of x [T, N, D]; returns fp32. cos, sin as in `TorchPlan.ropes`."""
    rotary = cos.shape[-1]
    turned = x[..., :rotary]
    turned = torch.addcmul(turned * cos, turned.roll(rotary // 2, -1), sin)
    return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:].float()), -1)
