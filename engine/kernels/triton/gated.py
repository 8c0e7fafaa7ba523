"""Activations of gated MLPs."""
# Triton's language is typed by its compiler: pyright knows neither its values nor its constants.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# ruff: noqa: ANN001

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_OAI_ALPHA = tl.constexpr(1.702)
_OAI_LIMIT = tl.constexpr(7.0)

SILU, GELU, GELU_TANH, SWIGLU_OAI = range(4)
"""ACTIVATION below."""


@triton.jit
def _sigmoid(x) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp2(x * -_LOG2E))


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr) -> tl.tensor:
    """act(gate) * up, fp32. See `interface.Activation`."""
    if ACTIVATION == 0:
        y = gate * _sigmoid(gate) * up
    elif ACTIVATION == 1:
        y = 0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF)) * up
    elif ACTIVATION == 2:
        # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        z = _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        y = gate * _sigmoid(2.0 * z) * up
    else:
        gate = tl.minimum(gate, _OAI_LIMIT)
        up = tl.minimum(tl.maximum(up, -_OAI_LIMIT), _OAI_LIMIT)
        y = (up + 1.0) * gate * _sigmoid(gate * _OAI_ALPHA)
    return y


@triton.jit
def gated(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:  # fmt: skip
    """WIDTH numbers of one row; out [rows, SIZE] is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < SIZE
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, up, ACTIVATION)
    tl.store(out_ptr + row * SIZE + column, y.to(out_ptr.dtype.element_ty), mask=mask)
