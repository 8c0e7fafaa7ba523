"""The matrices of a model, as its forward pass calls them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from engine.kernels.interface import Activation, Kernels, Packed, PackedExperts, Plan
from engine.kernels.movable import MovableWeights
from engine.kernels.weights import DenseMatrix, ExpertMatrices, Matrix, join_rows
from engine.models.lora import LowRank, group_by_slot
from engine.models.tensor_ranks import TensorRanks


class StepContext(Generic[Plan]):
    """Values that belong to the step's tokens rather than to the model, one row per token that is
    computed."""

    def __init__(
        self, plan: Plan, adapter_slots: Tensor | None = None, *, is_token: Tensor | None = None
    ) -> None:
        """adapter_slots: int64 [T], LoRA slot of each token, -1: none; None: no token has one.
        is_token: int64 [T], 0 for rows that pad a batch, else 1; None: there are none."""
        self.plan = plan
        self.is_token = is_token
        self._slots = adapter_slots
        self.adapter_groups = () if adapter_slots is None else group_by_slot(adapter_slots)

    def rows(self, rows: Tensor) -> "StepContext[Plan]":
        """The context for the rest of a step in which only these rows are computed."""
        slots = None if self._slots is None else self._slots[rows]
        return StepContext(self.plan, slots, is_token=None if self.is_token is None else self.is_token[rows])


class MatrixSource(Protocol):
    """Source of a model's weights: a checkpoint, plain or quantised.

    Names are those of the checkpoint without ".weight". All methods raise SetupError if there is no such
    tensor, or if it has another shape.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        ...

    @property
    def device(self) -> torch.device: ...

    def has(self, name: str) -> bool:
        """True if there is a tensor or matrix of this name."""
        ...

    def matrix(self, name: str, out_size: int, in_size: int, *, bias: bool = False) -> Matrix: ...

    def tied(self, name: str, matrix: DenseMatrix) -> Matrix:
        """The same result as `matrix`, of a head that is the embedding's table, which is in memory."""
        ...

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter that is no matrix of a `Linear` (embedding, norm), in the model's dtype unless
        another is given. The name is the whole one, ".weight" included."""
        ...


class LayerPlace(Protocol):
    """The memory of a layer that is streamed."""

    def enter(self) -> None:
        """Have the layer's weights in memory. Raises `engine.offload.images.OffloadFailed`."""
        ...

    def leave(self) -> None:
        """The layer is done with for this step."""
        ...


class LayerKeeper(Protocol):
    """Decides which layers are streamed, as they are read."""

    def take(self, index: int, weights: Callable[[], MovableWeights]) -> LayerPlace | None:
        """None: the layer stays in memory. weights: makes its image. Raises SetupError."""
        ...


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Rows of a `Linear` that are one module of the checkpoint, for adapters to find it."""

    name: str
    row_count: int


class Linear(Generic[Packed]):
    """y = x @ W.T + bias, W being the rows of all `parts`."""

    def __init__(
        self,
        kernels: Kernels[Any, Packed, Any],
        packed: Packed,
        parts: tuple[LinearPart, ...],
        *,
        in_size: int = 0,
    ) -> None:
        """in_size: 0 if adapters are not to find it."""
        self._kernels, self._packed = kernels, packed
        self.parts, self.in_size = parts, in_size
        self._low_ranks: dict[int, tuple[Packed, Packed]] = {}

    @property
    def out_size(self) -> int:
        return sum(part.row_count for part in self.parts)

    def __call__(self, x: Tensor, step: StepContext[Any], *, residual: Tensor | None = None) -> Tensor:
        """[T, in] -> [T, out]. May overwrite `residual` and return it."""
        y = self._kernels.linear(x, self._packed, residual=residual)
        if not step.adapter_groups or not self._low_ranks:
            return y
        for slot, rows in step.adapter_groups:
            if slot not in self._low_ranks:
                continue
            if rows is None:
                return self._with_adapter(slot, x, y)
            y[rows] = self._with_adapter(slot, x[rows], y[rows])
        return y

    def gated(self, x: Tensor, step: StepContext[Any], activation: Activation) -> Tensor:
        """act(x @ gate.T) * (x @ up.T), the two parts being gate and up."""
        mine = [(slot, rows) for slot, rows in step.adapter_groups if slot in self._low_ranks]
        if not mine:
            return self._kernels.gated_linear(x, self._packed, activation)
        if mine[0][1] is None:
            return self._adapted_gated(x, [(mine[0][0], len(x))], activation)
        # Rows without an adapter go the way they go in a batch without any, to the same result.
        out = x.new_empty((len(x), self.out_size // 2))
        others = [
            rows for slot, rows in step.adapter_groups if slot not in self._low_ranks and rows is not None
        ]
        if others:
            rest = torch.cat(others)
            out[rest] = self._kernels.gated_linear(x[rest], self._packed, activation)
        groups = [(slot, rows) for slot, rows in mine if rows is not None]
        adapted = torch.cat([rows for _, rows in groups])
        counts = [(slot, len(rows)) for slot, rows in groups]
        out[adapted] = self._adapted_gated(x[adapted], counts, activation)
        return out

    def _adapted_gated(self, x: Tensor, counts: list[tuple[int, int]], activation: Activation) -> Tensor:
        """counts: (slot, rows), one adapter's rows after another's. The base's product is one for all: its
        matrix is what takes long to read."""
        y = self._kernels.linear(x, self._packed)
        start = 0
        for slot, count in counts:
            rows = slice(start, start + count)
            y[rows] = self._with_adapter(slot, x[rows], y[rows])
            start += count
        gate, up = (half.contiguous() for half in y.chunk(2, dim=1))
        return self._kernels.gated(gate, up, activation)

    def set_low_rank(self, slot: int, low_rank: LowRank | None) -> None:
        """Set what the adapter in this slot adds here; None for nothing. Call it between steps only."""
        self._low_ranks.pop(slot, None)
        if low_rank is not None:
            a, b = (self._kernels.pack(DenseMatrix(weight)) for weight in (low_rank.a, low_rank.b))
            self._low_ranks[slot] = (a, b)

    def _with_adapter(self, slot: int, x: Tensor, y: Tensor) -> Tensor:
        a, b = self._low_ranks[slot]
        return self._kernels.linear(self._kernels.linear(x, a), b, residual=y)

    def logits(self, x: Tensor) -> Tensor:
        """float32 [T, out]."""
        return self._kernels.logits(x, self._packed)


class Norm:
    """RMS norm over the last dimension."""

    def __init__(self, kernels: Kernels[Any, Any, Any], weight: Tensor, eps: float) -> None:
        self._kernels, self._weight, self._eps = kernels, weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)


class RoutedExperts(Protocol):
    """Experts that are elsewhere. Layers are counted from 0 among the rank's that have experts."""

    overlaps: bool
    """Whether large batches are computed as two halves in turn."""

    def begin(self, layer: int, x: Tensor, chosen: Tensor) -> Any:
        """Send rows x [T, hidden] to their experts, chosen int64 [T, k]. `finish` must follow."""
        ...

    def finish(self, sent: Any, weights: Tensor) -> Tensor:
        """Sum over j of weights[t, j] * MLP_{chosen[t, j]}(x[t]); weights float32 [T, k] -> [T, hidden]."""
        ...


class Loader(Generic[Plan, Packed, PackedExperts]):
    """Makes the parts of a model out of a source, for one set of kernels."""

    def __init__(
        self,
        source: MatrixSource,
        kernels: Kernels[Plan, Packed, PackedExperts],
        ranks: TensorRanks | None = None,
        keeper: LayerKeeper | None = None,
        routed: RoutedExperts | None = None,
    ) -> None:
        """ranks: those among which the model is divided, `source` giving one's part; None: it is whole.
        keeper: None if all layers stay in memory. routed: None if the model's experts are loaded here."""
        self.routed = routed
        self.source, self.kernels, self.ranks, self._keeper = source, kernels, ranks, keeper
        self._packed: list[Packed | PackedExperts | Tensor] = []
        """Weights of the layer that is read now."""
        self.linears: list[Linear[Packed]] = []
        """Those that adapters may change."""

    def norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> Norm:
        """offset: added to the weights, in float32."""
        if not offset:
            return Norm(self.kernels, self.source.tensor(f"{name}.weight", size), eps)
        weight = self.source.tensor(f"{name}.weight", size, dtype=torch.float32)
        return Norm(self.kernels, weight + offset, eps)

    def linear(self, *parts: tuple[str, int], in_size: int, bias: bool = False) -> Linear[Packed]:
        """parts: (name, rows) of matrices that read the same input."""
        matrices = [self.source.matrix(name, rows, in_size, bias=bias) for name, rows in parts]
        linear = self.joined(matrices, parts, in_size=in_size)
        self.linears.append(linear)
        return linear

    def joined(
        self, matrices: Sequence[Matrix], parts: Sequence[tuple[str, int]], *, in_size: int = 0
    ) -> Linear[Packed]:
        """The same of matrices that are read already, out of reach for adapters."""
        packed = self.pack(join_rows(matrices, self.source.dtype))
        joined = tuple(LinearPart(name, rows) for name, rows in parts)
        return Linear(self.kernels, packed, joined, in_size=in_size)

    def head(
        self, name: str, vocab_size: int, hidden_size: int, *, tied: DenseMatrix | None
    ) -> Linear[Packed]:
        """tied: the embedding's table, where it is also the head."""
        if tied is not None:
            matrix = self.source.tied(name, tied)
        else:
            matrix = self.source.matrix(name, vocab_size, hidden_size)
        return Linear(self.kernels, self.kernels.pack(matrix), (LinearPart(name, vocab_size),))

    def experts(self, experts: ExpertMatrices) -> PackedExperts:
        packed = self.kernels.pack_experts(experts)
        self._packed.append(packed)
        return packed

    def pack(self, matrix: Matrix) -> Packed:
        packed = self.kernels.pack(matrix)
        self._packed.append(packed)
        return packed

    def uses(self, weights: Tensor) -> None:
        """A tensor that a layer multiplies by as it is."""
        self._packed.append(weights)

    def layer_is_read(self, index: int) -> LayerPlace | None:
        """All weights since the last call are one layer's. Returns its place if it is streamed."""
        packed, self._packed = self._packed, []
        return (
            None if self._keeper is None else self._keeper.take(index, lambda: self.kernels.movable(packed))
        )
