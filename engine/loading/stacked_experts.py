"""gpt-oss' experts: one tensor for all of a layer, gate and up rows interleaved, plain or MXFP4."""

import re
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.weights import DenseMatrix, Matrix
from engine.loading.parts import Cuts, PartSource
from engine.model_files.division import MXFP4_BLOCK, Places
from engine.model_files.spec import MoeSpec

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""e2m1 without its sign, the fourth bit (OCP Microscaling Formats 1.0, section 5.3.3)."""
_SCALE_BIAS = 127
"""e8m0: a scale byte b means 2^(b - 127) (section 5.4.1)."""
_EXPERT = re.compile(r"(?P<stack>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj")


class StoredSource(PartSource, Protocol):
    """A source that has tensors of other dtypes than floats."""

    def stored(self, name: str, *shape: int, cuts: Cuts = ()) -> Tensor: ...


class StackedExpertsSource:
    """Gives each expert the matrices that it has in other models: gate_proj, up_proj and down_proj.
    Implements `PartSource`."""

    def __init__(self, inner: StoredSource, moe: MoeSpec) -> None:
        self._inner, self._moe = inner, moe
        self.dtype, self.device = inner.dtype, inner.device

    def has(self, name: str) -> bool:
        return self._inner.has(name)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None, cuts: Cuts = ()) -> Tensor:
        return self._inner.tensor(name, *shape, dtype=dtype, cuts=cuts)

    def tied(
        self, name: str, matrix: DenseMatrix, *, out_size: int = 0, rows: Places | None = None
    ) -> Matrix:
        return self._inner.tied(name, matrix, out_size=out_size, rows=rows)

    def matrix(
        self,
        name: str,
        out_size: int,
        in_size: int,
        *,
        bias: bool = False,
        rows: Places | None = None,
        columns: range | None = None,
    ) -> Matrix:
        found = _EXPERT.fullmatch(name)
        if found is None:
            return self._inner.matrix(name, out_size, in_size, bias=bias, rows=rows, columns=columns)
        expert, projection = int(found["expert"]), found["projection"]
        one = (range(expert, expert + 1),)
        stack, stored_out = f"{found['stack']}.down_proj", out_size
        if projection != "down":
            stack, stored_out = f"{found['stack']}.gate_up_proj", 2 * out_size
            first = 0 if projection == "gate" else 1
            wanted = rows or (range(out_size),)
            rows = tuple(range(2 * r.start + first, 2 * r.stop + first, 2 * r.step) for r in wanted)
        size = (stored_out, in_size)
        weight = self._mxfp4(stack, one, size, rows, columns) if self._moe.is_mxfp4 else None
        if weight is None:
            cuts = (one, None if columns is None else (columns,), rows)
            shape = (self._moe.expert_count, in_size, stored_out)
            weight = self._inner.tensor(stack, *shape, cuts=cuts)[0].T.contiguous()
        values = None
        if bias:
            shape = (self._moe.expert_count, stored_out)
            values = self._inner.tensor(f"{stack}_bias", *shape, cuts=(one, rows))[0]
        return DenseMatrix(weight, values)

    def _mxfp4(
        self, stack: str, one: Places, size: tuple[int, int], rows: Places | None, columns: range | None
    ) -> Tensor:
        out_size, in_size = size
        blocks, covered = None, range(-(-in_size // MXFP4_BLOCK))
        if columns is not None:
            covered = range(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
            blocks = (covered,)
        shape = (self._moe.expert_count, out_size, -(-in_size // MXFP4_BLOCK))
        cuts = (one, rows, blocks)
        codes = self._inner.stored(f"{stack}_blocks", *shape, MXFP4_BLOCK // 2, cuts=cuts)
        scales = self._inner.stored(f"{stack}_scales", *shape, cuts=cuts)
        weight = dequantize_mxfp4(codes[0], scales[0], self.dtype)
        wanted = columns or range(in_size)
        first = covered.start * MXFP4_BLOCK
        return weight[:, wanted.start - first : wanted.stop - first].contiguous()


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 [..., n, 16], scales uint8 [..., n] -> [..., n * 32] in `dtype`."""
    values = torch.tensor(_FP4_VALUES + tuple(-v for v in _FP4_VALUES), device=blocks.device)
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    numbers = values[codes.int()]
    exponents = scales.to(torch.int32) - _SCALE_BIAS
    return torch.ldexp(numbers, exponents[..., None]).flatten(-2).to(dtype)
