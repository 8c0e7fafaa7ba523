"""The quality bench: its figures agree with transformers, and it notices damage."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from benchmarks import quality
from benchmarks.quality import QualityPlan, measure, text_tokens, variant_model
from commands.bench import app
from engine.kernels.weights import DenseMatrix, IntMatrix
from engine.loading import rounded_source
from engine.quant.round import round_int8
from tests.models import make_model

ENGINE = EngineConfig(kv_bytes=2**22, block_tokens=16, threads=1)
PLAN = QualityPlan(tokens_max=200, context_tokens=80, chunk_tokens=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a little training, because the perplexity of random weights is meaningless."""
    folder = make_model(tmp_path_factory.mktemp("quality") / "m", "qwen2", num_hidden_layers=1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    ids = torch.tensor([text_tokens(folder, None, 512)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def _measure(folder: Path, *names: str) -> dict[str, quality.Quality]:
    base = ModelConfig(path=str(folder))
    variants = [(name, variant_model(name, base)) for name in names]
    found = measure(base, variants, ENGINE, text_tokens(folder, None, 200), PLAN, lambda _: None)
    return {result.variant: result for result in found}


def test_base_perplexity_is_transformers(folder: Path) -> None:
    ids = text_tokens(folder, None, 200)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    losses: list[float] = []
    for start in (0, 80, 160):
        piece = torch.tensor([ids[start : start + 80]])
        with torch.no_grad():
            logprobs = model(piece).logits[0, :-1].log_softmax(-1)
        losses += (-logprobs.gather(1, piece[0, 1:, None])).flatten().tolist()
    base = _measure(folder)["base"]
    assert base.token_count == len(losses) == 197
    assert base.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert base.top1_agreement == 1.0
    assert base.kl_mean_nats == 0.0


def test_quantisation_is_told_from_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(matrix: DenseMatrix) -> IntMatrix:
        """Every fourth row's scale belongs to its neighbour."""
        good = round_int8(matrix)
        scales = good.scales.clone()
        scales[::4] = scales.roll(1, 0)[::4] * 1.5
        return IntMatrix(8, good.values, scales, bias=good.bias)

    good = _measure(folder, "int8", "int4")
    assert good["int8"].top1_agreement > 0.97
    assert abs(good["int8"].perplexity_ratio - 1) < 0.02
    assert 0 < good["int8"].kl_mean_nats < good["int4"].kl_mean_nats < 0.2
    monkeypatch.setattr(rounded_source, "round_int8", broken)
    bad = _measure(folder, "int8")["int8"]
    assert bad.kl_mean_nats > 20 * good["int8"].kl_mean_nats
    assert bad.top1_agreement < good["int8"].top1_agreement
    assert bad.perplexity_ratio > 1.03


def test_command_prints_json_and_fails_below_what_is_asked(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What is the capital of France? Paris is the capital of France. " * 5)
    arguments = ["quality", "--model", str(folder), "--variants", "int4", "--against", "fp32", "--json"]
    arguments += ["--text", str(text), "--tokens", "60", "--context", "30", "--threads", "1"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    found = msgspec.json.decode(done.stdout, type=list[quality.Quality])
    assert [result.variant for result in found] == ["base", "int4"]
    assert json.loads(done.stdout)[0]["top1_agreement"] == 1.0
    failed = CliRunner().invoke(app, [*arguments, "--agreement-min", "1.0"])
    assert isinstance(failed.exception, SetupError)
    assert "int4 agrees in" in str(failed.exception)


def test_what_cannot_be_measured_is_said(folder: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "qwen2", vocab=400, num_hidden_layers=1)
    base = ModelConfig(path=str(folder))
    ids = text_tokens(folder, None, 50)
    with pytest.raises(SetupError, match="400 tokens, the base 512"):
        measure(base, [("other", ModelConfig(path=str(other)))], ENGINE, ids, PLAN, lambda _: None)
    with pytest.raises(SetupError, match="too short"):
        measure(base, [], ENGINE, ids[:1], PLAN, lambda _: None)
    with pytest.raises(SetupError, match="no variant int3"):
        variant_model("int3", base)
    with pytest.raises(SetupError, match="blocks of KV"):
        measure(base, [], EngineConfig(kv_bytes=2**14, block_tokens=16, threads=1),
                text_tokens(folder, None, 200), QualityPlan(context_tokens=200), lambda _: None)  # fmt: skip
