"""Norms, activations and embedding against torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.native.test_products import ACTIVATIONS, BF16, F32, TOLERANCE, assert_close, random
from tests.unit.engine.native.test_products import kernels as kernels


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    n=st.integers(1, 300),
    dtype=st.sampled_from((BF16, F32)),
    wide_weight=st.booleans(),
)
def test_rms_norm(kernels, rows, n, dtype, wide_weight):
    x = random(rows, n + 5, dtype=dtype)[:, :n]
    weight = random(n, seed=1, dtype=F32 if wide_weight else dtype)
    expected = F.rms_norm(x.double(), (n,), weight.double(), 1e-5)
    assert_close(kernels.rms_norm(x, weight, 1e-5), expected, TOLERANCE[dtype])


def test_rms_norm_of_heads_in_a_wider_row(kernels):
    heads = random(6, 9, 16, dtype=BF16)
    weight = random(16, seed=1, dtype=BF16)
    for part in heads.split((4, 3, 2), dim=1):
        expected = F.rms_norm(part.double(), (16,), weight.double(), 1e-6)
        assert_close(kernels.rms_norm(part, weight, 1e-6), expected, TOLERANCE[BF16])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_add_rms_norm_rounds_the_sum_before_the_norm(kernels, dtype):
    x, residual = random(200, 770, dtype=dtype), random(200, 770, seed=1, dtype=dtype)
    weight = random(770, seed=2)
    total = x + residual
    normed, found = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(found, total)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations_over_the_whole_range(kernels, activation):
    gate = torch.cat((torch.linspace(-120, 120, 4001), torch.linspace(-1e-3, 1e-3, 999)))[None]
    up = torch.linspace(-9, 9, 5000)[None]
    found = kernels.gated(gate, up, activation).double()
    expected = ACTIVATIONS[activation](gate.double(), up.double())
    assert torch.allclose(found, expected, rtol=1e-5, atol=3e-5)


def test_gated_parts_of_one_matrix_in_bfloat16(kernels):
    both = random(30, 140, dtype=BF16)
    gate, up = both.chunk(2, dim=-1)
    expected = F.silu(gate.double()) * up.double()
    assert_close(kernels.gated(gate, up, "silu"), expected, TOLERANCE[BF16])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_embedding(kernels, dtype):
    table = random(50, 33, dtype=dtype)
    tokens = torch.tensor([3, 0, 49, 3])
    assert torch.equal(kernels.embed(tokens, table), table[tokens])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("which", ["gate", "up"])
def test_an_activation_hides_no_nan(kernels, activation, which):
    gate, up = torch.ones(2, 20), torch.ones(2, 20)
    (gate if which == "gate" else up)[1] = torch.nan
    out = kernels.gated(gate, up, activation)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
