"""The streamed layers of one rank: which buffer has whose weights, step after step."""

import time
from dataclasses import dataclass

from engine.kernels.movable import MovableWeights
from engine.offload.images import LayerImages
from engine.offload.order import ReadOrder

MEASURE_S = 0.5
"""The time for reads at the start, to learn how fast they are."""
MEASURED_MIN = 3
"""Layers that are read then however long it takes. The first into a buffer is slower than later ones."""


@dataclass(frozen=True, slots=True)
class StreamingCost:
    layer_count: int
    byte_count: int
    """Read in every step."""
    bytes_per_s: float

    @property
    def floor_s(self) -> float:
        """The least time of a step."""
        return self.byte_count / self.bytes_per_s


class StreamedLayers:
    """The thread that computes uses it."""

    def __init__(self, images: LayerImages) -> None:
        self._images = images
        self._weights: list[MovableWeights] = []
        self._order = ReadOrder(1)

    @property
    def bytes_read(self) -> int:
        return self._images.bytes_read

    @property
    def waited_s(self) -> float:
        """Time for which steps waited for reads, as far as the host knows."""
        return self._images.waited_s

    @property
    def place(self) -> str:
        return self._images.place

    def add(self, weights: MovableWeights) -> "StreamedPlace":
        """Take a layer's weights out of memory. Raises SetupError: there is no room for them elsewhere."""
        self._images.keep(weights)
        self._weights.append(weights)
        return StreamedPlace(self, len(self._weights) - 1)

    def start(self) -> StreamingCost:
        """All layers were added: measure how fast they are read, and begin. Raises OffloadFailed."""
        buffer = self._images.start()
        for weights in self._weights:  # nothing refers to smaller buffers any more
            weights.place(buffer[: weights.byte_count])
        speed = self._measured()
        self._order = ReadOrder(len(self._weights))
        self._read_ahead()
        return StreamingCost(len(self._weights), self._images.byte_count, speed)

    def enter(self, index: int) -> None:
        """Have a layer's weights in memory. Raises OffloadFailed."""
        read = self._order.enter(index)
        self._read_ahead()
        self._weights[index].place(self._images.wait(read))

    def leave(self) -> None:
        """The layer that was entered last has computed, or all that computes it is launched."""
        self._images.used(self._order.leave().buffer)
        self._read_ahead()

    def close(self) -> None:
        self._images.close()

    def _read_ahead(self) -> None:
        for read in self._order.due():
            self._images.begin(read)

    def _measured(self) -> float:
        """Bytes a second of the layer that was read fastest: whatever else runs at the start slows others."""
        order, ends_s, fastest = ReadOrder(len(self._weights)), time.perf_counter() + MEASURE_S, 0.0
        for index, weights in enumerate(self._weights):
            began_s = time.perf_counter()
            if index >= MEASURED_MIN and began_s > ends_s:
                break
            read = order.enter(index)._replace(number=-2 - index)
            self._images.begin(read)
            self._images.wait(read)
            self._images.synchronize()
            order.leave()
            fastest = max(fastest, weights.byte_count / max(1e-9, time.perf_counter() - began_s))
        return fastest


@dataclass(frozen=True, slots=True)
class StreamedPlace:
    """One layer's, for the forward pass."""

    layers: StreamedLayers
    index: int

    def enter(self) -> None:
        self.layers.enter(self.index)

    def leave(self) -> None:
        self.layers.leave()
