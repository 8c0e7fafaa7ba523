"""Quantised tensors of checkpoints against the dense matrices they stand for."""

from functools import partial

import pytest
import torch

from baton.core.errors import SetupError
from engine.kernels.weights import IntMatrix, to_dense
from engine.model_files.quant_scheme import QuantScheme, parse_scheme
from engine.quant.unpack import unpack
from tests import quantised as q

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
INT4 = q.compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", symmetric=True)
INT4_ZEROS = q.compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", symmetric=False)
INT8 = q.compressed_config("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)
W8A8 = q.compressed_config("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)
W8_GROUPS = q.compressed_config(
    "int-quantized", num_bits=8, type="int", strategy="group", symmetric=True, group_size=32
)
FP8 = q.compressed_config("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)

CASES = {
    "gptq": (GPTQ, q.gptq_module),
    "gptq, zero points": (GPTQ, partial(q.gptq_module, symmetric=False)),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, partial(q.gptq_module, bits=8, symmetric=False)),
    "gptq, one group": (GPTQ | {"group_size": -1}, partial(q.gptq_module, group_size=-1)),
    "gptq, act-order": (GPTQ, partial(q.gptq_module, symmetric=False, act_order=True)),
    "gptq v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        partial(q.gptq_module, symmetric=False, version=2),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "GEMM", "zero_point": True}, q.awq_module),
    "packed int4": (INT4, q.packed_module),
    "packed int4, zero points": (INT4_ZEROS, partial(q.packed_module, symmetric=False)),
    "packed int4, act-order": (INT4, partial(q.packed_module, act_order=True)),
    "packed int8": (INT8, partial(q.packed_module, bits=8, group_size=0)),
    "int8": (W8A8, q.int8_module),
    "int8, act-order": (W8_GROUPS, q.grouped_int8_module),
    "fp8": (FP8, q.fp8_module),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        partial(q.fp8_module, block=32),
    ),
}


def _scheme(config: object) -> QuantScheme:
    scheme = parse_scheme({"quantization_config": config}, "config.json")
    assert scheme is not None
    return scheme


@pytest.mark.parametrize("case", CASES)
def test_unpacked_matrix_is_the_one_that_was_packed(case: str) -> None:
    config, module = CASES[case]
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    tensors, dense = module(weight)
    found = unpack(_scheme(config), tensors.get, name="m", out_size=48, in_size=96)
    back = to_dense(found, torch.float32).weight
    torch.testing.assert_close(back, dense, atol=1e-6, rtol=1e-6)
    assert (back - weight).abs().mean() < 0.2
    if isinstance(found, IntMatrix):
        assert int(found.values.min()) >= -(1 << (found.bits - 1))
        assert int(found.values.max()) < 1 << (found.bits - 1)
        assert (found.order is not None) == ("act-order" in case)


def test_symmetric_zero_points_are_dropped() -> None:
    """They cost time in the kernels."""
    tensors, _ = q.gptq_module(torch.randn(16, 64))
    found = unpack(_scheme(GPTQ), tensors.get, name="m", out_size=16, in_size=64)
    assert isinstance(found, IntMatrix)
    assert found.zeros is None
    assert found.group_size == 32


def test_missing_and_misshapen_tensors_are_named() -> None:
    tensors, _ = q.gptq_module(torch.randn(16, 64))
    with pytest.raises(SetupError, match=r"layer\.q\.qweight is torch.int32 \[8, 16\].*128 inputs"):
        unpack(_scheme(GPTQ), tensors.get, name="layer.q", out_size=16, in_size=128)
    del tensors["qzeros"]
    with pytest.raises(SetupError, match=r"no tensor layer\.q\.qzeros"):
        unpack(_scheme(GPTQ), tensors.get, name="layer.q", out_size=16, in_size=64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes are not supported"),
        ({"quant_method": "quip"}, "quip are not supported"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version gemv"),
        (q.compressed_config("marlin-24", num_bits=4, type="int", strategy="group"), "marlin-24"),
        (
            q.compressed_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
            "nvfp4",
        ),
        (
            q.compressed_config("int-quantized", num_bits=8, type="int", strategy="block", symmetric=True),
            "int-quantized by block",
        ),
        (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ("int4", "must be an object"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: object, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        parse_scheme({"quantization_config": config}, "config.json")


def test_unquantised_config_has_no_scheme() -> None:
    assert parse_scheme({}, "config.json") is None
