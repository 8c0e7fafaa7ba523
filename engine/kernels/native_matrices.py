"""Packed matrices: the loaders' kinds (`kernels.weights`) turned into panels in native memory."""

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.kernels.movable import image_layout
from engine.kernels.weights import DenseMatrix, Fp8Matrix, IntMatrix, Matrix, to_dense
from engine.native.library import BF16, F32, library
from engine.native.recording import RecordableLibrary

_POINTER = ctypes.c_void_p
_I32, _I64 = ctypes.c_int32, ctypes.c_int64
_SECTIONS = 4
"""Panels, scales, zeros and factors of a matrix."""
_EVEN = 2
"""Pairs of inputs share a step (`dot_tile.h`), so groups must be even."""
_INTEGERS = -8
"""In place of a number of bits: integers, whose codes are made while they are packed (src/matrix.cpp)."""
_QUAD = 4
"""Inputs that share a step of bytes (`quads.h`)."""
_QUAD_INPUTS_MAX = 1 << 17
"""A sum of more products of bytes might not fit into 32 bits."""


class NativeMatrix:
    """A matrix in native memory, freed with this object."""

    __slots__ = ("__weakref__", "in_size", "is_coded", "is_wide", "out_size", "pointer")

    def __init__(
        self, pointer: int | None, out_size: int, in_size: int, *, is_coded: bool, is_wide: bool
    ) -> None:
        if not pointer:
            raise SetupError(
                "not enough memory for the model's weights: set model.offload to auto or to a number of "
                "layers, divide the model over more ranks (engine.shape), or quantise it (model.quantization)"
            )
        self.pointer = pointer
        self.out_size, self.in_size = out_size, in_size
        self.is_coded = is_coded
        """Takes inputs of both dtypes; else only of its own."""
        self.is_wide = is_wide
        """Not coded: float32, else bfloat16."""
        weakref.finalize(self, _functions().raw("baton_matrix_free"), pointer)

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, scales and bias. One product with few rows reads them all."""
        count: int = _functions().baton_matrix_bytes(self.pointer)
        return count

    @property
    def layout(self) -> int:
        """How the weights lie: `Format` of src/dot_tile.h."""
        number: int = _functions().baton_matrix_format(self.pointer)
        return number


@cache
def _functions() -> RecordableLibrary:
    native = library()
    native.baton_matrix_dense.restype = _POINTER
    native.baton_matrix_dense.argtypes = [_POINTER, _I32, _I64, _I64, _I64, _POINTER]
    native.baton_matrix_coded.restype = _POINTER
    native.baton_matrix_coded.argtypes = [
        *(_POINTER, _I32, _I64, _I64, _POINTER, _I64),
        *(_POINTER, _POINTER, _POINTER, _POINTER),
    ]
    native.baton_matrix_quads.restype = _POINTER
    native.baton_matrix_quads.argtypes = [_POINTER, _I64, _I64, _I64, *(_POINTER,) * 4]
    native.baton_matrix_free.argtypes = [_POINTER]
    native.baton_matrix_free.restype = None
    native.baton_matrix_bytes.argtypes = [_POINTER]
    native.baton_matrix_bytes.restype = _I64
    native.baton_matrix_format.argtypes = [_POINTER]
    native.baton_matrix_format.restype = _I32
    native.baton_matrix_sections.argtypes = [_POINTER] * 3
    native.baton_matrix_sections.restype = None
    native.baton_matrices_place.argtypes = [_POINTER, _I64, _POINTER, _POINTER]
    native.baton_matrices_place.restype = None
    native.baton_end_arena.argtypes = []
    native.baton_end_arena.restype = None
    return native


class MovableMatrices:
    """Implements `engine.kernels.movable.MovableWeights`. From here on other matrices are packed into memory
    of their own, so that these can be moved out of it."""

    def __init__(self, matrices: Sequence[NativeMatrix]) -> None:
        self._matrices = tuple(matrices)
        self._pointers = (_POINTER * len(matrices))(*(matrix.pointer for matrix in matrices))
        sections = [section for matrix in matrices for section in _sections(matrix)]
        self.sizes = tuple(size for _, size in sections)
        """Bytes of each matrix's panels, scales, zeros and factors. Images of weights of other sizes mean
        others."""
        offsets, self.byte_count = image_layout(self.sizes)
        self._offsets = (_I64 * len(offsets))(*offsets)
        _functions().baton_end_arena()

    def copy_to(self, image: Tensor) -> None:
        start = image.data_ptr()
        sections = [section for matrix in self._matrices for section in _sections(matrix)]
        for (address, size), offset in zip(sections, self._offsets, strict=True):
            if size:
                ctypes.memmove(start + offset, address, size)

    def place(self, image: Tensor) -> None:
        _functions().baton_matrices_place(
            self._pointers, len(self._matrices), image.data_ptr(), self._offsets
        )


def _sections(matrix: NativeMatrix) -> list[tuple[int, int]]:
    """Address and size of what may be elsewhere, in the order of the library."""
    starts, sizes = (_POINTER * _SECTIONS)(), (_I64 * _SECTIONS)()
    _functions().baton_matrix_sections(matrix.pointer, starts, sizes)
    return [(start or 0, size) for start, size in zip(starts, sizes, strict=True)]


def pack_matrix(matrix: Matrix, dtype: torch.dtype) -> NativeMatrix:
    """dtype: of the model, for what has to be made dense. Raises SetupError: float16 weights, or too little
    memory."""
    match matrix:
        case DenseMatrix():
            return _dense(matrix.weight, matrix.bias)
        case IntMatrix() if matrix.activation_bits and _are_quads(matrix):
            return _quads(matrix)
        case IntMatrix() if matrix.group_size % _EVEN and matrix.group_size < matrix.values.shape[1]:
            dense = to_dense(matrix, dtype)
            return _dense(dense.weight, dense.bias)
        case IntMatrix():
            return _int(matrix)
        case Fp8Matrix():
            return _fp8(matrix)


def _dense(weight: Tensor, bias: Tensor | None) -> NativeMatrix:
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise SetupError(f"native kernels have no {weight.dtype}: set model.dtype to bfloat16")
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    out_size, in_size = weight.shape
    is_wide = weight.dtype == torch.float32
    wide_bias = _wide(bias)
    pointer = _functions().baton_matrix_dense(
        *(weight.data_ptr(), F32 if is_wide else BF16, out_size, in_size, weight.stride(0)),
        _pointer(wide_bias),
    )
    return NativeMatrix(pointer, out_size, in_size, is_coded=False, is_wide=is_wide)


def _are_quads(matrix: IntMatrix) -> bool:
    """Others are multiplied with activations as they are, which is slower and nearer to the original."""
    in_size = matrix.values.shape[1]
    in_whole_steps = matrix.group_size % _QUAD == 0 or matrix.group_size >= in_size
    return in_whole_steps and in_size <= _QUAD_INPUTS_MAX


def _quads(matrix: IntMatrix) -> NativeMatrix:
    out_size, in_size = matrix.values.shape
    values, order = matrix.values.contiguous(), _narrow_order(matrix.order)
    scales, zeros, bias = _wide(matrix.scales), _wide(matrix.zeros), _wide(matrix.bias)
    pointer = _functions().baton_matrix_quads(
        *(values.data_ptr(), out_size, in_size, matrix.group_size or in_size),
        *(_pointer(scales), _pointer(zeros), _pointer(order), _pointer(bias)),
    )
    return NativeMatrix(pointer, out_size, in_size, is_coded=True, is_wide=False)


def _int(matrix: IntMatrix) -> NativeMatrix:
    group = matrix.group_size or matrix.values.shape[1]
    if matrix.bits == 4:
        bits, values = 4, torch.tensor([*range(8), *range(-8, 0)], dtype=torch.bfloat16)
    else:
        bits, values = _INTEGERS, torch.cat((torch.arange(128), torch.tensor([-128]))).bfloat16()
    return _coded(
        *(matrix.values.view(torch.uint8), bits, values, group),
        *(matrix.scales, matrix.zeros, matrix.order, matrix.bias),
    )


def _fp8(matrix: Fp8Matrix) -> NativeMatrix:
    """e4m3 is sign and magnitude as it stands; bfloat16 holds every value of it."""
    out_size, in_size = matrix.values.shape
    magnitudes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    values = torch.cat((magnitudes, torch.tensor([-0.0], dtype=torch.bfloat16)))
    scales = matrix.scales
    if matrix.block:
        scales = scales.repeat_interleave(matrix.block, 0)[:out_size]
    codes = matrix.values.view(torch.uint8)
    return _coded(
        *(codes, 8, values, matrix.block or in_size),
        *(scales.expand(out_size, -1), None, None, matrix.bias),
    )


def _coded(
    codes: Tensor,
    bits: int,
    values: Tensor,
    group: int,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
) -> NativeMatrix:
    out_size, in_size = codes.shape
    codes, values = codes.contiguous(), values.contiguous()
    wide_scales, wide_zeros, wide_bias = _wide(scales), _wide(zeros), _wide(bias)
    narrow_order = _narrow_order(order)
    pointer = _functions().baton_matrix_coded(
        *(codes.data_ptr(), bits, out_size, in_size, values.data_ptr(), group),
        *(_pointer(wide_scales), _pointer(wide_zeros), _pointer(narrow_order), _pointer(wide_bias)),
    )
    return NativeMatrix(pointer, out_size, in_size, is_coded=True, is_wide=False)


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _narrow_order(order: Tensor | None) -> Tensor | None:
    return None if order is None else order.to(torch.int32).contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
