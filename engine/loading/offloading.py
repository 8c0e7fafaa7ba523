"""Streaming of layers while a model is read: what stays off the device, and what that costs.

It is decided when the first layer is in memory. Only then is it known how large weights are in the form that
kernels use; the files say how the other layers compare.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.messages import INFO_NOTE
from baton.core.shape import Shape
from baton.files.cache import cache_folder
from engine.kernels.movable import MovableWeights
from engine.model_files.offload_setting import BUFFERS, check_offload
from engine.offload.choice import Room, WeightSizes, estimate, streamed_layers
from engine.offload.file_images import FileImages
from engine.offload.images import LayerImages, PinnedImages
from engine.offload.memory import page_cache_bytes
from engine.offload.streaming import StreamedLayers, StreamedPlace, StreamingCost


class Offloading:
    """One rank's. Implements `engine.models.linear.LayerKeeper`."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        layers: range,
        layer_count: int,
        stored: Mapping[int, int],
        rest: int,
        room: Callable[[int], Room],
    ) -> None:
        """layers: of the rank, among the model's `layer_count`. stored: bytes that the files have of each.
        rest: bytes of weights that are read after the layers. room: what is left, given the size of the
        first layer. Raises SetupError: `model.offload` is a number that the model cannot have."""
        check_offload(model.offload, layer_count)
        self._model, self._engine = model, engine
        self._layers, self._layer_count = layers, layer_count
        self._stored, self._rest, self._room = stored, rest, room
        self._chosen: frozenset[int] = frozenset()
        self.streamed: StreamedLayers | None = None
        self.cost: StreamingCost | None = None

    def take(self, index: int, weights: Callable[[], MovableWeights]) -> StreamedPlace | None:
        """A layer of this rank was read. Returns its place if it is streamed; its weights are out of memory
        then. Raises SetupError: the weights do not fit, or there is no room for them elsewhere."""
        movable = weights() if not index or self.streamed is not None else None
        if not index:
            assert movable is not None
            self._decide(movable.byte_count)
        if movable is None or self.streamed is None or self._layers[index] not in self._chosen:
            return None
        return self.streamed.add(movable)

    def start(self) -> None:
        """All layers were read. Raises SetupError: reading them takes longer than a step may, and
        OffloadFailed."""
        if self.streamed is None:
            return
        self.cost = cost = self.streamed.start()
        deadline_s = _deadline_s(self._engine)
        layer_s = cost.floor_s / cost.layer_count
        if layer_s > deadline_s / BUFFERS or cost.floor_s > self._engine.step_timeout_s:
            raise SetupError(
                f"model.offload={self._model.offload}: reading the {cost.layer_count} streamed layers takes "
                f"at least {cost.floor_s:.1f} s a step at {cost.bytes_per_s / 1e6:,.0f} MB/s, and "
                f"{layer_s:.1f} s for a layer: stream fewer, or raise engine.rank_timeout_s and "
                "engine.step_timeout_s"
            )

    @property
    def floor_s(self) -> float:
        """The least time of a step, which reading takes. 0: nothing is streamed."""
        return self.cost.floor_s if self.cost is not None else 0.0

    @property
    def notes(self) -> Iterator[str]:
        """Lines for `Member.notes`."""
        if self.cost is None or self.streamed is None:
            if self._model.offload not in ("0", "auto"):
                yield (
                    f"model.offload={self._model.offload} streams nothing here: of the model's streamed "
                    f"layers at most {BUFFERS} are among this rank's {len(self._layers)}, and {BUFFERS} are "
                    "in memory at any time; stream more layers, or use fewer stages"
                )
            return
        yield (
            f"{INFO_NOTE}offload: {self.cost.layer_count} of {len(self._layers)} layers"
            f"{_whose(Shape.parse(self._engine.shape))} ({self.cost.byte_count / 2**20:,.0f} MiB) are "
            f"streamed from {self.streamed.place}, at {self.cost.bytes_per_s / 1e6:,.0f} MB/s: at least "
            f"{_milliseconds(self.cost.floor_s)} a step"
        )

    def accounts(self) -> dict[str, float]:
        """What was read and waited for so far, by this rank."""
        if self.streamed is None:
            return {}
        return {
            "streamed_bytes": self.streamed.bytes_read,
            "streamed_wait_s": self.streamed.waited_s,
            "step_floor_ms": self.floor_s * 1e3,
        }

    def close(self) -> None:
        if self.streamed is not None:
            self.streamed.close()

    def _decide(self, first_bytes: int) -> None:
        sizes = estimate(self._stored, self._layers, first_bytes, self._rest)
        room = self._room(first_bytes)
        offload = self._model.offload
        self._chosen = streamed_layers(offload, self._layers, self._layer_count, sizes, room)
        if self._chosen:
            self.streamed = StreamedLayers(self._images(sizes, room))

    def _images(self, sizes: WeightSizes, room: Room) -> LayerImages:
        device = torch.device(self._model.device)
        if device.type == "cuda":
            return PinnedImages(device)
        by_layer = dict(zip(self._layers, sizes.layers, strict=True))
        streamed = sum(by_layer[layer] for layer in self._chosen)
        resident = sum(sizes.layers) + sizes.rest - streamed + BUFFERS * max(sizes.layers)
        return FileImages(
            offload_folder(self._model),
            deadline_s=_deadline_s(self._engine),
            is_cached=streamed + resident < page_cache_bytes() // 2,
        )


def _whose(shape: Shape) -> str:
    """Say which ranks have the leader's layers. Other stages have others."""
    if shape.is_single:
        return ""
    return " of each rank" if shape.pipeline == 1 else " of each rank of the first stage"


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2g} ms"


def offload_folder(model: ModelConfig) -> Path:
    if model.offload_folder:
        return Path(model.offload_folder).expanduser()
    folder = cache_folder("offload")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def _deadline_s(engine: EngineConfig) -> float:
    """Other ranks wait no longer for this one."""
    return min(engine.rank_timeout_s, engine.step_timeout_s)
