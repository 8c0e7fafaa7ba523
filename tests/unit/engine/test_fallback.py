"""Architectures without a forward pass of our own: the tokens of transformers, or a clear refusal."""

import json
import logging
import random
from pathlib import Path

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.sampling import SamplingParams
from engine.model_files.check import check_model
from engine.model_files.read_spec import load_spec, parse_spec
from tests.models import Kind, make_model
from tests.unit.engine.driver import Driver, load
from tests.unit.engine.test_families import Family, prompt

GENERATED = SamplingParams(max_tokens=16)
MODELS: dict[str, tuple[Kind, dict]] = {
    "olmo2": ("olmo2", {}),
    "granite-scaled-logits": ("granite", {}),
    "gpt-neox-partial-rotary": ("gpt_neox", {}),
    "cohere2-windows": ("cohere2", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def family(request, tmp_path_factory) -> Family:
    kind, changes = MODELS[request.param]
    return Family(make_model(tmp_path_factory.mktemp("model"), kind, with_tokenizer=False, **changes))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_tokens_equal_transformers_in_any_batch(family: Family, kernels: str) -> None:
    driver, rng = family.driver(kernels), random.Random(8)
    sequences = [driver.start(prompt(length), GENERATED) for length in (1, 36, 70, 130)]
    while going := [s for s in sequences if len(s.generated) < GENERATED.max_tokens]:
        chosen = rng.sample(going, rng.randint(1, len(going)))
        driver.step(*((s, 1 if s.is_prefilled else rng.choice((1, 5, 33, 100))) for s in chosen))
    for sequence in sequences:
        assert sequence.generated == family.expected(tuple(sequence.prompt))
    kept = (*prompt(130)[:100], *prompt(36))
    follower = driver.start(kept, GENERATED, like=sequences[-1])
    assert follower.computed == 96
    driver.finish(follower, chunk=10)
    assert follower.generated == family.expected(kept)


def test_one_line_says_that_it_is_slower(tmp_path: Path, caplog) -> None:
    make_model(tmp_path, "olmo2", with_tokenizer=False)
    seen: list[tuple[int, int]] = []
    with caplog.at_level(logging.WARNING, logger="engine.models.fallback"):
        from engine.execution.executor import Executor

        engine = EngineConfig(kv_bytes=2**20, threads=1)
        config = ModelConfig(path=str(tmp_path), dtype="bfloat16")
        executor = Executor.load(config, engine, progress=lambda done, total: seen.append((done, total)))
    (record,) = caplog.records
    assert "Olmo2ForCausalLM" in record.message
    assert "slower" in record.message
    assert record.message in executor.notes
    assert any("kernels: " in note for note in executor.notes)
    assert seen == [(2, 2)]
    assert Driver(executor).generate(prompt(20), GENERATED)


def test_the_weights_go_when_the_executor_does(tmp_path: Path) -> None:
    import gc
    import weakref

    make_model(tmp_path, "olmo2", with_tokenizer=False)
    executor = load(tmp_path)
    weights = weakref.ref(next(executor._model._model.parameters()))
    executor.close()
    del executor
    gc.collect()
    assert weights() is None


def test_fingerprints_see_every_field(tmp_path: Path) -> None:
    make_model(tmp_path, "granite", with_tokenizer=False)
    before = load(tmp_path).fingerprint
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "residual_multiplier": 0.25}))
    assert load(tmp_path).fingerprint != before


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"},
            "NoSuchForCausalLM is not supported",
        ),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "is no decoder"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "layers of type linear_attention"),
        ({"architectures": ["BartForCausalLM"], "model_type": "bart"}, "no decoder-only model"),
        (
            {
                "architectures": ["Olmo2ForCausalLM"],
                "model_type": "olmo2",
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            "rope type dynamic is not supported",
        ),
        (
            {
                "architectures": ["Olmo2ForCausalLM"],
                "model_type": "olmo2",
                "quantization_config": {"quant_method": "gptq", "bits": 4},
            },
            "quantised checkpoints of Olmo2ForCausalLM",
        ),
        (
            {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": "wide"},
            "transformers refuses it",
        ),
    ],
)
def test_what_config_json_rules_out(changes, says) -> None:
    with pytest.raises(SetupError) as caught:
        parse_spec({**SMALL, **changes})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_positions_without_a_bound_are_told_as_what_they_are() -> None:
    config = {name: value for name, value in SMALL.items() if name != "max_position_embeddings"}
    with pytest.raises(SetupError, match="such as ALiBi's biases"):
        parse_spec({**config, "architectures": ["BloomForCausalLM"], "model_type": "bloom"})


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "take no positions"),
        (
            "GPTJForCausalLM",
            {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
            "replace its attention",
        ),
    ],
)
def test_what_only_the_modules_tell(tmp_path: Path, name: str, config: dict, says: str) -> None:
    import transformers

    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"))
    getattr(transformers, name)(config_class(vocab_size=64, **config)).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256, **data}))
    with pytest.raises(SetupError, match=says):
        load(tmp_path)


def test_state_beside_keys_and_values_is_noticed(tmp_path: Path, monkeypatch) -> None:
    """A model that mixes neighbouring tokens outside of attention loses that at the border of a chunk."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    make_model(tmp_path, "olmo2", with_tokenizer=False)
    whole = Olmo2MLP.forward

    def with_the_previous_token(self, x) -> torch.Tensor:
        return whole(self, x + x.roll(1, dims=1))

    monkeypatch.setattr(Olmo2MLP, "forward", with_the_previous_token)
    with pytest.raises(SetupError, match=r"results differ by \d.*more than keys, values and positions"):
        load(tmp_path)


def test_a_checkpoint_with_a_hole_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_model(tmp_path, "olmo2", with_tokenizer=False)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("asked", [{"quantization": "int8"}, {"adapters": ("a=/somewhere",)}])
def test_what_only_own_forward_passes_can(tmp_path: Path, asked: dict) -> None:
    make_model(tmp_path, "olmo2", with_tokenizer=False)
    assert not load_spec(tmp_path).is_native
    config = ModelConfig(path=str(tmp_path), **asked)
    with pytest.raises(SetupError, match=r"not supported for Olmo2ForCausalLM"):
        check_model(tmp_path, config, EngineConfig(kv_bytes=2**20))
