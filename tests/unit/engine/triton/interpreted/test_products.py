"""Products with packed weights against the same product of dequantised ones."""

import pytest
import torch

from baton.core.geometry import KVGeometry
from engine.kernels.triton import products
from engine.kernels.triton.device import DeviceFacts
from engine.kernels.triton.kernels import TritonKernels
from engine.kernels.triton.packing import dequantized, pack_nibbles
from engine.kernels.weights import DenseMatrix, ExpertMatrices, Fp8Matrix, IntMatrix

from .cases import make_pool
from .test_rows import activated

FEW_SMS = DeviceFacts(capability=90, sm_count=2, shared_bytes=227 * 1024)


def make_kernels(facts=FEW_SMS, dtype="float32") -> TritonKernels:
    return TritonKernels(make_pool(KVGeometry(1, 1, 16, 4, dtype), 2), facts)


def int_matrix(bits, group, out=40, inp=160, *, zeros=False, order=False, bias=False, seed=0) -> IntMatrix:
    random = torch.Generator().manual_seed(seed)
    top = 1 << (bits - 1)
    groups = -(-inp // group) if group else 1
    return IntMatrix(
        bits,
        torch.randint(-top, top, (out, inp), generator=random).to(torch.int8),
        torch.rand(out, groups, generator=random) / top,
        torch.randint(-top, top, (out, groups), generator=random).float() if zeros else None,
        group,
        torch.randperm(inp, generator=random) if order else None,
        torch.randn(out, generator=random) if bias else None,
    )


def fp8_matrix(block, out=40, inp=160) -> Fp8Matrix:
    values = torch.randn(out, inp).to(torch.float8_e4m3fn)
    shape = (-(-out // block), -(-inp // block)) if block else (out, 1)
    return Fp8Matrix(values, torch.rand(shape), block)


MATRICES = {
    "int8": int_matrix(8, 0, bias=True),
    "int8-groups": int_matrix(8, 32, zeros=True),
    "int4": int_matrix(4, 0, inp=150),
    "int4-groups": int_matrix(4, 32, bias=True),
    "int4-zeros": int_matrix(4, 16, zeros=True),
    "int4-order": int_matrix(4, 64, zeros=True, order=True),
    "int4-odd-groups": int_matrix(4, 40),
    "fp8": fp8_matrix(0),
    "fp8-blocks": fp8_matrix(32),
}


def weight_of(matrix):
    """float64, from the definition."""
    if isinstance(matrix, Fp8Matrix):
        scales = matrix.scales.double()
        if matrix.block:
            scales = scales.repeat_interleave(matrix.block, 0).repeat_interleave(matrix.block, 1)
            scales = scales[: matrix.values.shape[0], : matrix.values.shape[1]]
        return matrix.values.double() * scales
    weight = torch.empty(matrix.values.shape, dtype=torch.float64)
    for i in range(weight.shape[1]):
        g = i // matrix.group_size if matrix.group_size else 0
        zero = 0 if matrix.zeros is None else matrix.zeros[:, g].double()
        to = i if matrix.order is None else int(matrix.order[i])
        weight[:, to] = matrix.scales[:, g].double() * (matrix.values[:, i].double() - zero)
    return weight


@pytest.mark.parametrize("name", MATRICES)
def test_linear(name) -> None:
    matrix, kernels = MATRICES[name], make_kernels()
    weight = weight_of(matrix)
    x = torch.randn(3, weight.shape[1])
    residual = torch.randn(3, weight.shape[0])
    expected = x.double() @ weight.T + residual.double()
    if matrix.bias is not None:
        expected += matrix.bias.double()
    out = kernels.linear(x, kernels.pack(matrix), residual=residual)
    torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["int8-groups", "int4-zeros", "fp8"])
def test_bfloat16_with_the_tiles_of_production(name) -> None:
    """Many tokens: scales are applied to the weights."""
    matrix, kernels = MATRICES[name], make_kernels(dtype="bfloat16")
    weight = weight_of(matrix)
    x = torch.randn(140, weight.shape[1]).bfloat16()
    out = kernels.linear(x, kernels.pack(matrix))
    torch.testing.assert_close(out.double(), x.double() @ weight.T, atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["int8", "int4-groups"])
def test_inputs_are_split_where_the_device_would_idle(name, monkeypatch) -> None:
    monkeypatch.setattr(products, "_SPLIT_INPUTS_MIN", 16)
    test_linear(name)


# The device's exp2 gives infinity there, and so the sigmoid zero; numpy says so aloud.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_gated_linear_in_one_kernel() -> None:
    matrix, kernels = MATRICES["int4-groups"], make_kernels()
    x = torch.randn(3, 160)
    gate, up = (x.double() @ weight_of(matrix).T + matrix.bias.double()).chunk(2, dim=-1)
    out = kernels.gated_linear(x, kernels.pack(matrix), "gelu_tanh")
    torch.testing.assert_close(out.double(), activated(gate, up, "gelu_tanh"), atol=2e-4, rtol=1e-4)


def test_dense_linear_adds_bias_and_residual() -> None:
    kernels, x, residual = make_kernels(), torch.randn(3, 8), torch.randn(3, 5)
    weight, bias = torch.randn(5, 8), torch.randn(5)
    for matrix in (DenseMatrix(weight), DenseMatrix(weight, bias)):
        expected = x @ weight.T + residual + (0 if matrix.bias is None else bias)
        out = kernels.linear(x, kernels.pack(matrix), residual=residual.clone())
        torch.testing.assert_close(out, expected)


def dense(out, inp, seed, bias) -> DenseMatrix:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inp, generator=random) / inp**0.5
    return DenseMatrix(weight, torch.randn(out, generator=random) if bias else None)


@pytest.mark.parametrize("kind", ["dense", "dense-bias", "int4"])
def test_experts(kind) -> None:
    kernels, experts, tokens, choices, hidden, inner = make_kernels(), 5, 23, 3, 48, 32
    if kind == "int4":
        up = tuple(int_matrix(4, 16, 2 * inner, hidden, zeros=True, seed=e) for e in range(experts))
        down = tuple(int_matrix(4, 16, hidden, inner, zeros=True, seed=9 + e) for e in range(experts))
    else:
        up = tuple(dense(2 * inner, hidden, e, kind == "dense-bias") for e in range(experts))
        down = tuple(dense(hidden, inner, 9 + e, kind == "dense-bias") for e in range(experts))
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, choices)
    # Expert 4 gets nothing, expert 0 most.
    chosen = torch.rand(tokens, 4).mul_(torch.tensor([1.0, 0.6, 0.6, 0.6])).topk(choices).indices
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        for j in range(choices):
            first, second = (dequantized(m[int(chosen[t, j])], torch.float64) for m in (up, down))
            gate, other = (first.weight.double() @ x[t].double()).chunk(2)
            if first.bias is not None:
                gate, other = gate + first.bias[:inner], other + first.bias[inner:]
            y = second.weight.double() @ activated(gate, other, "silu")
            expected[t] += weights[t, j] * (y + (0 if second.bias is None else second.bias))
    packed = kernels.pack_experts(ExpertMatrices(up, down))
    out = kernels.experts(x, packed, chosen, weights, "silu")
    torch.testing.assert_close(out.double(), expected, atol=5e-4, rtol=1e-3)


def test_nibbles_lie_half_a_group_apart() -> None:
    packed = pack_nibbles(torch.arange(-8, 8, dtype=torch.int8)[None], 4)
    assert packed.tolist() == [[0x40, 0x51, 0x62, 0x73, 0xC8, 0xD9, 0xEA, 0xFB]]
