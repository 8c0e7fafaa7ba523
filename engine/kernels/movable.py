"""Packed weights whose memory may be changed: what lets a layer be in memory only while it computes.

All weights of a layer make one image, a run of bytes that can be written elsewhere and read back to another
address. An image begins at a multiple of 4096 bytes wherever it lies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

IMAGE_ALIGN = 4096
"""Disks are read past the page cache in whole blocks, into memory that is aligned like them."""
_SECTION_ALIGN = 64


class MovableWeights(Protocol):
    byte_count: int
    """Size of the image, a multiple of IMAGE_ALIGN."""

    def copy_to(self, image: Tensor) -> None:
        """Write the image. uint8 [byte_count], on any device. Only before the first `place`."""
        ...

    def place(self, image: Tensor) -> None:
        """Use the weights of this image, which is on the kernels' device, from now on. The memory that they
        had of their own is freed the first time."""
        ...


def image_layout(sizes: Sequence[int], addresses: Sequence[int] = ()) -> tuple[list[int], int]:
    """Offsets of sections of these sizes, and the size of the image. addresses: where the sections are now.
    They keep their places within cache lines, since libraries sum in another order where these differ."""
    offsets: list[int] = []
    end = 0
    for i, size in enumerate(sizes):
        offsets.append(end + (addresses[i] % _SECTION_ALIGN if addresses else 0))
        end = -(-(offsets[-1] + size) // _SECTION_ALIGN) * _SECTION_ALIGN
    return offsets, -(-end // IMAGE_ALIGN) * IMAGE_ALIGN


class MovableTensors:
    """Implements `MovableWeights` for packed weights that are made of tensors."""

    def __init__(self, packed: Iterable[object]) -> None:
        found = {id(tensor): tensor for tensor in _tensors(packed) if _is_dense(tensor)}
        self._tensors = tuple(found.values())
        self._offsets, self.byte_count = image_layout(
            [tensor.nbytes for tensor in self._tensors], [tensor.data_ptr() for tensor in self._tensors]
        )

    def copy_to(self, image: Tensor) -> None:
        for tensor, offset in zip(self._tensors, self._offsets, strict=True):
            flat = tensor.as_strided((tensor.numel(),), (1,))
            image[offset : offset + tensor.nbytes].view(tensor.dtype).copy_(flat)

    def place(self, image: Tensor) -> None:
        for tensor, offset in zip(self._tensors, self._offsets, strict=True):
            numbers = image[offset : offset + tensor.nbytes].view(tensor.dtype)
            storage = numbers.untyped_storage()
            tensor.set_(storage, numbers.storage_offset(), tensor.shape, tensor.stride())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the numbers fill a run of memory, in any order of the dimensions. Others stay in place."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0 and tensor.dtype is not torch.bool
