"""The part of a checkpoint that one of several tensor ranks holds."""

import torch
from torch import Tensor

from engine.kernels.weights import DenseMatrix, Matrix
from engine.loading.parts import PartSource
from engine.model_files.division import Cut, Division


class DividedSource:
    """Implements `engine.models.linear.MatrixSource` for forward passes that are built from the rank's spec:
    the sizes that they ask for are the rank's, and no more is read."""

    def __init__(self, inner: PartSource, division: Division) -> None:
        self._inner, self._division = inner, division
        self.dtype, self.device = inner.dtype, inner.device

    def has(self, name: str) -> bool:
        return self._inner.has(name)

    def matrix(self, name: str, out_size: int, in_size: int, *, bias: bool = False) -> Matrix:
        cut = self._division.cut(name)
        whole_out, whole_in = out_size, in_size
        rows = columns = None
        if cut.rows is not None:
            whole_out, rows = cut.rows.total, cut.rows.places
            assert sum(map(len, rows)) == out_size, name
        if cut.columns is not None:
            whole_in, (columns,) = cut.columns.total, cut.columns.places
            assert len(columns) == in_size, name
            bias = bias and self._division.adds_biases
        return self._inner.matrix(name, whole_out, whole_in, bias=bias, rows=rows, columns=columns)

    def tied(self, name: str, matrix: DenseMatrix) -> Matrix:
        cut = self._division.cut(name)
        assert cut.rows is not None, name
        return self._inner.tied(name, matrix, out_size=cut.rows.total, rows=cut.rows.places)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        cut = self._division.cut(name.removesuffix(".weight"))
        if cut == Cut():
            return self._inner.tensor(name, *shape, dtype=dtype)
        assert cut.rows is not None, name
        assert sum(map(len, cut.rows.places)) == shape[0], name
        whole = (cut.rows.total, *shape[1:])
        return self._inner.tensor(name, *whole, dtype=dtype, cuts=(cut.rows.places,))
