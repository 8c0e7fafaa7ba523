"""gpt-oss' experts: one tensor for all of a layer, gate and up rows interleaved, plain or MXFP4."""

import torch
from torch import Tensor

from engine.kernels.weights import DenseMatrix, ExpertMatrices, Matrix
from engine.model_files.spec import MoeSpec
from engine.models.linear import MatrixSource

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""e2m1 without its sign, the fourth bit (OCP Microscaling Formats 1.0, section 5.3.3)."""
_SCALE_BIAS = 127
"""e8m0: a scale byte b means 2^(b - 127) (section 5.4.1)."""
_BLOCK = 32
"""Numbers that share a scale; two per byte, the first in the lower half."""


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 [..., n, 16], scales uint8 [..., n] -> [..., n * 32] in `dtype`."""
    values = torch.tensor(_FP4_VALUES + tuple(-v for v in _FP4_VALUES), device=blocks.device)
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    numbers = values[codes.int()]
    exponents = scales.to(torch.int32) - _SCALE_BIAS
    return torch.ldexp(numbers, exponents[..., None]).flatten(-2).to(dtype)


def load_gpt_oss_experts(moe: MoeSpec, source: MatrixSource, name: str, hidden_size: int) -> ExpertMatrices:
    """name: the module's in the checkpoint. Raises SetupError, see `MatrixSource`."""
    inner = moe.intermediate_size
    gate_up = _Stacked(moe, source, f"{name}.gate_up_proj", out_size=2 * inner, in_size=hidden_size)
    down = _Stacked(moe, source, f"{name}.down_proj", out_size=hidden_size, in_size=inner)
    rows = torch.arange(2 * inner, device=source.device).view(-1, 2).T.reshape(-1)
    experts = range(moe.expert_count)
    return ExpertMatrices(
        tuple(gate_up.expert(expert, rows) for expert in experts),
        tuple(down.expert(expert, None) for expert in experts),
    )


class _Stacked:
    """One tensor with the matrices of all experts."""

    def __init__(self, moe: MoeSpec, source: MatrixSource, name: str, *, out_size: int, in_size: int) -> None:
        self._source, self._name, count = source, name, moe.expert_count
        self._is_mxfp4 = moe.is_mxfp4
        self._bias = source.tensor(f"{name}_bias", count, out_size)
        if moe.is_mxfp4:
            groups = -(-in_size // _BLOCK)
            self._weights = source.stored(f"{name}_blocks", count, out_size, groups, _BLOCK // 2)
            self._scales = source.stored(f"{name}_scales", count, out_size, groups)
        else:
            self._weights = source.tensor(name, count, in_size, out_size)

    def expert(self, expert: int, rows: Tensor | None) -> Matrix:
        """rows: their order; None: as they are."""
        if self._is_mxfp4:
            weight = dequantize_mxfp4(self._weights[expert], self._scales[expert], self._source.dtype)
        else:
            weight = self._weights[expert].T
        bias = self._bias[expert]
        if rows is not None:
            weight, bias = weight[rows], bias[rows]
        return self._source.loaded(
            f"{self._name}.{expert}", DenseMatrix(weight.contiguous(), bias.contiguous())
        )
