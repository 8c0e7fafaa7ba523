"""Quantised checkpoints, and models quantised as they are loaded, against transformers."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from engine.kernels.weights import DenseMatrix, Fp8Matrix, IntMatrix, join_rows, to_dense
from engine.loading.sources import open_checkpoint, open_source
from engine.model_files.check import check_model
from engine.model_files.read_spec import load_spec
from engine.quant.round import group_size_for, round_fp8, round_int4, round_int8
from tests import quantised as q
from tests.models import make_model
from tests.unit.engine.driver import Driver, load

PROMPT = list(range(5, 45))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
INT4 = q.compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", symmetric=True)
W8A16 = q.compressed_config("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)
W8A8 = q.compressed_config(
    "int-quantized", activations=q.TOKENS, num_bits=8, type="int", strategy="channel", symmetric=True
)


def _expected(folder: Path, count: int) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokens = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tokens[0, len(PROMPT) :].tolist()


def _generated(folder: Path, count: int, **model: Any) -> list[int]:
    from baton.core.sampling import SamplingParams

    executor = load(folder, **model)
    try:
        return Driver(executor).generate(PROMPT, SamplingParams(max_tokens=count), chunk=16)
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("kind", "config", "module"),
    [
        ("qwen2", GPTQ, partial(q.gptq_module, symmetric=False, act_order=True)),
        ("llama", AWQ, q.awq_module),
        ("qwen3", INT4, partial(q.packed_module, symmetric=True)),
        ("mistral", W8A16, q.int8_module),
    ],
)
def test_quantised_checkpoint_generates_what_its_dense_meaning_does(
    tmp_path: Path, kind: Any, config: dict[str, Any], module: q.Module
) -> None:
    dense = make_model(tmp_path / "plain", kind)
    same = q.quantise_folder(dense, tmp_path / "quantised", module=module, config=config)
    assert _generated(tmp_path / "quantised", 12) == _expected(same, 12)


@pytest.mark.parametrize(
    ("family", "kind", "error_max"),
    [
        ("qwen2", "int8", 0.05),
        ("qwen2", "int4", 0.6),
        ("phi3", "int8", 0.06),
        ("qwen2_moe", "int8", 0.08),
        ("deepseek_v2", "int8", 0.06),
        ("qwen2", "w8a8", 0.06),
        ("qwen2_moe", "w8a8", 0.1),
    ],
)
def test_quantised_at_load_is_near_and_is_another_fingerprint(
    tmp_path: Path, family: Any, kind: str, error_max: float
) -> None:
    """Random weights suffer more than trained ones."""
    folder = make_model(tmp_path / "m", family, with_tokenizer=False)
    plain, rounded = load(folder), load(folder, quantization=kind)
    assert plain.fingerprint != rounded.fingerprint
    logits = [torch.cat(list(executor.logits_of(PROMPT, chunk_tokens=16))) for executor in (plain, rounded)]
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert 1e-4 < error < error_max


@pytest.mark.parametrize(("kind", "error_max"), [("llama", 0.08), ("mixtral", 0.12)])
def test_w8a8_checkpoint_is_near_its_dense_meaning(tmp_path: Path, kind: Any, error_max: float) -> None:
    """Both implementations are compared with transformers on the dequantised weights."""
    dense = make_model(tmp_path / "plain", kind)
    same = q.quantise_folder(dense, tmp_path / "quantised", module=q.int8_module, config=W8A8)
    model: Any = AutoModelForCausalLM.from_pretrained(same, dtype="float32")
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    for kernels in ("native", "torch"):
        executor = load(tmp_path / "quantised", kernels=kernels)
        logits = torch.cat(list(executor.logits_of(PROMPT, chunk_tokens=16)))
        executor.close()
        error = float((logits - expected).norm() / expected.norm())
        assert 1e-4 < error < error_max, kernels


def test_what_does_not_go_together_is_found_before_loading(tmp_path: Path) -> None:
    dense = make_model(tmp_path / "m", "llama")
    q.quantise_folder(dense, tmp_path / "awq", module=q.awq_module, config=AWQ)
    fp8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    q.quantise_folder(dense, tmp_path / "fp8", module=partial(q.fp8_module, block=32), config=fp8)
    cases = [
        (tmp_path / "awq", {"quantization": "int8"}, r"quantised already \(AWQ int4\)"),
        (tmp_path / "fp8", {}, "fp8, which needs a CUDA device"),
        (dense, {"quantization": "fp8"}, "needs a CUDA device; on the CPU use int8"),
    ]
    for folder, fields, message in cases:
        with pytest.raises(SetupError, match=message):
            check_model(folder, ModelConfig(path=str(folder), **fields), EngineConfig())
        with pytest.raises(SetupError, match=message):
            load(folder, **fields)


def test_w8a8_on_a_gpu_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    dense = make_model(tmp_path / "m", "llama")
    asked = ModelConfig(path=str(dense), quantization="w8a8", device="cuda")
    with pytest.raises(SetupError, match="w8a8 is for CPUs: on a GPU use int8"):
        check_model(dense, asked, EngineConfig())


def test_damaged_quantised_checkpoint_is_named(tmp_path: Path) -> None:
    dense = make_model(tmp_path / "m", "llama")
    q.quantise_folder(dense, tmp_path / "awq", module=q.awq_module, config=AWQ)
    path = tmp_path / "awq" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 256}))
    with pytest.raises(SetupError, match=r"mlp\.gate_proj\.qweight"):
        load(tmp_path / "awq")


# --- rounding -------------------------------------------------------------------------------------


def _weight(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.distributions.StudentT(5.0).sample(shape) * 0.02


def _relative_error(weight: torch.Tensor, matrix: IntMatrix | Fp8Matrix) -> float:
    return float((to_dense(matrix, torch.float32).weight - weight).norm() / weight.norm())


def _nearest(weight: torch.Tensor, bits: int, group: int) -> float:
    """Relative error of rounding to nearest with the largest magnitude at the end of the range."""
    flat = weight.view(-1, group)
    top = (1 << (bits - 1)) - 1
    scale = flat.abs().amax(1, keepdim=True) / top
    return float(((flat / scale).round() * scale - flat).norm() / weight.norm())


@pytest.mark.parametrize(("rounded", "bits", "group"), [(round_int8, 8, 256), (round_int4, 4, 128)])
def test_chosen_scales_beat_rounding_to_nearest(
    rounded: Callable[[DenseMatrix], IntMatrix], bits: int, group: int
) -> None:
    weight = _weight(300, 256)
    matrix = rounded(DenseMatrix(weight))
    assert _relative_error(weight, matrix) < (0.995 if bits == 8 else 0.8) * _nearest(weight, bits, group)


def test_zero_points_are_used_where_weights_lie_on_one_side() -> None:
    skewed = _weight(64, 128).abs() + 0.01
    assert round_int4(DenseMatrix(skewed)).zeros is not None
    assert round_int4(DenseMatrix(torch.randn(64, 128))).zeros is None


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_constant_rows_are_exact(value: float) -> None:
    weight = torch.full((3, 64), value)
    for matrix in (
        round_int8(DenseMatrix(weight)),
        round_int4(DenseMatrix(weight)),
        round_fp8(DenseMatrix(weight)),
    ):
        torch.testing.assert_close(to_dense(matrix, torch.float32).weight, weight, rtol=0.04, atol=0)


def test_fp8_is_near_for_rows_of_any_magnitude() -> None:
    weight = _weight(64, 96) * torch.logspace(-6, 6, 64)[:, None]
    found = to_dense(round_fp8(DenseMatrix(weight)), torch.float32).weight
    assert (((found - weight).norm(dim=1) / weight.norm(dim=1)) < 0.04).all()


def test_groups_divide_the_row() -> None:
    assert [group_size_for(n) for n in (256, 192, 96, 48)] == [128, 64, 32, 0]


def test_joined_rows_mean_the_same() -> None:
    a, b = (DenseMatrix(_weight(32, 128, seed=seed)) for seed in (1, 2))
    order = torch.randperm(128)
    with_order = IntMatrix(
        4, torch.randint(-8, 8, (32, 128), dtype=torch.int8), torch.rand(32, 4), None, 32, order
    )
    pairs = [
        (round_int4(a, asymmetric=True), round_int4(b, asymmetric=False)),
        (round_int8(a), round_int8(b)),
        (round_int8(a), round_int4(b)),
        (with_order, with_order),
        (with_order, round_int4(b)),
        (round_fp8(a), round_fp8(b)),
        (a, round_int8(b)),
    ]
    kinds = [IntMatrix, IntMatrix, IntMatrix, IntMatrix, DenseMatrix, Fp8Matrix, DenseMatrix]
    for (one, other), kind in zip(pairs, kinds, strict=True):
        joined = join_rows([one, other], torch.float32)
        assert type(joined) is kind
        expected = torch.cat([to_dense(m, torch.float32).weight for m in (one, other)])
        torch.testing.assert_close(to_dense(joined, torch.float32).weight, expected)


@pytest.mark.parametrize("block", [0, 32])
def test_fp8_checkpoint_is_read_as_it_is(tmp_path: Path, block: int) -> None:
    """A device with fp8 gets the matrix as it is; the CPU only checks its meaning."""
    dense = make_model(tmp_path / "m", "llama", with_tokenizer=False)
    config = q.compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")
    if block:
        config = {"quant_method": "fp8", "weight_block_size": [block, block]}
    module = partial(q.fp8_module, block=block)
    same = q.quantise_folder(dense, tmp_path / "fp8", module=module, config=config)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    source = open_source(
        open_checkpoint(tmp_path / "fp8"), load_spec(tmp_path / "fp8"), ModelConfig(), **options
    )
    plain = open_source(open_checkpoint(same), load_spec(same), ModelConfig(), **options)
    name = "model.layers.0.mlp.down_proj"
    found = source.matrix(name, 64, 128)
    assert isinstance(found, Fp8Matrix)
    assert found.block == block
    expected = plain.matrix(name, 64, 128)
    torch.testing.assert_close(
        to_dense(found, torch.float32).weight, to_dense(expected, torch.float32).weight
    )
    assert isinstance(source.matrix("lm_head", 512, 64), DenseMatrix)
