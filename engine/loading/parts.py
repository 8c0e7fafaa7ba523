"""Parts of tensors: what a rank reads of a checkpoint."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.weights import DenseMatrix, Matrix
from engine.model_files.division import Places

Cuts = Sequence[Places | None]
"""Places along each dimension, None: all. Dimensions beyond the last are not cut."""


class PartSource(Protocol):
    """A `MatrixSource` that reads parts. Sizes and shapes are those of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def has(self, name: str) -> bool: ...

    def matrix(
        self,
        name: str,
        out_size: int,
        in_size: int,
        *,
        bias: bool = False,
        rows: Places | None = None,
        columns: range | None = None,
    ) -> Matrix: ...

    def tied(
        self, name: str, matrix: DenseMatrix, *, out_size: int = 0, rows: Places | None = None
    ) -> Matrix:
        """See `MatrixSource.tied`. `matrix` holds the rows that are wanted. out_size: of the whole; 0: as
        `matrix` has."""
        ...

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None, cuts: Cuts = ()) -> Tensor: ...


def take(tensor: Tensor, cuts: Cuts) -> Tensor:
    """The part of a tensor. It is a view where it is contiguous in memory, else a copy, so that nothing
    refers to what lies between."""
    whole = tensor
    for dim, places in enumerate(cuts):
        if places is None:
            continue
        pieces = [tensor[(slice(None),) * dim + (slice(one.start, one.stop, one.step),)] for one in places]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return tensor if tensor is whole else tensor.contiguous()
