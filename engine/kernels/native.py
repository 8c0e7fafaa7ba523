"""The kernels for the CPU: `engine.native`'s C++ behind the interface.

Every method is one call into the library; what surrounds it is kept to a few microseconds, because a
step of a small model is a hundred such calls.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.devices import TORCH_DTYPES
from engine.kernels.interface import Activation
from engine.kernels.native_attention import NativeAttention
from engine.kernels.native_matrices import MovableMatrices, NativeMatrix, pack_matrix
from engine.kernels.weights import ExpertMatrices, Matrix
from engine.kv.pool import KVPool
from engine.native.build import NativeUnavailable
from engine.native.library import BF16, F32, features, library, set_threads
from engine.native.recording import NativeFunction, RecordableLibrary

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swiglu_oai": 3}
"""`enum Activation` in native/src/vmath.h."""
_NO_ACTIVATION = -1
_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class NativeExperts:
    gate_up: tuple[NativeMatrix, ...]
    down: tuple[NativeMatrix, ...]
    gate_up_pointers: Any
    """C arrays of the matrices' pointers."""
    down_pointers: Any


@cache
def _functions() -> RecordableLibrary:
    native = library()
    native.baton_linear.argtypes = [
        *(_POINTER, _POINTER, _I64, _I64, _I32, _POINTER, _I64, _I32, _POINTER, _I32)
    ]
    native.baton_linear.restype = _I32
    native.baton_rms_norm.argtypes = [
        *(_POINTER, _I64, _I64, _POINTER, _I64, _POINTER),
        *(_I32, _POINTER, _I32, _I64, _I64, ctypes.c_float),
    ]
    native.baton_rms_norm.restype = None
    native.baton_gated.argtypes = [*(_POINTER, _I64) * 3, _I32, _I64, _I64, _I32]
    native.baton_gated.restype = None
    native.baton_embed.argtypes = [_POINTER, _POINTER, _POINTER, _I64, _I64]
    native.baton_embed.restype = None
    native.baton_experts.argtypes = [
        *(_POINTER, _POINTER, _I64, _POINTER, _I64, _I64, _I32),
        *(_POINTER, _POINTER, _I64, _I32, _POINTER),
    ]
    native.baton_experts.restype = _I32
    return native


class NativeKernels(NativeAttention):
    """Implements `engine.kernels.interface.Kernels` in bfloat16 and float32."""

    is_batch_invariant = True

    def __init__(self, pool: KVPool, *, threads: int = 0) -> None:
        """threads: 0: as many as this process may run on. Raises NativeUnavailable; SetupError: a kind of
        KV that they have no code for."""
        dtype = TORCH_DTYPES[pool.geometry.dtype]
        if pool.device.type != "cpu":
            raise NativeUnavailable(f"they run on the CPU, the model is on {pool.device}")
        if dtype not in (torch.float32, torch.bfloat16):
            raise NativeUnavailable("they compute in bfloat16 and float32 only")
        super().__init__(pool)
        self.dtype = dtype
        native = _functions()
        self.thread_count = set_threads(threads)
        self.features = features()
        self._linear, self._rms_norm = native.baton_linear, native.baton_rms_norm

    # --- weights ---

    def pack(self, matrix: Matrix) -> NativeMatrix:
        return pack_matrix(matrix, self.dtype)

    def pack_experts(self, experts: ExpertMatrices) -> NativeExperts:
        gate_up = tuple(self.pack(matrix) for matrix in experts.gate_up)
        down = tuple(self.pack(matrix) for matrix in experts.down)
        array = _POINTER * len(gate_up)
        return NativeExperts(
            *(gate_up, down),
            array(*(matrix.pointer for matrix in gate_up)),
            array(*(matrix.pointer for matrix in down)),
        )

    def movable(self, packed: Sequence[object]) -> MovableMatrices:
        matrices: list[NativeMatrix] = []
        for one in packed:
            if isinstance(one, NativeExperts):
                matrices += (*one.gate_up, *one.down)
            elif isinstance(one, NativeMatrix):
                matrices.append(one)
        return MovableMatrices(matrices)

    # --- products ---

    def linear(self, x: Tensor, matrix: NativeMatrix, *, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            out = torch.empty((x.shape[0], matrix.out_size), dtype=x.dtype)
            return self._multiply(x, matrix, out, None, _NO_ACTIVATION)
        return self._multiply(x, matrix, residual, residual.data_ptr(), _NO_ACTIVATION)

    def gated_linear(self, x: Tensor, matrix: NativeMatrix, activation: Activation) -> Tensor:
        out = torch.empty((x.shape[0], matrix.out_size // 2), dtype=x.dtype)
        return self._multiply(x, matrix, out, None, ACTIVATIONS[activation])

    def logits(self, x: Tensor, matrix: NativeMatrix) -> Tensor:
        out = torch.empty((x.shape[0], matrix.out_size), dtype=torch.float32)
        return self._multiply(x, matrix, out, None, _NO_ACTIVATION)

    def _multiply(
        self, x: Tensor, matrix: NativeMatrix, out: Tensor, residual: int | None, activation: int
    ) -> Tensor:
        x_dtype = F32 if x.dtype is torch.float32 else BF16
        if matrix.is_wide and x_dtype == BF16:
            x, x_dtype = x.float(), F32
        failed = self._linear(
            *(matrix.pointer, x.data_ptr(), x.shape[0], x.stride(0), x_dtype),
            *(out.data_ptr(), out.stride(0), F32 if out.dtype is torch.float32 else BF16),
            *(residual, activation),
        )
        assert not failed, "float32 activations, bfloat16 weights"
        return out

    def experts(
        self, x: Tensor, experts: NativeExperts, chosen: Tensor, weights: Tensor, activation: Activation
    ) -> Tensor:
        out = torch.empty((x.shape[0], experts.down[0].out_size), dtype=x.dtype)
        chosen, weights = chosen.contiguous(), weights.contiguous()
        failed = _functions().baton_experts(
            *(experts.gate_up_pointers, experts.down_pointers, len(experts.down)),
            *(x.data_ptr(), x.shape[0], x.stride(0), F32 if x.dtype is torch.float32 else BF16),
            *(chosen.data_ptr(), weights.data_ptr(), chosen.shape[1]),
            *(ACTIVATIONS[activation], out.data_ptr()),
        )
        assert not failed, "float32 activations, bfloat16 weights"
        return out

    # --- rows ---

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Raises IndexError: a token that the table does not have."""
        if (
            tokens.shape[0] and not NativeFunction.is_recording()
        ):  # a replay is given tokens that were checked
            least, most = (int(one) for one in torch.aminmax(tokens))
            if least < 0 or most >= table.shape[0]:
                raise IndexError(f"tokens {least} to {most} of {table.shape[0]}")
        out = torch.empty((tokens.shape[0], table.shape[1]), dtype=table.dtype)
        _functions().baton_embed(
            *(tokens.data_ptr(), table.data_ptr(), out.data_ptr()),
            *(tokens.shape[0], table.shape[1] * table.element_size()),
        )
        return out

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        rows, n = gate.shape
        out = torch.empty((rows, n), dtype=gate.dtype)
        _functions().baton_gated(
            *(gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out.data_ptr(), n),
            *(F32 if gate.dtype is torch.float32 else BF16, rows, n, ACTIVATIONS[activation]),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of x with 2 dimensions, or with 3 of which the last two are dense."""
        out = torch.empty(x.shape, dtype=x.dtype)
        inner = x.shape[1] if x.dim() == 3 else 1
        self._norm(x, None, out, weight, eps, rows=x.shape[0] * inner, inner=inner)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)
        self._norm(x, residual, out, weight, eps, rows=x.shape[0], inner=1)
        return out, residual

    def _norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        out: Tensor,
        weight: Tensor,
        eps: float,
        *,
        rows: int,
        inner: int,
    ) -> None:
        self._rms_norm(
            *(x.data_ptr(), inner, x.stride(0)),
            *((None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))),
            *(out.data_ptr(), F32 if x.dtype is torch.float32 else BF16),
            *(weight.data_ptr(), F32 if weight.dtype is torch.float32 else BF16),
            *(rows, x.shape[-1], eps),
        )
