"""Groups whose ranks are processes of one host, through memory that they share."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from engine.native.recording import RecordableLibrary
from engine.parallel.group import (
    check_in_place,
    check_peer,
    check_reducible,
    check_root,
    gathered_shape,
    outer_and_inner,
    parts_along,
    parts_of_rows,
    tensor_kind,
)
from engine.parallel.segment import OverSegment, Segment, SegmentSizes, functions

CHUNK_BYTES = 256 * 1024
"""Large enough that the waits for the others are small beside the copies, small enough that the slots in use
stay in the second-level cache."""
RING_BYTES = 8 * 2**20
"""What a stage may have sent before the next one takes it. Only ranks that do send take the pages."""
_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`enum Dtype` in native/src/runtime.h, and float16."""
_ALL = -1


@cache
def _functions() -> RecordableLibrary:
    native = functions()
    native.baton_all_reduce.argtypes = [_POINTER, _POINTER, _I64, _I32, _I64]
    native.baton_reduce_scatter.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER, _I32, _I64]
    native.baton_gather.argtypes = [_POINTER, _POINTER, _POINTER, _I64, _POINTER, _I32, _I64]
    native.baton_broadcast.argtypes = [_POINTER, _POINTER, _I64, _I32, _I64]
    native.baton_send.argtypes = [_POINTER, _POINTER, _I64, ctypes.c_uint64, _I32, _I64]
    native.baton_receive.argtypes = [_POINTER, _POINTER, _I64, ctypes.c_uint64, _I32, _I64]
    for name in ("all_reduce", "reduce_scatter", "gather", "broadcast", "send", "receive"):
        getattr(native, f"baton_{name}").restype = _I32
    for name in ("all_reduce", "reduce_scatter", "gather", "broadcast"):
        getattr(native, f"baton_{name}").waits_for_ranks = True
    return native


class SharedMemoryGroup(OverSegment):
    """See `engine.parallel.group.Group`. Tensors are in host memory."""

    def __init__(self, segment: Segment, *, deadline_s: float) -> None:
        super().__init__(segment, deadline_s=deadline_s)
        native = _functions()
        self.size, self._call = segment.sizes.ranks, segment.call
        self._rings: set[int] = set()
        self._reduce, self._scatter = native.baton_all_reduce, native.baton_reduce_scatter
        self._gather_parts, self._broadcast = native.baton_gather, native.baton_broadcast
        self._send, self._receive = native.baton_send, native.baton_receive

    @classmethod
    def create(
        cls, size: int, *, deadline_s: float, chunk_bytes: int = CHUNK_BYTES, ring_bytes: int = RING_BYTES
    ) -> "SharedMemoryGroup":
        """Make a group of `size` ranks, as rank 0. The others join by its `address`. Raises SetupError."""
        sizes = SegmentSizes(size, chunk_bytes=chunk_bytes, ring_bytes=ring_bytes)
        return cls(Segment.create(sizes), deadline_s=deadline_s)

    @classmethod
    def join(cls, address: str, rank: int, *, deadline_s: float) -> "SharedMemoryGroup":
        """Join the group that rank 0 of this host has made. Raises SetupError."""
        return cls(Segment.join(address, rank), deadline_s=deadline_s)

    def replay(self, calls: Callable[[], None]) -> None:
        """Let `calls` make recorded calls of this group again, as all ranks do. Raises GroupBroken, and what
        `calls` raises while the group is whole."""
        self._segment.replay(calls)

    def all_reduce_(self, x: Tensor) -> Tensor:
        code = _CODES.get(x.dtype)
        if code is None or not x.is_contiguous():
            check_reducible(x)
            check_in_place(x)
        self._call(self._reduce, x.data_ptr(), x.numel(), code, self._timeout_ns)
        return x

    def all_gather(self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
        out = self._gather(x, dim, sizes, _ALL)
        assert out is not None
        return out

    def gather(
        self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, to: int = 0
    ) -> Tensor | None:
        check_root(self.size, to)
        return self._gather(x, dim, sizes, to)

    def _gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None, to: int) -> Tensor | None:
        parts = parts_along(x, dim, sizes, rank=self.rank, size=self.size)
        rows, unit_bytes = outer_and_inner(x, dim)
        wanted = to in (_ALL, self.rank)
        out = x.new_empty(gathered_shape(x, dim, parts)) if wanted else None
        x = x.contiguous()
        row_bytes = (_I64 * self.size)(*(length * unit_bytes for length in parts))
        out_pointer = None if out is None else out.data_ptr()
        self._call(self._gather_parts, x.data_ptr(), out_pointer, rows, row_bytes, to, self._timeout_ns)
        return out

    def reduce_scatter(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        check_reducible(x)
        parts = parts_of_rows(x, sizes, size=self.size)
        x = x.contiguous()
        row = x.numel() // x.shape[0] if x.shape[0] else 0
        out = x.new_empty((parts[self.rank], *x.shape[1:]))
        counts = (_I64 * self.size)(*(rows * row for rows in parts))
        self._call(
            *(self._scatter, x.data_ptr(), out.data_ptr(), counts, _CODES[x.dtype], self._timeout_ns),
        )
        return out

    def broadcast_(self, x: Tensor, *, source: int = 0) -> Tensor:
        check_root(self.size, source)
        check_in_place(x)
        self._call(self._broadcast, x.data_ptr(), x.nbytes, source, self._timeout_ns)
        return x

    def send(self, x: Tensor, to: int) -> None:
        check_peer(self.rank, self.size, to)
        if to not in self._rings:
            self._segment.reserve_ring(to)
            self._rings.add(to)
        x = x.contiguous()
        kind = tensor_kind(x.shape, x.dtype)
        self._call(self._send, x.data_ptr(), x.nbytes, kind, to, self._timeout_ns)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        check_peer(self.rank, self.size, source)
        out = torch.empty(tuple(shape), dtype=dtype)
        kind = tensor_kind(out.shape, dtype)
        self._call(self._receive, out.data_ptr(), out.nbytes, kind, source, self._timeout_ns)
        return out
