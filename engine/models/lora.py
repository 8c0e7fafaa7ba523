"""Low-rank adapters beside the matrices of a model (arXiv 2106.09685).

y += (x A^T) B^T for the rows of x whose sequence has the adapter; the scale is part of B. Both products
are the kernels' own `linear`, so a row's result does not depend on what else is in the batch where theirs
does not. Matrices that are joined (q, k, v) have one A with the rows of all parts, and a B with a block
per part: one pair of products, as for a single matrix.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RANK_MULTIPLE = 32
"""Ranks are filled up with zeros to a multiple of this: kernels are slow or absent for odd sizes."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Product that an adapter adds to one joined matrix."""

    a: Tensor
    """[R, in]"""
    b: Tensor
    """[out, R], scale included."""


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """Product that an adapter adds to a joined matrix from row first_row on, as it is stored."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[rows, rank]"""
    scale: float
    first_row: int


def join_parts(
    parts: list[LowRankPart], *, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device
) -> LowRank:
    rank = sum(part.a.shape[0] for part in parts)
    padded = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
    a = torch.zeros((padded, in_size), dtype=dtype)
    b = torch.zeros((out_size, padded), dtype=dtype)
    at = 0
    for part in parts:
        ranks = slice(at, at + part.a.shape[0])
        rows = slice(part.first_row, part.first_row + part.b.shape[0])
        a[ranks] = part.a.to(dtype)
        b[rows, ranks] = (part.b.float() * part.scale).to(dtype)
        at = ranks.stop
    return LowRank(a.to(device), b.to(device))


def group_by_slot(slots: Tensor) -> tuple[tuple[int, Tensor | None], ...]:
    """(slot, the rows that have it; None: all) of slots int64 [T], -1 included."""
    present: list[int] = torch.unique(slots).tolist()
    if len(present) == 1:
        return ((present[0], None),)
    return tuple((slot, (slots == slot).nonzero().squeeze(1)) for slot in present)
