"""Products of rounded activations and bytes (W8A8): bit for bit those of plain torch, in any company."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.geometry import KVGeometry
from engine.kernels.native import NativeKernels
from engine.kernels.torch_bytes import ZERO_BELOW, byte_matrix, byte_product, round_rows
from engine.kernels.torch_ref import TorchKernels
from engine.kernels.weights import (
    DenseMatrix,
    ExpertMatrices,
    IntMatrix,
    cut_columns,
    join_rows,
    select_rows,
    to_dense,
)
from engine.kv.pool import KVPool
from engine.native.library import set_threads
from tests.unit.engine.native.test_products import BF16, F32, int_matrix, random


@pytest.fixture(scope="module")
def pool():
    return KVPool(KVGeometry(1, 1, 8, 4, "bfloat16"), kv_bytes=2**16, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def kernels(pool):
    yield NativeKernels(pool, threads=1)
    set_threads(1)


def bytes_of(*args, **options):
    return replace(int_matrix(8, *args, **options), activation_bits=8)


MATRICES = {
    "plain": bytes_of(130, 96),
    "odd sizes": bytes_of(65, 77, bias=True),
    "long": bytes_of(70, 5000, bias=True),
    "groups of four": bytes_of(64, 60, 4, zeros=True),
    "groups": bytes_of(200, 768, 128, zeros=True, bias=True),
    "reordered": bytes_of(64, 96, 32, zeros=True, order=True),
}


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_sums_are_bitwise_those_of_plain_torch(kernels, name, dtype):
    matrix = MATRICES[name]
    packed, reference = kernels.pack(matrix), byte_matrix(matrix)
    for rows in (0, 1, 2, 5, 6, 7, 12, 13, 31, 150):
        x = random(rows, packed.in_size, seed=rows, dtype=dtype)
        assert torch.equal(kernels.logits(x, packed), byte_product(x, reference))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), in_size=st.integers(1, 200), out_size=st.integers(1, 140))
def test_bitwise_equal_for_any_size(kernels, rows, in_size, out_size):
    matrix = bytes_of(out_size, in_size, bias=True)
    x = random(rows, in_size + 3, seed=2, dtype=BF16)[:, :in_size]
    assert torch.equal(kernels.logits(x, kernels.pack(matrix)), byte_product(x, byte_matrix(matrix)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_bytes_is_bitwise_the_same_in_any_batch(kernels, threads):
    packed = kernels.pack(bytes_of(200, 770, bias=True))
    x = random(600, 770, dtype=BF16)
    set_threads(1)
    alone = torch.cat([kernels.gated_linear(x[i : i + 1], packed, "silu") for i in range(70)])
    set_threads(threads)
    for rows in (*range(2, 26), 31, 47, 64, 70):
        assert torch.equal(kernels.gated_linear(x[70 - rows : 70], packed, "silu"), alone[70 - rows :])
    assert torch.equal(kernels.gated_linear(x, packed, "silu")[:70], alone)


def test_the_largest_sums_are_exact_bitwise(kernels):
    """As many inputs as are allowed, all at the ends of their ranges."""
    in_size = 1 << 17
    values = torch.full((64, in_size), -128, dtype=torch.int8)
    matrix = IntMatrix(8, values, torch.ones(64, 1), activation_bits=8)
    x = torch.full((2, in_size), 127.0, dtype=F32)
    x[1] *= -1
    found = kernels.logits(x, kernels.pack(matrix))
    assert found[:, 0].tolist() == [-127.0 * 128 * in_size, 127.0 * 128 * in_size]


def test_rows_of_zeros_and_rows_that_are_no_numbers_bitwise(kernels):
    packed = kernels.pack(MATRICES["plain"])
    x = random(4, 96)
    x[0] = 0.0
    x[1] = ZERO_BELOW / 4
    x[2, 5] = float("nan")
    found = kernels.logits(x, packed)
    assert not found[:2].any()
    assert found[2].isnan().all()
    assert torch.equal(found[3], byte_product(x[3:], byte_matrix(MATRICES["plain"]))[0])
    x[2, 5] = float("inf")
    assert not kernels.logits(x, packed)[2].isfinite().any()


def test_rounded_rows_are_near_and_halves_go_to_even():
    rounded, scales = round_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5], [1.0, -1.0, 0.0, 0.0]]))
    assert rounded.tolist() == [[127, 0, 2, -2], [127, -127, 0, 0]]
    assert scales[:, 0].tolist() == [1.0, pytest.approx(1 / 127)]


def test_experts_of_bytes_are_those_of_plain_torch(kernels, pool):
    gate_up = tuple(bytes_of(128, 48, seed=e) for e in range(4))
    down = tuple(bytes_of(48, 64, seed=9 + e) for e in range(4))
    chosen, weights = torch.tensor([[0, 3], [2, 1], [3, 2]] * 5), torch.rand(15, 2)
    x = random(15, 48) / 8
    torch_kernels = TorchKernels(pool)
    found, expected = (
        one.experts(x, one.pack_experts(ExpertMatrices(gate_up, down)), chosen, weights, "silu")
        for one in (kernels, torch_kernels)
    )
    # Rounding turns the last bit of an activation function into a step of 1/127.
    assert (found - expected).abs().max() < 2e-2 * expected.abs().max()


def test_parts_round_their_activations_too():
    matrix = bytes_of(64, 96, 32)
    assert cut_columns(matrix, range(16, 48)).activation_bits == 8
    assert select_rows(matrix, torch.arange(3), F32).activation_bits == 8
    assert join_rows((matrix, matrix)).activation_bits == 8
    exact = replace(matrix, activation_bits=0)
    assert join_rows((matrix, exact)).activation_bits == 0


def test_groups_that_are_no_whole_steps_take_activations_as_they_are_bitwise(kernels):
    matrix = bytes_of(64, 60, 6)
    x = random(3, 60, dtype=F32)
    found = kernels.logits(x, kernels.pack(matrix))
    dense = to_dense(matrix, F32)
    expected = kernels.logits(x, kernels.pack(DenseMatrix(dense.weight)))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
