"""Products with packed matrices: against float64, and bitwise against themselves in other batches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.geometry import KVGeometry
from engine.kernels.native import NativeKernels
from engine.kernels.weights import DenseMatrix, ExpertMatrices, Fp8Matrix, IntMatrix, to_dense
from engine.kv.pool import KVPool
from engine.native.library import features, set_threads

BF16, F32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 6e-3, F32: 3e-6}
"""Tolerance relative to the largest value: the rounding of the result, and of sums in float32."""


@pytest.fixture(scope="module")
def kernels():
    geometry = KVGeometry(1, 1, 8, 4, "bfloat16")
    yield NativeKernels(KVPool(geometry, kv_bytes=2**16, device=torch.device("cpu")), threads=1)
    set_threads(1)


def random(*shape, seed=0, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int_matrix(bits, out_size, in_size, group=0, *, zeros=False, order=False, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    low, high = (-8, 8) if bits == 4 else (-128, 128)
    groups = in_size // group if group else 1
    return IntMatrix(
        bits,
        torch.randint(low, high, (out_size, in_size), generator=generator).to(torch.int8),
        torch.rand((out_size, groups), generator=generator) / high,
        torch.randint(low, high, (out_size, groups), generator=generator).float() if zeros else None,
        group,
        torch.randperm(in_size, generator=generator) if order else None,
        random(out_size, seed=seed) if bias else None,
    )


def fp8_matrix(out_size, in_size, block=0):
    values = random(out_size, in_size, seed=4).to(torch.float8_e4m3fn)
    shape = (-(-out_size // block), -(-in_size // block)) if block else (out_size, 1)
    return Fp8Matrix(values, random(*shape, seed=5).abs(), block)


def exact(x, matrix):
    dense = to_dense(matrix, torch.float64) if not isinstance(matrix, DenseMatrix) else matrix
    bias = None if dense.bias is None else dense.bias.double()
    return F.linear(x.double(), dense.weight.double(), bias)


def assert_close(found, expected, tolerance):
    assert found.shape == expected.shape
    if expected.numel():
        assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max() + 1e-30


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    in_size=st.integers(1, 200),
    out_size=st.integers(1, 200),
    dtype=st.sampled_from((BF16, F32)),
    extras=st.booleans(),
)
def test_dense_products_of_any_size(kernels, rows, in_size, out_size, dtype, extras):
    bias = random(out_size, seed=1, dtype=dtype) if extras else None
    matrix = DenseMatrix(random(out_size, in_size, dtype=dtype), bias)
    x = random(rows, in_size + 3, seed=2, dtype=dtype)[:, :in_size]
    residual = random(rows, out_size, seed=3, dtype=dtype) if extras else None
    expected = exact(x, matrix) + (residual.double() if residual is not None else 0)
    assert_close(kernels.linear(x, kernels.pack(matrix), residual=residual), expected, TOLERANCE[dtype])


CODED = {
    "int8": int_matrix(8, 130, 96),
    "int8 odd": int_matrix(8, 65, 77, bias=True),
    "int8 in groups": int_matrix(8, 70, 96, 32, zeros=True),
    "int8 in groups of twelve": int_matrix(8, 70, 96, 12, zeros=True),
    "int4": int_matrix(4, 130, 96),
    "int4 odd": int_matrix(4, 65, 77, bias=True),
    "int4 in groups": int_matrix(4, 130, 512, 128, zeros=True, order=True, bias=True),
    "int4 symmetric": int_matrix(4, 64, 640, 32),
    "int4 in odd groups": int_matrix(4, 64, 63, 7, zeros=True, order=True),
    "int4 in groups of six": int_matrix(4, 70, 66, 6, zeros=True),
    "int4 reordered": int_matrix(4, 64, 96, order=True),
    "fp8": fp8_matrix(100, 70),
    "fp8 in blocks": fp8_matrix(200, 256, 128),
}


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", CODED)
def test_quantised_products_mean_what_the_matrix_says(kernels, name, dtype):
    matrix = CODED[name]
    if name == "int4 in odd groups" and dtype == F32:
        pytest.skip("made dense in the model's dtype")
    packed = kernels.pack(matrix)
    for rows in (1, 5, 7, 20, 150):
        x = random(rows, matrix.values.shape[1], seed=rows, dtype=dtype)
        tolerance = 2e-2 if name == "int4 in odd groups" else TOLERANCE[dtype]
        assert_close(kernels.linear(x, packed), exact(x, matrix), tolerance)


CODE4, LANES4 = 3, 5
"""`Format` of src/dot_tile.h."""


@pytest.mark.parametrize("name", [name for name in CODED if name.startswith("int4")])
def test_integers_of_four_bits_lie_in_words_with_avx2(kernels, name):
    """The figures of docs/benchmarks/engine.md are of these, so that they must be what is used."""
    has_short_groups = name in ("int4 in odd groups", "int4 in groups of six")
    if name == "int4 in odd groups":
        pytest.skip("made dense in the model's dtype")
    is_in_words = features() == "avx2" and not has_short_groups
    assert kernels.pack(CODED[name]).layout == (LANES4 if is_in_words else CODE4)


def test_every_code_has_its_value(kernels):
    every = torch.arange(-128, 128).to(torch.int8)[:, None]
    ones = torch.ones((256, 1))
    one = torch.ones((1, 1), dtype=BF16)
    found = kernels.logits(one, kernels.pack(IntMatrix(8, every, ones)))[0]
    assert found.tolist() == list(range(-128, 128))
    found = kernels.logits(one, kernels.pack(IntMatrix(4, every[120:136], ones[:16])))[0]
    assert found.tolist() == list(range(-8, 8))
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    found = kernels.logits(one, kernels.pack(Fp8Matrix(values, ones)))[0]
    assert torch.equal(found.nan_to_num(7.5), values[:, 0].float().nan_to_num(7.5))


BATCHED = {
    "bfloat16": (DenseMatrix(random(200, 770, dtype=BF16), random(200, dtype=BF16)), BF16),
    "long bfloat16": (DenseMatrix(random(64, 6000, dtype=BF16)), BF16),
    "float32": (DenseMatrix(random(200, 770), random(200)), F32),
    "int8": (int_matrix(8, 200, 770, bias=True), BF16),
    "int8 in groups": (int_matrix(8, 100, 768, 128, zeros=True), BF16),
    "int4": (int_matrix(4, 200, 768, 128, zeros=True, order=True), BF16),
    "int4 in short groups": (int_matrix(4, 100, 672, 32, zeros=True), BF16),
    "int8 in groups of twelve": (int_matrix(8, 100, 252, 12, zeros=True), BF16),
    "int4 in groups of six": (int_matrix(4, 100, 252, 6, zeros=True), BF16),
    "int4 in long groups": (int_matrix(4, 100, 4096, 2048, zeros=True), BF16),
    "int4 in float32": (int_matrix(4, 100, 768, 64), F32),
    "int4 symmetric": (int_matrix(4, 200, 770, bias=True), BF16),
    "int4 symmetric in short groups": (int_matrix(4, 100, 672, 32, order=True), BF16),
    "int4 symmetric in groups of 96": (int_matrix(4, 100, 672, 96), BF16),
    "int8 symmetric in short groups": (int_matrix(8, 100, 672, 32), BF16),
    "int8 in groups of 256": (int_matrix(8, 100, 768, 256, zeros=True), BF16),
    "int8 in groups of 1024": (int_matrix(8, 100, 2048, 1024), BF16),
    "int4 in groups of 1024": (int_matrix(4, 100, 2048, 1024, zeros=True), BF16),
    "fp8": (fp8_matrix(100, 770), BF16),
    "fp8 in blocks": (fp8_matrix(100, 768, 128), BF16),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", BATCHED)
def test_a_row_is_bitwise_the_same_in_any_batch(kernels, name, threads):
    matrix, dtype = BATCHED[name]
    packed = kernels.pack(matrix)
    in_size = packed.in_size
    x = random(600, in_size, dtype=dtype)
    set_threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(70)])
    alone_gated = torch.cat([kernels.gated_linear(x[i : i + 1], packed, "silu") for i in range(70)])
    set_threads(threads)
    for rows in (*range(2, 26), 31, 47, 64, 70):
        first = 70 - rows
        assert torch.equal(kernels.linear(x[first:70], packed), alone[first:])
        assert torch.equal(kernels.gated_linear(x[first:70], packed, "silu"), alone_gated[first:])
    assert torch.equal(kernels.linear(x, packed)[:70], alone)
    assert torch.equal(kernels.gated_linear(x, packed, "silu")[:70], alone_gated)


LONG = {
    "bfloat16": lambda: (DenseMatrix(random(1408, 9100, dtype=BF16), random(1408, dtype=BF16)), BF16),
    "float32": lambda: (DenseMatrix(random(1408, 9100)), F32),
    "int8": lambda: (int_matrix(8, 1408, 9100), BF16),
    "int8 in groups": lambda: (int_matrix(8, 1408, 9216, 32, zeros=True), BF16),
    "int4": lambda: (int_matrix(4, 1300, 9100, bias=True), BF16),
    "int4 in groups": lambda: (int_matrix(4, 1408, 9216, 128, zeros=True, order=True), F32),
    "int4 symmetric in groups": lambda: (int_matrix(4, 1408, 9216, 64), BF16),
    "int4 in long groups": lambda: (int_matrix(4, 1408, 9216, 4608, zeros=True), BF16),
    "fp8": lambda: (fp8_matrix(1408, 9100), BF16),
    "fp8 in blocks": lambda: (fp8_matrix(1408, 9100, 128), BF16),
}
"""Inputs of which the L2 cache holds those of few rows: they are taken in parts."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LONG)
def test_a_row_of_very_many_inputs_is_the_same_in_any_batch(kernels, name, threads):
    matrix, dtype = LONG[name]()
    packed = kernels.pack(matrix)
    set_threads(threads)
    x = random(241, packed.in_size, dtype=dtype)
    rows = range(0, 241, 16)  # of every other tile, and the last
    alone = torch.cat([kernels.logits(x[row : row + 1], packed) for row in rows])
    alone_gated = torch.cat([kernels.gated_linear(x[row : row + 1], packed, "silu") for row in rows])
    for count in (17, 49, 241):
        held = [row for row in rows if row < count]
        assert torch.equal(kernels.logits(x[:count], packed)[held], alone[: len(held)])
        gated = kernels.gated_linear(x[:count], packed, "silu")
        assert torch.equal(gated[held], alone_gated[: len(held)])
    assert_close(kernels.linear(x[:20], packed), exact(x[:20], matrix), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_the_smallest_numbers_are_the_same_in_any_batch(kernels, dtype):
    """Kernels may scale activations by powers of two, which rounds numbers near the smallest."""
    packed = kernels.pack(int_matrix(4, 100, 256, 32))
    x = (random(40, 256) * 1e-36).to(dtype)
    whole = kernels.linear(x, packed)
    for row in (0, 17, 39):
        assert torch.equal(kernels.linear(x[row : row + 1], packed)[0], whole[row])


ACTIVATIONS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swiglu_oai": lambda gate, up: (
        (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
    ),
}


@pytest.mark.parametrize("inner", [64, 192, 40])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products(kernels, activation, inner):
    matrix = DenseMatrix(random(2 * inner, 70), random(2 * inner, seed=3))
    packed = kernels.pack(matrix)
    for rows in (1, 8, 61):
        x = random(rows, 70, seed=rows)
        expected = ACTIVATIONS[activation](*exact(x, matrix).chunk(2, dim=-1))
        assert_close(kernels.gated_linear(x, packed, activation), expected, 1e-5)


def test_logits_are_float32_and_not_rounded(kernels):
    matrix, x = DenseMatrix(random(100, 64, dtype=BF16)), random(3, 64, dtype=BF16)
    found = kernels.logits(x, kernels.pack(matrix))
    assert found.dtype == F32
    assert_close(found, exact(x, matrix), 1e-6)


def test_the_residual_is_added_before_rounding(kernels):
    matrix = kernels.pack(DenseMatrix(torch.full((64, 1), 2.0**-9, dtype=BF16)))
    residual = torch.ones((1, 64), dtype=BF16)
    found = kernels.linear(torch.full((1, 1), 3.0, dtype=BF16), matrix, residual=residual)
    assert torch.equal(found, torch.full((1, 64), 1 + 2.0**-7, dtype=BF16))


EXPERTS, HIDDEN, INNER = 5, 48, 64


def expert_matrices(dtype):
    return ExpertMatrices(
        tuple(DenseMatrix(random(2 * INNER, HIDDEN, seed=e, dtype=dtype) / 7) for e in range(EXPERTS)),
        tuple(DenseMatrix(random(HIDDEN, INNER, seed=9 + e, dtype=dtype) / 8) for e in range(EXPERTS)),
    )


def choose(tokens, per_token, seed=0):
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:per_token] for _ in range(tokens)])
    return chosen, torch.rand((tokens, per_token), generator=generator)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_are_the_weighted_sum(kernels, tokens, dtype):
    matrices = expert_matrices(dtype)
    x = random(tokens, HIDDEN, seed=1, dtype=dtype)
    chosen, weights = choose(tokens, 3)
    expected = torch.zeros((tokens, HIDDEN), dtype=torch.float64)
    for t in range(tokens):
        for j in range(3):
            gate, up = exact(x[t : t + 1], matrices.gate_up[chosen[t, j]]).chunk(2, dim=-1)
            inner = F.silu(gate) * up
            expected[t] += (weights[t, j] * exact(inner, matrices.down[chosen[t, j]]))[0]
    found = kernels.experts(x, kernels.pack_experts(matrices), chosen, weights, "silu")
    assert_close(found, expected, 2e-2 if dtype == BF16 else 1e-5)


def test_experts_do_not_depend_on_the_batch(kernels):
    packed = kernels.pack_experts(expert_matrices(BF16))
    x = random(50, HIDDEN, dtype=BF16)
    chosen, weights = choose(50, 2)
    whole = kernels.experts(x, packed, chosen, weights, "silu")
    for t in (0, 7, 49):
        alone = kernels.experts(x[t : t + 1], packed, chosen[t : t + 1], weights[t : t + 1], "silu")
        assert torch.equal(alone[0], whole[t])
