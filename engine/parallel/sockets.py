"""Groups whose ranks may be on several hosts, over TCP.

Messages go from rank to rank. Collectives go through rank 0, which compares what the ranks call and takes
sums in their order: between hosts there are few of them, since tensor ranks share a host.
"""

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.parallel.group import (
    check_in_place,
    check_peer,
    check_reducible,
    check_root,
    gathered_shape,
    parts_along,
    parts_of_rows,
    tensor_kind,
)
from engine.parallel.mesh import Mesh, OverMesh, Purpose

_HEAD = struct.Struct("<QQQ")
"""Number of the call, what is called, and the bytes that follow."""
_JOINED_BYTES = 64 * 1024
"""A message as short as this is copied behind its head, so that both leave at once."""
_REDUCE, _GATHER, _GATHER_TO, _SCATTER, _BROADCAST = range(5)
_NAMES = ("all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast")

Combine = Callable[[list[Tensor]], list[Tensor]]
"""Rank 0 makes of what every rank has brought, as bytes, what every rank gets."""


class SocketGroup(OverMesh):
    """See `engine.parallel.group.Group`. Tensors are in host memory."""

    def __init__(self, mesh: Mesh, *, deadline_s: float) -> None:
        super().__init__(mesh, deadline_s=deadline_s)
        self.size = mesh.size
        self._number = 0

    def wait_for_all(self, *, timeout_s: float) -> None:
        super().wait_for_all(timeout_s=timeout_s)
        self.size = self._mesh.size

    # --- collectives --------------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor) -> Tensor:
        check_reducible(x)
        check_in_place(x)

        def total(parts: list[Tensor]) -> list[Tensor]:
            return [_as_bytes(_sum([part.view(x.dtype) for part in parts]))] * self.size

        kind = tensor_kind((_REDUCE, x.numel()), x.dtype)
        self._meet(_REDUCE, kind, _as_bytes(x), [x.nbytes] * self.size, total, into=_as_bytes(x))
        return x

    def all_gather(self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
        parts = parts_along(x, dim, sizes, rank=self.rank, size=self.size)
        out = x.new_empty(gathered_shape(x, dim, parts))
        self._gather(_GATHER, x, dim, parts, out, set(range(self.size)))
        return out

    def gather(
        self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, to: int = 0
    ) -> Tensor | None:
        check_root(self.size, to)
        parts = parts_along(x, dim, sizes, rank=self.rank, size=self.size)
        out = x.new_empty(gathered_shape(x, dim, parts)) if to == self.rank else None
        self._gather(_GATHER_TO, x, dim, parts, out, {to})
        return out

    def _gather(
        self, call: int, x: Tensor, dim: int, parts: tuple[int, ...], out: Tensor | None, to: set[int]
    ) -> None:
        shapes = [(*x.shape[: dim % x.dim()], length, *x.shape[dim % x.dim() + 1 :]) for length in parts]
        byte_counts = [torch.Size(shape).numel() * x.element_size() for shape in shapes]

        def joined(found: list[Tensor]) -> list[Tensor]:
            pairs = zip(found, shapes, strict=True)
            whole = _as_bytes(torch.cat([part.view(x.dtype).reshape(shape) for part, shape in pairs], dim))
            return [whole if rank in to else whole[:0] for rank in range(self.size)]

        kind = tensor_kind((call, dim % x.dim(), *sorted(to), *shapes[0], *parts), x.dtype)
        into = _as_bytes(out) if out is not None else None
        self._meet(call, kind, _as_bytes(x.contiguous()), byte_counts, joined, into=into)

    def reduce_scatter(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        check_reducible(x)
        parts = parts_of_rows(x, sizes, size=self.size)
        out = x.new_empty((parts[self.rank], *x.shape[1:]))

        def rows(found: list[Tensor]) -> list[Tensor]:
            total = _sum([part.view(x.dtype) for part in found]).reshape(x.shape)
            return [_as_bytes(part.contiguous()) for part in total.split(list(parts))]

        kind = tensor_kind((_SCATTER, *parts, *x.shape), x.dtype)
        self._meet(
            _SCATTER, kind, _as_bytes(x.contiguous()), [x.nbytes] * self.size, rows, into=_as_bytes(out)
        )
        return out

    def broadcast_(self, x: Tensor, *, source: int = 0) -> Tensor:
        check_root(self.size, source)
        check_in_place(x)
        own = _as_bytes(x)
        byte_counts = [x.nbytes if rank == source else 0 for rank in range(self.size)]
        kind = tensor_kind((_BROADCAST, x.nbytes, source), torch.uint8)
        brought = own if self.rank == source else own[:0]
        self._meet(
            _BROADCAST, kind, brought, byte_counts, lambda found: [found[source]] * self.size, into=own
        )
        return x

    def _meet(
        self,
        call: int,
        kind: int,
        brought: Tensor,
        byte_counts: Sequence[int],
        combine: Combine,
        *,
        into: Tensor | None,
    ) -> None:
        """Bring this rank's bytes, `byte_counts` of all ranks, and get what `combine` says into `into`. It
        returns when rank 0 has heard all."""
        self._mesh.check_all_there()
        self._number += 1
        end_s, name = time.monotonic() + self._deadline_s, _NAMES[call]
        if self.rank:
            self._send(0, Purpose.COLLECTIVES, kind, brought, name, end_s)
            self._receive(0, Purpose.COLLECTIVES, kind, into, name, end_s)
            return
        found = [brought]
        for rank in range(1, self.size):
            part = torch.empty(byte_counts[rank], dtype=torch.uint8)
            self._receive(rank, Purpose.COLLECTIVES, kind, part, name, end_s)
            found.append(part)
        results = combine(found)
        for rank in range(1, self.size):
            self._send(rank, Purpose.COLLECTIVES, kind, results[rank], name, end_s)
        if into is not None:
            into.copy_(results[0])

    # --- messages -----------------------------------------------------------------------------------

    def send(self, x: Tensor, to: int) -> None:
        check_peer(self.rank, self.size, to)
        self._mesh.check_all_there()
        end_s, kind = time.monotonic() + self._deadline_s, tensor_kind(x.shape, x.dtype)
        self._send(to, Purpose.MESSAGES, kind, _as_bytes(x.contiguous()), "send", end_s)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        check_peer(self.rank, self.size, source)
        out = torch.empty(tuple(shape), dtype=dtype)
        end_s, kind = time.monotonic() + self._deadline_s, tensor_kind(out.shape, dtype)
        self._receive(source, Purpose.MESSAGES, kind, _as_bytes(out), "recv", end_s)
        return out

    def _send(self, to: int, purpose: Purpose, kind: int, data: Tensor, call: str, end_s: float) -> None:
        head = _HEAD.pack(self._number_of(purpose), kind, data.nbytes)
        body = _memory(data)
        short = data.nbytes <= _JOINED_BYTES
        self._mesh.send(to, purpose, [head + body] if short else [head, body], call, end_s)

    def _receive(
        self, source: int, purpose: Purpose, kind: int, into: Tensor | None, call: str, end_s: float
    ) -> None:
        head, byte_count = bytearray(_HEAD.size), 0 if into is None else into.nbytes
        self._mesh.receive(source, purpose, memoryview(head), call, end_s)
        expected = (self._number_of(purpose), kind, byte_count)
        if (found := _HEAD.unpack(head)) != expected:
            self._mesh.abort(
                f"ranks call different things: rank {self.rank} {call} {expected}, rank {source} {found}"
            )
            self._mesh.check()
        if into is not None and byte_count:
            self._mesh.receive(source, purpose, _memory(into), call, end_s)

    def _number_of(self, purpose: Purpose) -> int:
        return self._number if purpose is Purpose.COLLECTIVES else 0


def _as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    return x.reshape(-1).view(torch.uint8)


def _memory(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


def _sum(parts: list[Tensor]) -> Tensor:
    """The sum in the order of ranks, in float32, rounded once."""
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part.float()
    return total.to(parts[0].dtype)
