"""Norms, activations and copies of blocks against torch."""

import pytest
import torch
import torch.nn.functional as F

from baton.core.geometry import KVGeometry
from engine.kernels.triton.kernels import TritonKernels

from .cases import make_pool

GEOMETRY = KVGeometry(1, 1, 16, 4, "float32")


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(make_pool(GEOMETRY, 16))


def norm(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_norms(kernels, dtype, tolerance) -> None:
    x, residual = torch.randn(2, 5, 72).to(dtype)
    weight = torch.randn(72)
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), norm(x, weight, 1e-5), **close)
    total = (x.float() + residual.float()).to(dtype)
    normed, kept = kernels.add_rms_norm(x, residual, weight, 1e-5)
    # The interpreter cuts numbers off where the device rounds.
    torch.testing.assert_close(kept, total, atol=0, rtol=1e-6 if dtype == torch.float32 else 2**-7)
    torch.testing.assert_close(normed.double(), norm(kept, weight, 1e-5), **close)


def test_norm_of_heads_within_a_wider_matrix(kernels) -> None:
    heads = torch.randn(3, 7, 24)[:, 2:5]
    weight = torch.randn(24)
    out = kernels.rms_norm(heads, weight, 1e-6)
    torch.testing.assert_close(out.double(), norm(heads, weight, 1e-6), atol=1e-5, rtol=1e-5)


def activated(gate, up, activation):
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    names = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    return names[activation](gate) * up


# The device's exp2 gives infinity there, and so the sigmoid zero; numpy says so aloud.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_activations(kernels, activation) -> None:
    gate, up = (torch.randn(3, 100) * 6).chunk(2, dim=-1)
    expected = activated(gate.double(), up.double(), activation)
    out = kernels.gated(gate, up, activation).double()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_blocks_are_copied_in_the_order_of_the_pairs(kernels) -> None:
    memory = kernels._pool.memory
    expected = memory.clone()
    pairs = [(1, 2), (2, 3), (5, 1), (7, 8), (9, 7), (4, 4)]
    for source, destination in pairs:
        expected[destination] = expected[source]
    kernels.copy_blocks(pairs)
    assert torch.equal(memory, expected)


def test_blocks_are_gathered_and_scattered(kernels) -> None:
    memory = kernels._pool.memory
    data = kernels.gather_blocks([5, 0, 9])
    assert torch.equal(data, memory[[5, 0, 9]])
    expected = memory.clone()
    expected[[1, 15, 3]] = data
    kernels.scatter_blocks([1, 15, 3], data)
    assert torch.equal(memory, expected)
    assert kernels.gather_blocks([]).shape == (0, GEOMETRY.block_bytes)
