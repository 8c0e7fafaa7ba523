"""Attention, rotary embedding and block copies in C++ (`engine/native/src/attention.cpp`,
`rope_store.cpp`, `blocks.cpp`): straight from the paged pool, the same bits in whatever batch or chunk."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.core.errors import SetupError
from baton.core.geometry import DTypeName, KVGeometry, QuantName
from engine.kernels.interface import AttentionSpec, BatchLayout, RopeTables
from engine.kv.pool import KVPool
from engine.native.library import BF16, F32, library
from engine.native.recording import RecordableLibrary

_STORED: dict[DTypeName | QuantName, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
"""`enum Stored` in src/kv.h."""
_DTYPES: dict[DTypeName, int] = {"float32": F32, "bfloat16": BF16}
_HEAD_DIM_MAX = 2048
_CALLS_KEPT = 1024


class _Pool(ctypes.Structure):
    _fields_ = (
        ("base", c_void_p),
        *((name, c_int64) for name in ("block_bytes", "values_bytes", "planes", "heads", "positions")),
        *((name, c_int64) for name in ("head_dim", "value_dim")),
        ("stored", c_int32),
        ("dtype", c_int32),
    )


class _NativeBatch(ctypes.Structure):
    _fields_ = (
        ("spans", c_void_p),
        ("tables", c_void_p),
        ("span_count", c_int64),
        ("token_count", c_int64),
    )


class _RotateCall(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        ("cos", c_void_p),
        ("sin", c_void_p),
        *((name, c_int64) for name in ("half", "q_heads", "layer")),
    )


class _RotateOnlyCall(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        *((name, c_int64) for name in ("half", "heads", "token_count")),
    )


class _AttentionCall(ctypes.Structure):
    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
        ("sinks", c_void_p),
        *((name, c_int64) for name in ("layer", "heads", "window")),
        ("scale", c_float),
        ("softcap", c_float),
    )


@cache
def _library() -> RecordableLibrary:
    native = library()
    pool, batch, pointer = ctypes.POINTER(_Pool), ctypes.POINTER(_NativeBatch), c_void_p
    for name, arguments in {
        "attention": (pool, batch, ctypes.POINTER(_AttentionCall)),
        "rotate_and_store": (pool, batch, ctypes.POINTER(_RotateCall)),
        "rotate": (c_int32, ctypes.POINTER(_RotateOnlyCall)),
        "store_latent": (pool, batch, pointer, c_int64, c_int64),
        "copy_blocks": (pool, pointer, c_int64),
        "gather_blocks": (pool, pointer, c_int64, pointer),
        "scatter_blocks": (pool, pointer, c_int64, pointer),
    }.items():
        getattr(native, f"baton_{name}").argtypes = arguments
    for name in ("rotate", "store_latent", "copy_blocks", "gather_blocks", "scatter_blocks"):
        getattr(native, f"baton_{name}").restype = None
    return native


@dataclass(frozen=True, slots=True)
class _Rope:
    cos: Tensor
    """float32 [T, R / 2]"""
    sin: Tensor
    cos_address: int
    sin_address: int
    half: int


@dataclass(frozen=True, slots=True)
class NativePlan:
    batch: _NativeBatch
    """Points into the two arrays."""
    spans: np.ndarray
    """int32 [n, 4], see `struct Span` in src/kv.h."""
    tables: np.ndarray
    """int32: the block tables of all spans, one after another."""
    ropes: dict[int, _Rope]
    token_count: int


class NativeAttention:
    """The part of `engine.kernels.interface.Kernels` that knows the KV pool. One thread calls it."""

    def __init__(self, pool: KVPool) -> None:
        """Raises SetupError: a kind of KV this has no code for; NativeUnavailable: no compiler."""
        geometry = pool.geometry
        self.block_tokens = pool.geometry.block_tokens
        _check(geometry, pool.device)
        self._native = _library()
        self._memory = pool  # the struct below holds its address
        self._value_dim = geometry.value_dim if geometry.planes == 1 else geometry.head_dim
        self._pool = _Pool(
            base=pool.base_address,
            block_bytes=pool.block_bytes,
            values_bytes=geometry.values_bytes,
            planes=geometry.planes,
            heads=geometry.kv_head_count,
            positions=geometry.block_tokens,
            head_dim=geometry.head_dim,
            value_dim=self._value_dim,
            stored=_STORED[geometry.stored_dtype],
            dtype=_DTYPES[geometry.dtype],
        )
        self._dtype = _DTYPES[geometry.dtype]
        # Kept and changed from call to call: making one costs as much as the call.
        self._rotate_call, self._rotate_only_call = _RotateCall(), _RotateOnlyCall()
        self._attention_calls: dict[int, tuple[AttentionSpec, _AttentionCall]] = {}

    # --- per step ---

    def plan(self, layout: BatchLayout, ropes: RopeTables, *, windows: frozenset[int]) -> NativePlan:
        del windows  # masks are made on the way
        spans, tables = self.numbers(layout)
        return self.plan_of(spans, tables, ropes, len(spans), layout.token_count)

    def numbers(self, layout: BatchLayout) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The spans, int32 [n, 4], and the block tables of all of them, see `NativePlan`. Raises IndexError:
        a position or block that there is not."""
        numbers: list[int] = []
        row = first_block = 0
        for span in layout.spans:
            room = len(span.block_ids) * self._memory.geometry.block_tokens
            if not 0 <= span.first_position <= room - span.token_count:
                raise IndexError(f"{span.token_count} tokens at {span.first_position} of {room} positions")
            numbers += (span.first_position, span.token_count, row, first_block)
            row += span.token_count
            first_block += len(span.block_ids)
        ids = chain.from_iterable(span.block_ids for span in layout.spans)
        tables = np.fromiter(ids, dtype=np.int32, count=first_block)
        self._check_ids(tables)
        return np.array(numbers, dtype=np.int32).reshape(-1, 4), tables

    def plan_of(
        self,
        spans: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
        ropes: RopeTables,
        span_count: int,
        token_count: int,
    ) -> NativePlan:
        """A plan of numbers that are the caller's to check, and may change from step to step where they lie.
        spans and tables: see `NativePlan`; as many as they may ever be."""
        batch = _NativeBatch(spans.ctypes.data, tables.ctypes.data, span_count, token_count)
        rows = {name: _rope(*table) for name, table in ropes.items()}
        return NativePlan(batch, spans, tables, rows, token_count)

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, plan: NativePlan
    ) -> Tensor:
        """Overwrites q and returns it."""
        rope, call = plan.ropes[spec.rope], self._rotate_call
        call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.q_stride, call.k_stride, call.v_stride = q.stride(0), k.stride(0), v.stride(0)
        call.cos, call.sin, call.half = rope.cos_address, rope.sin_address, rope.half
        call.q_heads, call.layer = q.shape[1], spec.layer
        status = self._native.baton_rotate_and_store(self._pool, plan.batch, call)
        assert status == 0, (q.shape, k.shape, rope.half)
        return q

    def rotate(self, x: Tensor, *, rope: int, plan: NativePlan) -> Tensor:
        """Overwrites x and returns it."""
        table, call = plan.ropes[rope], self._rotate_only_call
        assert x.shape[2] == 2 * table.half
        assert x.stride(2) == 1
        call.x, call.token_stride, call.head_stride = x.data_ptr(), x.stride(0), x.stride(1)
        call.cos, call.sin, call.half = table.cos_address, table.sin_address, table.half
        call.heads, call.token_count = x.shape[1], x.shape[0]
        self._native.baton_rotate(self._dtype, call)
        return x

    def store_latent(self, latent: Tensor, *, layer: int, plan: NativePlan) -> None:
        self._native.baton_store_latent(self._pool, plan.batch, latent.data_ptr(), latent.stride(0), layer)

    def attention(self, q: Tensor, *, spec: AttentionSpec, plan: NativePlan) -> Tensor:
        tokens, heads = q.shape[0], q.shape[1]
        out = torch.empty((tokens, heads, self._value_dim), dtype=q.dtype)
        call = self._attention_call(spec)
        call.q, call.q_stride, call.out, call.heads = q.data_ptr(), q.stride(0), out.data_ptr(), heads
        status = self._native.baton_attention(self._pool, plan.batch, call)
        assert status == 0, q.shape
        return out

    def _attention_call(self, spec: AttentionSpec) -> _AttentionCall:
        kept = self._attention_calls.get(id(spec))
        if kept is not None:
            return kept[1]
        if len(self._attention_calls) >= _CALLS_KEPT:
            self._attention_calls.clear()
        call = _AttentionCall(
            sinks=None if spec.sinks is None else spec.sinks.data_ptr(),
            layer=spec.layer,
            window=spec.window,
            scale=spec.scale,
            softcap=spec.softcap,
        )
        self._attention_calls[id(spec)] = (spec, call)  # the spec lives on, so its id is not given again
        return call

    # --- blocks ---

    def _check_ids(self, ids: npt.NDArray[np.int32]) -> None:
        """The code in C++ reads and writes wherever it is told. Raises IndexError."""
        if ids.size and (ids.min() < 0 or ids.max() >= self._memory.block_count):
            raise IndexError(f"blocks {ids.min()} to {ids.max()} of {self._memory.block_count}")

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        flat = np.array(pairs, dtype=np.int32)
        self._check_ids(flat)
        self._native.baton_copy_blocks(self._pool, flat.ctypes.data, len(pairs))

    def gather_blocks(self, block_ids: Sequence[int]) -> Tensor:
        ids = np.array(block_ids, dtype=np.int32)
        self._check_ids(ids)
        data = torch.empty((len(ids), self._memory.block_bytes), dtype=torch.uint8)
        self._native.baton_gather_blocks(self._pool, ids.ctypes.data, len(ids), data.data_ptr())
        return data

    def scatter_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        ids, data = np.array(block_ids, dtype=np.int32), data.contiguous()
        assert data.shape == (len(ids), self._memory.block_bytes)
        self._check_ids(ids)
        self._native.baton_scatter_blocks(self._pool, ids.ctypes.data, len(ids), data.data_ptr())


def _rope(cos: Tensor, sin: Tensor) -> _Rope:
    cos, sin = cos.contiguous(), sin.contiguous()
    assert cos.dtype == sin.dtype == torch.float32
    return _Rope(cos, sin, cos.data_ptr(), sin.data_ptr(), cos.shape[1])


def _check(geometry: KVGeometry, device: torch.device) -> None:
    if device.type != "cpu":
        raise SetupError(
            f"engine.kernels=native computes on the CPU only, not on {device}: use triton or torch"
        )
    if geometry.dtype not in _DTYPES or geometry.stored_dtype not in _STORED:
        raise SetupError(
            f"engine.kernels=native has no code for {geometry.stored_dtype} KV: "
            "set model.dtype to bfloat16, or engine.kernels to torch"
        )
    if geometry.head_dim > _HEAD_DIM_MAX:
        raise SetupError(
            f"engine.kernels=native has no code for heads of {geometry.head_dim} numbers (at most "
            f"{_HEAD_DIM_MAX}): set engine.kernels to torch"
        )
