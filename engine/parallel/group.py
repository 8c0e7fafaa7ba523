"""The interface of the ranks that share collectives."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class GroupBroken(Exception):
    """A peer is dead, has aborted or called something else: this group computes nothing any more."""


class Group(Protocol):
    """Every call ends within the group's deadline. After GroupBroken each later call raises at once."""

    rank: int
    size: int

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum in place, in rank order and in float32, rounded once: the same bits on every rank. `x` is
        contiguous."""
        ...

    def all_gather(self, x: Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Tensor:
        """All ranks' parts in rank order along `dim`. sizes: of the parts along it; None: they are equal."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum along the first dimension."""
        ...

    def send(self, x: Tensor, to: int) -> None: ...

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor: ...

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...
