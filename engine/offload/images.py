"""Where images of streamed layers are kept, and how they get into one of two buffers."""

from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.movable import MovableWeights
from engine.model_files.offload_setting import BUFFERS
from engine.offload.order import Read


class OffloadFailed(RuntimeError):
    """A streamed layer did not arrive. The rank cannot go on."""


class LayerImages(Protocol):
    """One thread uses it."""

    byte_count: int
    """Size of all images."""
    bytes_read: int
    waited_s: float
    """Time for which the compute waited for reads, as far as the host knows."""
    place: str
    """Where the images are, for people."""

    def keep(self, weights: MovableWeights) -> None:
        """Keep the next layer's image, and free the memory that the layer has of its own. Raises
        SetupError: there is no room."""
        ...

    def start(self) -> Tensor:
        """Get ready to read. Returns a buffer on the device that every image fits into."""
        ...

    def begin(self, read: Read) -> None:
        """Begin to read an image into a buffer. It does not wait. Reads are carried out in this order."""
        ...

    def wait(self, read: Read) -> Tensor:
        """Wait for a read that was begun, and return the image, for steps on the device that are launched
        from now on. Raises OffloadFailed: it failed or takes too long."""
        ...

    def used(self, buffer: int) -> None:
        """What was launched so far is the last that uses this buffer, and the next read may overwrite it."""
        ...

    def synchronize(self) -> None:
        """Wait until the reads that were waited for are over on the device too."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class PinnedImages:
    """Images in page-locked host memory, copied beside the compute by the device's copy engine. Implements
    `LayerImages`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._images: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._copies = torch.cuda.Stream(device)
        self._arrived = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._used = [torch.cuda.Event() for _ in range(BUFFERS)]
        self.byte_count = self.bytes_read = 0
        self.waited_s = 0.0
        self.place = "page-locked host memory"

    def keep(self, weights: MovableWeights) -> None:
        image = torch.empty(weights.byte_count, dtype=torch.uint8, pin_memory=True)
        weights.copy_to(image)
        torch.cuda.synchronize(self._device)
        if len(self._staging) < len(image):
            self._staging = torch.empty(len(image), dtype=torch.uint8, device=self._device)
        weights.place(self._staging[: len(image)])
        self._images.append(image)
        self.byte_count += len(image)

    def start(self) -> Tensor:
        size = max(map(len, self._images))
        self._buffers = [self._staging, torch.empty(size, dtype=torch.uint8, device=self._device)]
        torch.cuda.synchronize(self._device)
        return self._buffers[0]

    def begin(self, read: Read) -> None:
        image = self._images[read.layer]
        self._copies.wait_event(self._used[read.buffer])  # returns at once if it was never recorded
        with torch.cuda.stream(self._copies):
            self._buffers[read.buffer][: len(image)].copy_(image, non_blocking=True)
        self._arrived[read.buffer].record(self._copies)
        self.bytes_read += len(image)

    def wait(self, read: Read) -> Tensor:
        torch.cuda.current_stream(self._device).wait_event(self._arrived[read.buffer])
        return self._buffers[read.buffer][: len(self._images[read.layer])]

    def used(self, buffer: int) -> None:
        self._used[buffer].record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._copies.synchronize()

    def close(self) -> None:
        self._images.clear()
