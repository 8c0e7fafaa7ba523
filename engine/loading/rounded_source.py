"""Matrices that are rounded to integers or fp8 as they are read."""

import torch
from torch import Tensor

from engine.kernels.weights import DenseMatrix, Matrix, cut_columns
from engine.loading.parts import Cuts, PartSource
from engine.model_files.division import Places
from engine.quant.round import (
    group_size_for,
    pays_for_zeros,
    round_fp8,
    round_int4,
    round_int8,
    round_w8a8,
    sample_rows,
)

KEPT_MODULES = frozenset({"gate", "router", "shared_expert_gate", "kv_b_proj"})
"""Never rounded: routers decide discretely and are small; `kv_b_proj` is taken apart at load (MLA)."""


class RoundedSource:
    """Another source, whose matrices are rounded when they are read: one is held dense at a time.

    int8: all matrices, the head included, per output channel. int4: in groups of inputs, the head in
    int8 (its errors go straight into the logits, and llama.cpp's 4-bit files keep it finer too). w8a8: as
    int8, products round their activations too, except those of the head. fp8: per output channel, the head as
    it is. Embedding, norms, biases and routers stay as they are.

    A part of a matrix is rounded to the same integers as the whole one. So where inputs are divided, whole
    groups are read and rounded, which per output channel is the whole row, and cut afterwards.
    """

    def __init__(self, inner: PartSource, kind: str) -> None:
        """kind: int8, int4, w8a8 or fp8."""
        self._inner, self._kind = inner, kind
        self.dtype, self.device = inner.dtype, inner.device

    def has(self, name: str) -> bool:
        return self._inner.has(name)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None, cuts: Cuts = ()) -> Tensor:
        return self._inner.tensor(name, *shape, dtype=dtype, cuts=cuts)

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
        kind = self._kind_of(name)
        if not kind:
            return self._inner.matrix(name, out_size, in_size, bias=bias, rows=rows, columns=columns)
        group = group_size_for(in_size) if kind == "int4" else 0
        wide = None if columns is None else _whole_groups(columns, group or in_size)
        found = self._inner.matrix(name, out_size, in_size, bias=bias, rows=rows, columns=wide)
        if isinstance(found, DenseMatrix):
            has_zeros: bool | None = None
            if kind == "int4" and (rows is not None or columns is not None):
                has_zeros = self._has_zeros(name, out_size, in_size, group)
            found = _rounded(found, kind, group, has_zeros=has_zeros)
        if columns is None or wide is None:
            return found
        return cut_columns(found, range(columns.start - wide.start, columns.stop - wide.start))

    def tied(
        self, name: str, matrix: DenseMatrix, *, out_size: int = 0, rows: Places | None = None
    ) -> Matrix:
        found = self._inner.tied(name, matrix, out_size=out_size, rows=rows)
        kind = self._kind_of(name)
        if not kind or not isinstance(found, DenseMatrix):
            return found
        return _rounded(found, kind, 0, has_zeros=None)

    def _kind_of(self, name: str) -> str:
        """int8, int4, w8a8, fp8, or empty for a module that stays as it is."""
        module = name.rpartition(".")[2]
        if module in KEPT_MODULES or (module == "lm_head" and self._kind == "fp8"):
            return ""
        return "int8" if module == "lm_head" else self._kind

    def _has_zeros(self, name: str, out_size: int, in_size: int, group: int) -> bool:
        """Decided by rows of the whole matrix, so that all ranks and a single one decide alike."""
        sample = self._inner.matrix(name, out_size, in_size, rows=(sample_rows(out_size),))
        assert isinstance(sample, DenseMatrix), name
        return pays_for_zeros(sample, group)


def _whole_groups(columns: range, group: int) -> range:
    return range(columns.start // group * group, -(-columns.stop // group) * group)


def _rounded(matrix: DenseMatrix, kind: str, group: int, *, has_zeros: bool | None) -> Matrix:
    match kind:
        case "int4":
            return round_int4(matrix, group_size=group, asymmetric=has_zeros)
        case "int8":
            return round_int8(matrix)
        case "w8a8":
            return round_w8a8(matrix)
        case _:
            return round_fp8(matrix)
