"""Torch's operations between a model's kernels that the native library computes too, to the same bits.

A step that is recorded takes them from here, so that a replay need not go back to torch for them.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.native.library import BF16, F32, library
from engine.native.recording import RecordableLibrary

_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_aten: Any = torch.ops.aten
_CODES = {torch.float32: F32, torch.bfloat16: BF16}

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a dense tensor."""


@cache
def _functions() -> RecordableLibrary:
    native = library()
    native.baton_add.argtypes = [_POINTER, _POINTER, _POINTER, _I32, _I64]
    native.baton_scale.argtypes = [_POINTER, _POINTER, _I32, _I64, ctypes.c_float]
    native.baton_copy_runs.argtypes = [_POINTER, _I64, _I64, _POINTER, _I64, _I64, _I64, _I64, _I64]
    native.baton_take_rows.argtypes = [_POINTER, _POINTER, _I64, _I64, _POINTER]
    for name in ("add", "scale", "copy_runs", "take_rows"):
        getattr(native, f"baton_{name}").restype = None
    return native


class Glue:
    def __init__(self, empty: Empty) -> None:
        self._empty = empty

    def compute(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Tensor | None:
        """The result of one of torch's functions; None: it is none of these, or not with such arguments."""
        if func is _aten.add.Tensor and not named:
            return self._add(args[0], args[1])
        if func in (_aten.mul.Tensor, _aten.mul.Scalar) and not named:
            return self._scaled(args[0], args[1])
        if func in (_aten.contiguous.default, _aten.clone.default) and not named:
            x: Tensor = args[0]
            return None if x.is_contiguous() and func is _aten.contiguous.default else self._joined([x], 0)
        if func is _aten.cat.default:
            return self._joined(args[0], args[1] if len(args) > 1 else named.get("dim", 0))
        if func is _aten.index.Tensor and not named:
            return self._taken(args[0], args[1])
        if func is _aten.stack.default:
            parts: Sequence[Tensor] = args[0]
            dim: int = args[1] if len(args) > 1 else named.get("dim", 0)
            return self._joined([part.unsqueeze(dim) for part in parts], dim)
        return None

    def _add(self, a: Any, b: Any) -> Tensor | None:
        if not (_is_plain(a) and _is_plain(b) and a.shape == b.shape and a.dtype == b.dtype):
            return None
        out = self._empty(tuple(a.shape), a.dtype)
        addresses = (a.data_ptr(), b.data_ptr(), out.data_ptr())
        _functions().baton_add(*addresses, _CODES[a.dtype], a.numel())
        return out

    def _scaled(self, x: Any, factor: Any) -> Tensor | None:
        if not _is_plain(x) or not isinstance(factor, (int, float)):
            return None
        out = self._empty(tuple(x.shape), x.dtype)
        _functions().baton_scale(x.data_ptr(), out.data_ptr(), _CODES[x.dtype], x.numel(), float(factor))
        return out

    def _taken(self, x: Any, indices: Sequence[Any]) -> Tensor | None:
        """Rows of x, which are checked by whoever gives their numbers."""
        if len(indices) != 1 or not _is_plain(x):
            return None
        rows = indices[0]
        if not isinstance(rows, Tensor) or rows.dtype is not torch.int64 or rows.dim() != 1:
            return None
        if not rows.is_contiguous():
            return None
        out = self._empty((rows.shape[0], *x.shape[1:]), x.dtype)
        row_bytes = x.stride(0) * x.element_size()
        addresses = (x.data_ptr(), rows.data_ptr())
        _functions().baton_take_rows(*addresses, rows.shape[0], row_bytes, out.data_ptr())
        return out

    def _joined(self, parts: Sequence[Tensor], dim: int) -> Tensor | None:
        """Parts of at most three dimensions beside one another, whose last is dense; one part is copied."""
        first = parts[0]
        rank = first.dim()
        dim %= rank
        is_known = all(
            1 <= part.dim() <= 3 and part.stride(-1) == 1 and part.dtype == first.dtype and part.numel()
            for part in parts
        )
        if not is_known:
            return None
        shape = list(first.shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        out = self._empty(tuple(shape), first.dtype)
        start = 0
        for part in parts:
            _copy(part, out.narrow(dim, start, part.shape[dim]))
            start += part.shape[dim]
        return out


def _copy(x: Tensor, out: Tensor) -> None:
    missing = 3 - x.dim()
    sizes: list[int] = [*[1] * missing, *x.shape]
    outer, inner, run = sizes
    size = x.element_size()

    def strides(tensor: Tensor) -> tuple[int, int]:
        of_all: list[int] = [*[0] * missing, *tensor.stride()]
        return of_all[0] * size, of_all[1] * size

    _functions().baton_copy_runs(
        *(x.data_ptr(), *strides(x), out.data_ptr(), *strides(out), outer, inner, run * size)
    )


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _CODES and x.is_contiguous() and x.dim() > 0
