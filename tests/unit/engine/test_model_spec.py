"""config.json files as found in the wild, and those we must refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core.errors import SetupError
from baton.engine.model_info import read_model_info
from baton.engine.models.spec import load_spec, parse_spec
from tests.models import make_model

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def spec(**changes):
    return parse_spec({**BASE, **changes})


def test_old_and_new_spelling_of_rope_agree() -> None:
    old = spec(rope_theta=5e5, rope_scaling=LLAMA3, torch_dtype="bfloat16", max_position_embeddings=131072)
    new = spec(
        rope_parameters={**LLAMA3, "rope_theta": 5e5}, dtype="bfloat16", max_position_embeddings=131072
    )
    assert old == new
    assert (old.rope.theta, old.rope.factor, old.rope.original_context_tokens) == (5e5, 8.0, 8192)
    assert old.dtype == "bfloat16"
    assert old.context_tokens == 131072


def test_the_oldest_spelling_says_type() -> None:
    rope = spec(rope_scaling={"type": "linear", "factor": 2.0}, max_position_embeddings=4096).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 10_000.0)


def test_defaults_of_an_old_llama_config() -> None:
    old = spec()
    assert (old.kv_head_count, old.head_dim, old.context_tokens) == (4, 16, 2048)
    assert (old.norm_eps, old.tie_embeddings, old.rope.kind) == (1e-6, False, "default")


def test_yarn_may_be_asked_for_more_context_than_declared() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = spec(architectures=["Qwen2ForCausalLM"], rope_scaling=scaling, max_position_embeddings=32768)
    assert (qwen.context_tokens, qwen.context_tokens_limit) == (32768, 131072)


def test_end_tokens_come_from_both_files() -> None:
    both = parse_spec({**BASE, "eos_token_id": 2}, generation={"eos_token_id": [7, 2, 9]})
    assert both.eos_token_ids == (2, 7, 9)
    assert spec(eos_token_id=None).eos_token_ids == ()


def test_windows_per_layer() -> None:
    assert spec(architectures=["MistralForCausalLM"]).windows == (4096,) * 4
    assert spec(architectures=["MistralForCausalLM"], sliding_window=None).windows == (0,) * 4
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    assert spec(**qwen).windows == (0,) * 4
    assert spec(**qwen, use_sliding_window=True, max_window_layers=3).windows == (0, 0, 0, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert spec(**qwen, use_sliding_window=True, layer_types=kinds).windows == (32, 0, 32, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "MixtralForCausalLM is not supported; supported are Llama",
        ),
        ({"architectures": None}, "architecture none is not supported"),
        ({"hidden_act": "gelu"}, "activation gelu is not supported; supported is silu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"rope_scaling": {"type": "longrope"}}, "type longrope is not supported; supported are default"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported; supported are float32"),
        ({"vocab_size": None}, "vocab_size must be a whole number of at least 1, is None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple of 4 heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(changes, says) -> None:
    with pytest.raises(SetupError) as caught:
        spec(**changes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="does not exist"):
        load_spec(tmp_path / "nowhere")
    with pytest.raises(SetupError, match=r"no config\.json"):
        load_spec(tmp_path)
    config = tmp_path / "config.json"
    for text in ("{", "[1]", '"x"'):
        config.write_text(text)
        with pytest.raises(SetupError, match=r"config\.json"):
            load_spec(tmp_path)
    config.write_bytes(b"\xff\xfe")
    with pytest.raises(SetupError, match=r"config\.json"):
        load_spec(tmp_path)


def test_model_info_needs_no_torch(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", "qwen3")
    code = (
        "import sys, json; from baton.engine.model_info import read_model_info as read;"
        "info = read(sys.argv[1]); assert 'torch' not in sys.modules;"
        "print(json.dumps([info.name, info.architecture, info.context_tokens, info.vocab_size,"
        " info.eos_token_ids, info.dtype]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tiny")], check=True, capture_output=True, timeout=60
    )
    assert json.loads(done.stdout) == ["tiny", "Qwen3ForCausalLM", 8192, 512, [1], "float32"]
    assert read_model_info(tmp_path / "tiny").vocab_size == 512
