"""Coded weights in short groups, which tiles of AMX multiply as bfloat16 with their scales in them."""

import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.geometry import KVGeometry
from engine.experts.copies import new_image
from engine.kernels.native import NativeKernels
from engine.kernels.weights import IntMatrix, to_dense
from engine.kv.pool import KVPool
from engine.native.build import find_compiler
from engine.native.library import features, set_threads

BF16, F32 = torch.bfloat16, torch.float32
OUT_SIZE, GROUPS = 70, 3


@pytest.fixture(scope="module")
def kernels():
    geometry = KVGeometry(1, 1, 8, 4, "bfloat16")
    yield NativeKernels(KVPool(geometry, kv_bytes=2**16, device=torch.device("cpu")), threads=1)
    set_threads(1)


def matrix_of(bits, group, scales, zeros=None, seed=0):
    low, high = (-8, 8) if bits == 4 else (-128, 128)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, high, (len(scales), GROUPS * group), generator=generator).to(torch.int8)
    return IntMatrix(bits, codes, scales, zeros, group, None, None)


def weights_read(kernels, matrix):
    """The weights [out, in] as products of unit rows find them, without rounding."""
    unit = torch.eye(matrix.values.shape[1], dtype=BF16)
    return kernels.logits(unit, kernels.pack(matrix)).T


def are_scaled_first():
    """Whether kernels of this run scale weights before they multiply them: tiles, and half precision in the
    processor and the compiler."""
    if not features().startswith("amx"):
        return False
    command = [find_compiler(), "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    return "__AVX512FP16__" in subprocess.run(command, capture_output=True, check=True, text=True).stdout


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from((4, 8)),
    group=st.sampled_from((32, 64)),
    has_zeros=st.booleans(),
    spread=st.floats(0, 4),
    power=st.integers(-60, 60),
    seed=st.integers(0, 2**20),
)
def test_a_weight_is_off_by_its_rounding(kernels, bits, group, has_zeros, spread, power, seed):
    """spread: how many tenfolds the scales of a column's groups differ by."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10 ** (-spread * torch.rand((OUT_SIZE, GROUPS), generator=generator)) * 2.0**power
    zeros = None
    if has_zeros:
        largest = 8 if bits == 4 else 128
        zeros = torch.randint(-largest, largest, (OUT_SIZE, GROUPS), generator=generator).float()
    matrix = matrix_of(bits, group, scales, zeros, seed)
    expected = to_dense(matrix, torch.float64).weight
    found = weights_read(kernels, matrix).double()
    # Half a unit of bfloat16 and two of half precision; sums of large parts are rounded as these are.
    allowed = expected.abs() * 1.3 * 2.0**-8 + expected.abs().amax(1, keepdim=True) * 2.0**-11
    assert ((found - expected).abs() <= allowed).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_bfloat16_where_tiles_multiply_them(kernels, bits):
    scales = torch.rand((OUT_SIZE, GROUPS), generator=torch.Generator().manual_seed(3)) + 0.1
    is_scaled_first = are_scaled_first()
    for group, is_short in ((32, True), (64, True), (128, False)):
        found = weights_read(kernels, matrix_of(bits, group, scales))
        assert torch.equal(found, found.to(BF16).float()) == (is_short and is_scaled_first)


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_of_zeros_stay_nothing(kernels, bits):
    scales = torch.ones((OUT_SIZE, GROUPS))
    scales[5] = 0
    scales[9, 1] = 0
    matrix = matrix_of(bits, 32, scales)
    x = torch.randn((40, GROUPS * 32), generator=torch.Generator().manual_seed(1)).to(BF16) * 100
    for rows in (1, 40):
        found = kernels.logits(x[:rows], kernels.pack(matrix))
        assert found[:, 5].abs().max() < 1e-20
        expected = x[:rows].double() @ to_dense(matrix, torch.float64).weight.T
        assert (found - expected).abs().max() <= 1e-2 * expected.abs().max()


def test_offsets_that_are_large_beside_the_weights_are_not_rounded(kernels):
    """Weights between 1,000 and 1,016: only their differences matter in a row whose sum is zero."""
    matrix = matrix_of(4, 32, torch.ones((OUT_SIZE, GROUPS)), torch.full((OUT_SIZE, GROUPS), -1008.0))
    x = torch.zeros((20, GROUPS * 32), dtype=BF16)
    x[:, 0], x[:, 1] = 1, -1
    expected = (matrix.values[:, 0] - matrix.values[:, 1]).float()
    for rows in (1, 20):
        assert torch.equal(kernels.logits(x[:rows], kernels.pack(matrix))[0], expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_spoils_its_own_column_only(kernels, bad):
    scales = torch.ones((OUT_SIZE, GROUPS))
    scales[3, 1] = bad
    matrix = matrix_of(8, 32, scales)
    x = torch.randn((20, GROUPS * 32), generator=torch.Generator().manual_seed(1)).to(BF16)
    others = [i for i in range(OUT_SIZE) if i != 3]
    expected = x.double() @ matrix.values[others].double().T
    for rows in (1, 20):
        found = kernels.logits(x[:rows], kernels.pack(matrix))
        assert not found[:, 3].isfinite().any()
        assert (found[:, others] - expected[:rows]).abs().max() <= 1e-2 * expected.abs().max()


def test_float32_rows_are_multiplied_by_unrounded_weights(kernels):
    generator = torch.Generator().manual_seed(2)
    scales, zeros = torch.rand((OUT_SIZE, GROUPS), generator=generator), torch.full((OUT_SIZE, GROUPS), 3.0)
    for bits in (4, 8):
        matrix = matrix_of(bits, 32, scales, zeros)
        x = torch.randn((20, GROUPS * 32), generator=generator)
        expected = x.double() @ to_dense(matrix, torch.float64).weight.T
        for rows in (1, 20):
            found = kernels.linear(x[:rows], kernels.pack(matrix))
            assert (found - expected[:rows]).abs().max() <= 3e-6 * expected.abs().max()


@pytest.mark.parametrize("bits", [4, 8])
def test_an_image_says_all_of_a_matrix(kernels, bits):
    """As ranks copy experts: one matrix gets the numbers of another, a thousand times smaller ones."""
    scales = torch.rand((OUT_SIZE, GROUPS), generator=torch.Generator().manual_seed(4)) + 0.1
    small, large = (kernels.pack(matrix_of(bits, 32, scales * by, seed=by)) for by in (1, 1000))
    x = torch.randn((20, GROUPS * 32), generator=torch.Generator().manual_seed(5)).to(BF16)
    expected = kernels.linear(x, small)
    origin, copy = kernels.movable([small]), kernels.movable([large])
    assert origin.sizes == copy.sizes
    image = new_image(origin.byte_count)
    origin.copy_to(image)
    copy.place(image)
    for rows in (1, 20):
        assert torch.equal(kernels.linear(x[:rows], large), expected[:rows])
