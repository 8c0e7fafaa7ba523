"""The order in which streamed layers are read, over one step after another, without IO.

Layers are used in turn, and the first one again after the last. Read n is of layer n modulo their count,
into buffer n modulo two. It may begin when the layer that the buffer held before is done with. So one layer
is read while the one before it computes, also the first one of the next step while the last of this one does.
"""

from typing import NamedTuple

from engine.model_files.offload_setting import BUFFERS


class Read(NamedTuple):
    number: int
    layer: int
    """Place among the streamed layers."""
    buffer: int


class ReadOrder:
    def __init__(self, layer_count: int) -> None:
        """layer_count: streamed ones."""
        self._layer_count = layer_count
        self._begun = self._done = 0

    def due(self) -> list[Read]:
        """The reads that may begin now. They count as begun."""
        numbers = range(self._begun, self._done + BUFFERS)
        self._begun = max(self._begun, numbers.stop)
        return [self._read(number) for number in numbers]

    def enter(self, index: int) -> Read:
        """The read that brings the layer which is used now. Layers that the step left out, because it failed
        or needed them no further, are passed over."""
        self._done += (index - self._done) % self._layer_count
        self._begun = max(self._begun, self._done)
        return self._read(self._done)

    def leave(self) -> Read:
        """The layer in use is done with. Returns the read that brought it."""
        self._done += 1
        return self._read(self._done - 1)

    def _read(self, number: int) -> Read:
        return Read(number, number % self._layer_count, number % BUFFERS)
