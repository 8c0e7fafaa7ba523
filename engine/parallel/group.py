"""What the ranks of one group do together, whatever carries it.

Every rank of a group makes the same calls in the same order. A call ends within the group's deadline: with
its result, or with GroupBroken if a peer died, gave the group up, called something else, or did not call at
all. A broken group stays broken. Its worker is lost as a whole and starts anew.
"""

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from baton.core.errors import PeerFailure

ADDRESS_BYTES = 128
REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES: tuple[torch.dtype, ...] = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)


class GroupBroken(PeerFailure):
    """The group is over. The message names the rank and the call."""

    @property
    def is_farewell(self) -> bool:
        """A rank has left in good order, as all do when their worker ends."""
        return str(self).endswith("has left the group")


class Group(Protocol):
    """One rank's end of a group. Calls come from one thread; `abort` and `close` may come from any.

    Sums are taken in the order of ranks, in float32, and rounded once, so that every rank has the same bits,
    every time. Tensors are contiguous where this is not said otherwise.
    """

    rank: int
    size: int

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace x by the sum of all ranks' x, and return it. x must be contiguous."""
        ...

    def all_gather(self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
        """The ranks' parts, one after the other along `dim`. `sizes` are their lengths along it; None: all as
        long as this one."""
        ...

    def gather(
        self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, to: int = 0
    ) -> Tensor | None:
        """What `all_gather` returns, on rank `to` only; None on the others."""
        ...

    def reduce_scatter(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """This rank's part of the sum of all ranks' x. The parts divide the first dimension, into `sizes`
        rows or alike."""
        ...

    def broadcast_(self, x: Tensor, *, source: int = 0) -> Tensor:
        """Replace x by rank `source`'s, and return it. x must be contiguous."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Send x to another rank. It returns when the bytes have left x, which may be before the other calls
        `recv`."""
        ...

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """The next tensor that rank `source` sends to this one."""
        ...

    def settle(self) -> None:
        """Return when the calls of this rank have ended, for groups whose calls go on after they have
        returned. A result counts only then. Raises GroupBroken."""
        ...

    def be_strict(self) -> None:
        """All ranks serve from now on, so that their silence means something. Any thread may call."""
        ...

    def abort(self, reason: str) -> None:
        """Give the group up: calls in progress and all later ones raise GroupBroken on every rank. The first
        reason counts. Idempotent."""
        ...

    def close(self) -> None:
        """Leave the group and give its memory back. Calls in progress raise. Idempotent."""
        ...


def broadcast_address(group: Group, address: str, *, source: int = 0) -> str:
    """Rank `source`'s address of something that it has made; what the others pass does not matter."""
    text = address.encode() if group.rank == source else b""
    assert len(text) <= ADDRESS_BYTES
    letters = torch.frombuffer(bytearray(text.ljust(ADDRESS_BYTES, b"\0")), dtype=torch.uint8)
    return bytes(group.broadcast_(letters, source=source).tolist()).rstrip(b"\0").decode()


# --- checks that every backend makes, before it touches a byte ---


def check_reducible(x: Tensor) -> None:
    if x.dtype not in REDUCIBLE:
        raise TypeError(f"{x.dtype} cannot be summed: float32, bfloat16 and float16 can")


def check_in_place(x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"a tensor with strides {x.stride()} cannot be replaced in place")


def check_peer(rank: int, size: int, peer: int) -> None:
    if not 0 <= peer < size or peer == rank:
        raise ValueError(f"rank {peer} is no peer of rank {rank} in a group of {size}")


def check_root(size: int, root: int) -> None:
    if not 0 <= root < size:
        raise ValueError(f"rank {root} of a group of {size}")


def parts_along(x: Tensor, dim: int, sizes: Sequence[int] | None, *, rank: int, size: int) -> tuple[int, ...]:
    """The lengths of all ranks' parts along `dim`, of which x is this rank's."""
    if x.dim() == 0:
        raise ValueError("a tensor without dimensions has no parts")
    length = x.shape[dim]  # raises IndexError for a dimension that x does not have
    if sizes is None:
        return (length,) * size
    if len(sizes) != size or min(sizes) < 0 or sizes[rank] != length:
        raise ValueError(f"sizes {list(sizes)} of {size} ranks, rank {rank} has {length}")
    return tuple(sizes)


def parts_of_rows(x: Tensor, sizes: Sequence[int] | None, *, size: int) -> tuple[int, ...]:
    """The rows of x that each rank gets."""
    if x.dim() == 0:
        raise ValueError("a tensor without dimensions has no rows")
    if sizes is None:
        if x.shape[0] % size:
            raise ValueError(f"{x.shape[0]} rows do not divide into {size} equal parts: name the sizes")
        return (x.shape[0] // size,) * size
    if len(sizes) != size or min(sizes) < 0 or sum(sizes) != x.shape[0]:
        raise ValueError(f"sizes {list(sizes)} of {size} ranks for {x.shape[0]} rows")
    return tuple(sizes)


def gathered_shape(x: Tensor, dim: int, sizes: Sequence[int]) -> tuple[int, ...]:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return tuple(shape)


def outer_and_inner(x: Tensor, dim: int) -> tuple[int, int]:
    """(number of rows, bytes of one row for each unit of length) of x as rows that end in `dim`."""
    dim %= x.dim()
    return prod(x.shape[:dim]), prod(x.shape[dim + 1 :]) * x.element_size()


def tensor_kind(shape: Sequence[int], dtype: torch.dtype) -> int:
    """A number that tells tensors apart that have the same number of bytes. The same in every process."""
    number = _DTYPES.index(dtype)
    for length in shape:
        number = (number * 1_000_003 + length + 1) % 2**64
    return number
