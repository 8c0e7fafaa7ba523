"""Matrices as loaders hand them to the kernels, before packing.

Every matrix maps `in_size` numbers to `out_size`: y = x @ W.T + bias. The rows of several matrices that
read the same input (q, k, v; gate, up) are put together by the loader into one.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    weight: Tensor
    """[out, in], float32, bfloat16 or float16."""
    bias: Tensor | None = None
    """[out]"""


@dataclass(frozen=True, slots=True)
class IntMatrix:
    """W[o, i] = scales[o, g] * (values[o, i] - zeros[o, g]) with g = i // group_size."""

    bits: int
    """4 or 8."""
    values: Tensor
    """int8 [out, in]: -128 … 127 for 8 bits, -8 … 7 for 4 bits (one per byte here; kernels pack them)."""
    scales: Tensor
    """float32 [out, groups]"""
    zeros: Tensor | None = None
    """float32 [out, groups]; None: symmetric."""
    group_size: int = 0
    """0: one group, the whole row."""
    order: Tensor | None = None
    """int64 [in]: column i of `values` belongs to input order[i] (GPTQ's act-order)."""
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """W = values * scales, e4m3."""

    values: Tensor
    """float8_e4m3fn [out, in]"""
    scales: Tensor
    """float32 [out or 1, 1], or [ceil(out / b), ceil(in / b)] in blocks of b = `block`."""
    block: int = 0
    """0: per row or per tensor."""
    bias: Tensor | None = None


Matrix = DenseMatrix | IntMatrix | Fp8Matrix


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One layer's routed experts; each is a gated MLP."""

    gate_up: tuple[Matrix, ...]
    """Per expert, [2 I, hidden]: rows of gate, then of up."""
    down: tuple[Matrix, ...]
    """Per expert, [hidden, I]."""
