"""The matrices of a model, as its forward pass calls them."""

from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from baton.engine.kernels.interface import Activation, Kernels, Packed, PackedExperts, Plan
from baton.engine.kernels.weights import DenseMatrix, ExpertMatrices, Matrix, join_rows


@dataclass(frozen=True, slots=True)
class StepContext(Generic[Plan]):
    """What belongs to the step's tokens rather than to the model. One row per token of what is computed."""

    plan: Plan
    adapter_slots: Tensor | None = None
    """int64 [T]: LoRA slot of each token, -1: none; None: no token has one."""

    def rows(self, rows: Tensor) -> "StepContext[Plan]":
        """For the rest of a step in which only these rows are computed."""
        slots = None if self.adapter_slots is None else self.adapter_slots[rows]
        return StepContext(self.plan, slots)


class MatrixSource(Protocol):
    """Where a model's weights come from: a checkpoint, plain or quantised.

    Names are those of the checkpoint without ".weight". All methods raise SetupError: no such tensor,
    or another shape.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor or matrix of this name."""
        ...

    def matrix(self, name: str, out_size: int, in_size: int, *, bias: bool = False) -> Matrix: ...

    def loaded(self, name: str, matrix: DenseMatrix) -> Matrix:
        """What `matrix` would return for one that is in memory already (a tied head)."""
        ...

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A parameter that is no matrix of a `Linear` (embedding, norm), in the model's dtype. The name is
        the whole one, ".weight" included."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a `Linear` that are one module of the checkpoint, for adapters to find it."""

    name: str
    row_count: int


class Linear(Generic[Packed]):
    """y = x @ W.T + bias, W being the rows of all `parts`."""

    def __init__(self, kernels: Kernels[Any, Packed, Any], packed: Packed, parts: tuple[Part, ...]) -> None:
        self._kernels, self._packed = kernels, packed
        self.parts = parts

    def __call__(self, x: Tensor, step: StepContext[Any], *, residual: Tensor | None = None) -> Tensor:
        """[T, in] -> [T, out]. May overwrite `residual` and return it."""
        return self._kernels.linear(x, self._packed, residual=residual)

    def gated(self, x: Tensor, step: StepContext[Any], activation: Activation) -> Tensor:
        """act(x @ gate.T) * (x @ up.T), the two parts being gate and up."""
        return self._kernels.gated_linear(x, self._packed, activation)

    def logits(self, x: Tensor) -> Tensor:
        """float32 [T, out]."""
        return self._kernels.logits(x, self._packed)


class Loader(Generic[Plan, Packed, PackedExperts]):
    """Makes the parts of a model out of a source, for one set of kernels."""

    def __init__(self, source: MatrixSource, kernels: Kernels[Plan, Packed, PackedExperts]) -> None:
        self.source, self.kernels = source, kernels

    def linear(self, *parts: tuple[str, int], in_size: int, bias: bool = False) -> Linear[Packed]:
        """parts: (name, rows) of matrices that read the same input."""
        matrices = [self.source.matrix(name, rows, in_size, bias=bias) for name, rows in parts]
        joined = tuple(Part(name, rows) for name, rows in parts)
        return Linear(self.kernels, self.kernels.pack(join_rows(matrices, self.source.dtype)), joined)

    def head(
        self, name: str, vocab_size: int, hidden_size: int, *, tied: DenseMatrix | None
    ) -> Linear[Packed]:
        """tied: the embedding's table, where it is also the head."""
        if tied is not None:
            matrix = self.source.loaded(name, tied)
        else:
            matrix = self.source.matrix(name, vocab_size, hidden_size)
        return Linear(self.kernels, self.kernels.pack(matrix), (Part(name, vocab_size),))

    def experts(self, experts: ExpertMatrices) -> PackedExperts:
        return self.kernels.pack_experts(experts)
