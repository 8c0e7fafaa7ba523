"""The gated MLP of a layer (arXiv 2002.05202)."""

from collections.abc import Callable
from typing import Any, Generic, Protocol

from torch import Tensor

from engine.kernels.interface import Activation, Packed, PackedExperts, Plan
from engine.model_files.spec import ModelSpec
from engine.models.linear import Linear, Loader, StepContext

Finish = Callable[[], Tensor]
"""Waits for the rest of a computation and returns its result [T, hidden]. It is called once."""


class Mlp(Protocol):
    def begin(self, x: Tensor, step: StepContext[Any], *, residual: Tensor | None = None) -> Finish:
        """x [T, hidden], normed -> what gives [T, hidden]; may overwrite `residual` and return it. Rows that
        go elsewhere are on their way when it returns."""
        ...


class GatedMlp(Generic[Packed]):
    """down(act(gate(x)) * up(x))"""

    def __init__(
        self, spec: ModelSpec, loader: Loader[Plan, Packed, PackedExperts], name: str, inner_size: int
    ) -> None:
        """name: the module's in the checkpoint. Raises SetupError, see `MatrixSource`."""
        self._activation: Activation = spec.activation
        if spec.fused_projections:
            parts = ((f"{name}.gate_up_proj", 2 * inner_size),)
        else:
            parts = ((f"{name}.gate_proj", inner_size), (f"{name}.up_proj", inner_size))
        self._gate_up: Linear[Packed] = loader.linear(*parts, in_size=spec.hidden_size, bias=spec.mlp_bias)
        self._down: Linear[Packed] = loader.linear(
            (f"{name}.down_proj", spec.hidden_size), in_size=inner_size, bias=spec.mlp_bias
        )

    def begin(self, x: Tensor, step: StepContext[Any], *, residual: Tensor | None = None) -> Finish:
        """See `Mlp`."""
        out = self(x, step, residual=residual)
        return lambda: out

    def __call__(self, x: Tensor, step: StepContext[Any], *, residual: Tensor | None = None) -> Tensor:
        return self._down(self._gate_up.gated(x, step, self._activation), step, residual=residual)
