"""Memory for the results between a step's kernels that stays where it is, and is used again as soon as nobody
refers to it."""

from typing import Any

import torch
from torch import Tensor

from engine.native.recording import NotRecordable

_SIZE_MIN = 256


class _StepBuffer:
    def __init__(self, size: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self.storage: Any = self.memory.untyped_storage()
        self._idle_count = self._count()

    def _count(self) -> int:
        # CUDA graph trees in torch itself know in the same way whether memory is still in use.
        torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage] - there is no public way
        return torch_c._storage_Use_Count(self.storage._cdata)

    @property
    def is_idle(self) -> bool:
        """No tensor but its own refers to the memory."""
        return self._count() == self._idle_count


class StepBuffers:
    """All recorded batch sizes share them, since one is replayed at a time. Sizes are powers of two, so the
    buffers of all smaller batches together are no more than those of the largest."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._by_size: dict[int, list[_StepBuffer]] = {}
        self._places: set[int] = set()
        self.memory_bytes = 0

    def has(self, place: int) -> bool:
        """Whether a storage that begins at this address is one of these."""
        return place in self._places

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A dense tensor. Raises NotRecordable: there would be too much memory."""
        count = 1
        for size in shape:
            count *= size
        nbytes = count * dtype.itemsize
        return self._buffer(self._room(nbytes)).memory[:nbytes].view(dtype).view(shape)

    def _room(self, nbytes: int) -> int:
        """Room that a tensor of so many bytes is given."""
        return nbytes

    def _buffer(self, nbytes: int) -> _StepBuffer:
        size = max(_SIZE_MIN, 1 << max(0, nbytes - 1).bit_length())
        of_size = self._by_size.setdefault(size, [])
        buffer = next((buffer for buffer in of_size if buffer.is_idle), None)
        if buffer is None:
            if self.memory_bytes + size > self._bytes_max:
                raise NotRecordable(f"the results of a step take more than {self._bytes_max} bytes")
            buffer = _StepBuffer(size)
            of_size.append(buffer)
            self._places.add(buffer.storage.data_ptr())
            self.memory_bytes += size
        return buffer


class LargestStepBuffers(StepBuffers):
    """Memory for one forward pass of any size: every result lies where that of the largest one did."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max)
        self._rooms: list[int] = []
        self._next = 0
        self._is_known = False

    def begin(self) -> None:
        """A pass begins. The first one is the largest, and no result of one before is referred to."""
        self._is_known = bool(self._rooms)
        self._next = 0

    def _room(self, nbytes: int) -> int:
        if not self._is_known:
            self._rooms.append(nbytes)
            return nbytes
        self._next += 1
        if self._next > len(self._rooms) or nbytes > self._rooms[self._next - 1]:
            raise NotRecordable("a smaller step has a result that the largest has not")
        return self._rooms[self._next - 1]
