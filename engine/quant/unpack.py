"""Quantised tensors of checkpoints, as `IntMatrix` and `Fp8Matrix`.

All packings put 32 / bits unsigned integers into an int32, the first in the lowest bits (AWQ: in an
order of its own). Shapes: O outputs, I inputs, G groups along the inputs.
"""

from typing import Protocol

import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.kernels.weights import Fp8Matrix, IntMatrix
from engine.model_files.quant_scheme import QuantScheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column i of eight in an int32 of AutoAWQ's gemm packing is at bits 4 * AWQ_ORDER.index(i)."""


class RawTensors(Protocol):
    """Tensors of one module by suffix, as stored."""

    def __call__(self, suffix: str) -> Tensor | None: ...


def unpack(
    scheme: QuantScheme, raw: RawTensors, *, name: str, out_size: int, in_size: int
) -> IntMatrix | Fp8Matrix:
    """The matrix of module `name` without its bias. Raises SetupError: tensors missing or misshapen."""
    module = _Module(scheme, raw, name, out_size, in_size)
    match scheme.format:
        case "gptq":
            return module.gptq()
        case "awq":
            return module.awq()
        case "packed":
            return module.packed()
        case "int8":
            return module.int8()
        case "fp8":
            return module.fp8()


def unpack_int32(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> unsigned integers as int32 [..., n * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


class _Module:
    def __init__(self, scheme: QuantScheme, raw: RawTensors, name: str, out_size: int, in_size: int) -> None:
        self._scheme, self._raw, self._name = scheme, raw, name
        self._out, self._in = out_size, in_size
        self._per_int32 = 32 // scheme.bits

    def gptq(self) -> IntMatrix:
        """qweight int32 [I / p, O], qzeros int32 [G, O / p], scales [G, O], g_idx int32 [I]."""
        per = self._per_int32
        packed = self._tensor("qweight", torch.int32, (self._in // per, self._out))
        scales = self._tensor("scales", None, (None, self._out))
        zeros = self._tensor("qzeros", torch.int32, (scales.shape[0], self._out // per))
        values = unpack_int32(packed.T.contiguous(), self._scheme.bits)
        order = self._order(self._raw("g_idx"), scales.shape[0])
        if order is not None:
            values = values[:, order]
        offset = self._scheme.zero_point_offset
        stored_zeros = unpack_int32(zeros, self._scheme.bits) + offset
        return self._matrix(values, scales.T, stored_zeros.T, order=order)

    def awq(self) -> IntMatrix:
        """qweight int32 [I, O / 8], qzeros int32 [G, O / 8], scales [G, O]."""
        packed = self._tensor("qweight", torch.int32, (self._in, self._out // 8))
        scales = self._tensor("scales", None, (None, self._out))
        zeros = self._tensor("qzeros", torch.int32, (scales.shape[0], self._out // 8))
        return self._matrix(self._awq_columns(packed).T, scales.T, self._awq_columns(zeros).T)

    def packed(self) -> IntMatrix:
        """weight_packed int32 [O, ceil(I / p)], weight_scale [O, G], weight_zero_point int32
        [ceil(O / p), G], weight_g_idx int32 [I]. Integers are stored plus 2^(bits - 1)."""
        bits, per = self._scheme.bits, self._per_int32
        packed = self._tensor("weight_packed", torch.int32, (self._out, -(-self._in // per)))
        scales = self._tensor("weight_scale", None, (self._out, None))
        values = unpack_int32(packed, bits)[:, : self._in]
        order = self._order(self._raw("weight_g_idx"), scales.shape[1])
        if order is not None:
            values = values[:, order]
        zeros = None if self._scheme.symmetric else self._packed_zeros(scales.shape[1])
        return self._matrix(values, scales, zeros, order=order)

    def _packed_zeros(self, groups: int) -> Tensor:
        """Unsigned [O, G]. Older files have them unpacked: signed int8 [O, G]."""
        bits, per = self._scheme.bits, self._per_int32
        stored = self._raw("weight_zero_point")
        if stored is not None and stored.dtype == torch.int8:
            signed = self._tensor("weight_zero_point", torch.int8, (self._out, groups))
            return signed.to(torch.int32) + (1 << (bits - 1))
        packed = self._tensor("weight_zero_point", torch.int32, (-(-self._out // per), groups))
        return unpack_int32(packed.T.contiguous(), bits)[:, : self._out].T

    def int8(self) -> IntMatrix:
        """weight int8 [O, I], weight_scale [O, 1], [O] or [1], or [O, G] with groups. Stored scales of
        activations are not used: they are taken as they are, which is nearer to the original."""
        values = self._tensor("weight", torch.int8, (self._out, self._in))
        group = self._scheme.group_size
        if group and group < self._in:
            scales = self._tensor("weight_scale", None, (self._out, self._in // group)).float()
            order = self._order(self._raw("weight_g_idx"), self._in // group)
        else:
            group, scales, order = 0, self._row_scales("weight_scale"), None
        values = values.contiguous() if order is None else values[:, order]
        bits = self._scheme.activation_bits
        return IntMatrix(8, values, scales, None, group, order=order, activation_bits=bits)

    def fp8(self) -> Fp8Matrix:
        """weight e4m3 [O, I], weight_scale as in `int8`, or weight_scale_inv (or weight_scale) by blocks."""
        values = self._tensor("weight", torch.float8_e4m3fn, (self._out, self._in))
        block = self._scheme.fp8_block
        suffix = "weight_scale_inv" if self._raw("weight_scale_inv") is not None else "weight_scale"
        if not block:
            return Fp8Matrix(values, self._row_scales(suffix))
        shape = (-(-self._out // block), -(-self._in // block))
        return Fp8Matrix(values, self._tensor(suffix, None, shape).float(), block)

    # --- parts ------------------------------------------------------------------------------------

    def _tensor(self, suffix: str, dtype: torch.dtype | None, shape: tuple[int | None, ...]) -> Tensor:
        tensor = self._raw(suffix)
        if tensor is None:
            raise SetupError(f"the checkpoint has no tensor {self._name}.{suffix}")
        fits = len(shape) == tensor.dim() and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        if not fits or dtype not in (None, tensor.dtype):
            raise SetupError(
                f"{self._name}.{suffix} is {tensor.dtype} {list(tensor.shape)}; {self._scheme.label} with "
                f"{self._out} outputs and {self._in} inputs wants {dtype or 'floats'} {list(shape)}"
            )
        return tensor

    def _row_scales(self, suffix: str) -> Tensor:
        """float32 [O, 1]"""
        scales = self._raw(suffix)
        if scales is None or scales.numel() not in (1, self._out):
            raise SetupError(f"{self._name}.{suffix} must hold one scale or one per output channel")
        return scales.float().reshape(-1, 1).expand(self._out, 1).contiguous()

    def _awq_columns(self, packed: Tensor) -> Tensor:
        """int32 [n, O / 8] -> [n, O]"""
        nibbles = unpack_int32(packed, 4).view(packed.shape[0], -1, 8)
        places = torch.tensor([AWQ_ORDER.index(i) for i in range(8)], device=packed.device)
        return nibbles.index_select(2, places).flatten(1)

    def _order(self, group_of_input: Tensor | None, groups: int) -> Tensor | None:
        """int64 [I]: inputs by group, None if they are in order. Raises SetupError: groups that differ in
        size."""
        if group_of_input is None or not group_of_input.numel():
            return None
        owners = group_of_input.to(torch.int64)
        if owners.numel() != self._in or self._in % groups:
            raise SetupError(f"{self._name}: g_idx has {owners.numel()} entries for {self._in} inputs")
        plain = torch.arange(self._in, device=owners.device) // (self._in // groups)
        if torch.equal(owners, plain):
            return None
        order = torch.argsort(owners, stable=True)
        if not torch.equal(owners[order], plain):
            raise SetupError(f"{self._name}: the groups of g_idx differ in size, which is not supported")
        return order

    def _matrix(
        self, values: Tensor, scales: Tensor, zeros: Tensor | None, *, order: Tensor | None = None
    ) -> IntMatrix:
        """A matrix of unsigned integers [O, I], scales [O, G] and unsigned zero points [O, G]."""
        groups = scales.shape[1]
        if groups < 1 or self._in % groups:
            raise SetupError(f"{self._name}: {groups} groups do not divide {self._in} inputs")
        middle = 1 << (self._scheme.bits - 1)
        shifted = None if zeros is None else (zeros - middle).float()
        if shifted is not None and not shifted.any():
            shifted = None
        return IntMatrix(
            bits=self._scheme.bits,
            values=(values - middle).to(torch.int8).contiguous(),
            scales=scales.float().contiguous(),
            zeros=None if shifted is None else shifted.contiguous(),
            group_size=0 if groups == 1 else self._in // groups,
            order=order,
        )
