"""The experts that one rank holds, read one by one from the model's files."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from baton.config import EngineConfig, ModelConfig
from baton.config.experts import ExpertsConfig
from baton.core.errors import SetupError
from engine.devices import TORCH_DTYPES, torch_device
from engine.experts.copies import new_image
from engine.kernels.choose import make_kernels
from engine.kernels.interface import Kernels
from engine.kernels.movable import MovableWeights
from engine.kernels.native import NativeKernels
from engine.kernels.native_matrices import MovableMatrices
from engine.kernels.weights import IntMatrix, Matrix
from engine.kv.pool import KVPool
from engine.loading.load import checked_spec
from engine.loading.sources import open_checkpoint, open_source
from engine.model_files.check_experts import divisible_experts
from engine.model_files.sizes import kv_geometry
from engine.models.decoder import decoder_prefix
from engine.models.moe import expert_matrices, experts_name
from engine.native.library import features, library


@dataclass(frozen=True, slots=True)
class HeldExpert:
    """One expert of one layer, packed for the kernels."""

    gate_up: Any
    down: Any
    byte_count: int
    weights: MovableWeights
    image: Tensor | None = None
    """The memory that the weights are in, if they came from another rank."""


class ExpertBank:
    """Opens a checkpoint; `load` reads experts. Experts have numbers, see `baton.core.experts`."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, experts: ExpertsConfig) -> None:
        """Raises SetupError: no such model, one without experts, one that runs through transformers' modules,
        no such device."""
        self.device = device = torch_device(model.device)
        folder, spec = checked_spec(model)
        self._moe, self.spec = divisible_experts(spec), spec
        geometry = kv_geometry(spec, model, engine)
        self.dtype = TORCH_DTYPES[geometry.dtype]
        self.experts = experts
        # Kernels belong to a KV pool. This one is never used, and has one block.
        pool = KVPool(geometry, kv_bytes=geometry.block_bytes, device=device)
        own = engine.model_copy(update={"threads": experts.threads or engine.threads})
        self.kernels: Kernels[Any, Any, Any] = make_kernels(own, pool)
        self._checkpoint = open_checkpoint(folder)
        self._source = open_source(self._checkpoint, spec, model, dtype=self.dtype, device=device)
        self._at = decoder_prefix(self._source)
        self._lock = threading.Lock()
        self._blank: tuple[Matrix, ...] = ()
        """What an expert looks like before it is packed, without its numbers; empty until one was loaded, and
        where an image would not say all, or its layout depends on the process, as on GPUs."""
        self.image_kind, self.image_bytes = "", 0
        """What images are like that this process can use, and their size; empty: there are none. Ranks of one
        group have the same model and settings, and may have other processors and versions."""

    @property
    def layer_count(self) -> int:
        """Layers that have experts."""
        return len(self._moe.layers)

    @property
    def expert_count(self) -> int:
        return self._moe.expert_count

    @property
    def group_count(self) -> int:
        """Groups that the router's choice is limited by; 1: it is not."""
        return self._moe.group_count

    def load(self, expert: int) -> HeldExpert:
        """Read one expert. Raises SetupError: a tensor is missing or has another shape, or there is too
        little memory."""
        layer, number = divmod(expert, self._moe.expert_count)
        at = f"{self._at}layers.{self._moe.layers[layer]}."
        with self._lock, torch.inference_mode():
            matrices = expert_matrices(self.spec, self._source, experts_name(self._moe, at), number)
            found = self._packed(matrices)
            is_native = isinstance(self.kernels, NativeKernels)
            if is_native and not self._blank and all(map(_is_all_in_image, matrices)):
                self._blank = tuple(map(_without_numbers, matrices))
                self.image_kind, self.image_bytes = self.kind_of(found), found.byte_count
            self._checkpoint.release()
        return found

    def _packed(self, matrices: Sequence[Matrix], image: Tensor | None = None) -> HeldExpert:
        gate_up, down = map(self.kernels.pack, matrices)
        # The matrices of one expert are in memory of their own, which goes when they go.
        weights = self.kernels.movable([gate_up, down])
        return HeldExpert(gate_up, down, weights.byte_count, weights, image)

    def kind_of(self, held: HeldExpert) -> str:
        """Return what the image of an expert is like; empty: it has none. Experts of one model may differ, as
        where some are rounded around a zero of their own."""
        if not isinstance(held.weights, MovableMatrices):
            return ""
        sizes = "/".join(map(str, held.weights.sizes))
        return f"{features()} {library().path.stem} {self.dtype} {sizes}"

    def image_of(self, held: HeldExpert) -> Tensor:
        """Return the image of an expert, uint8. It is not to be written to."""
        if held.image is not None:
            return held.image
        image = new_image(held.byte_count)
        held.weights.copy_to(image)
        return image

    def from_image(self, image: Tensor) -> HeldExpert:
        """Return the expert of an image of `image_kind`, which is its memory from now on. Raises SetupError:
        there is too little memory."""
        with self._lock, torch.inference_mode():
            held = self._packed(tuple(map(_without_numbers, self._blank)), image)
            if held.byte_count != image.numel() or self.kind_of(held) != self.image_kind:
                raise SetupError("the image is not that of an expert of this model")
            held.weights.place(image)
        return held

    def compute(
        self,
        layer: int,
        x: Tensor,
        rows: Tensor,
        starts: list[int],
        held: Callable[[int], HeldExpert],
    ) -> Tensor:
        """x [rows, hidden] in the model's dtype; rows int64 [P], those of expert e are
        rows[starts[e] : starts[e + 1]] -> float32 [P, hidden]. It is what `Kernels.experts` does before it
        mixes."""
        out = torch.empty((len(rows), x.shape[1]), dtype=torch.float32, device=x.device)
        for number in range(self.expert_count):
            own = slice(starts[number], starts[number + 1])
            if own.start == own.stop:
                continue
            expert = held(layer * self.expert_count + number)
            inner = self.kernels.gated_linear(x[rows[own]], expert.gate_up, self.spec.activation)
            out[own] = self.kernels.linear(inner, expert.down).float()
        return out


def _is_all_in_image(matrix: Matrix) -> bool:
    """Whether an image of the packed matrix says all of it: biases and orders of inputs are kept apart."""
    return matrix.bias is None and (not isinstance(matrix, IntMatrix) or matrix.order is None)


def _without_numbers(matrix: Matrix) -> Matrix:
    values = {field.name: getattr(matrix, field.name) for field in fields(matrix)}
    return replace(
        matrix, **{name: torch.zeros_like(one) for name, one in values.items() if isinstance(one, Tensor)}
    )
