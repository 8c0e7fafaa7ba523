"""config.json files as found in the wild, and those we must refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core.errors import SetupError
from engine.model_files.read_spec import load_spec, parse_spec
from tests.models import make_model

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"]}
DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"]}
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
    (rope,) = old.ropes
    assert (rope.theta, rope.factor, rope.original_context_tokens) == (5e5, 8.0, 8192)
    assert old.dtype == "bfloat16"
    assert old.context_tokens == 131072


def test_the_oldest_spelling_says_type() -> None:
    (rope,) = spec(rope_scaling={"type": "linear", "factor": 2.0}, max_position_embeddings=4096).ropes
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 10_000.0)


def test_defaults_of_an_old_llama_config() -> None:
    old = spec()
    assert (old.kv_head_count, old.head_dim, old.context_tokens) == (4, 16, 2048)
    assert (old.norm_eps, old.tie_embeddings, old.ropes[0].kind) == (1e-6, False, "default")


def test_yarn_may_be_asked_for_more_context_than_declared() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = spec(architectures=["Qwen2ForCausalLM"], rope_scaling=scaling, max_position_embeddings=32768)
    assert (qwen.context_tokens, qwen.context_tokens_limit) == (32768, 131072)


def test_the_generation_config_has_the_last_word_on_end_tokens() -> None:
    config = {**BASE, "eos_token_id": 2}
    assert parse_spec(config, generation={"eos_token_id": [7, 2, 9]}).eos_token_ids == (7, 2, 9)
    assert parse_spec(config, generation={"eos_token_id": None}).eos_token_ids == (2,)
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
        ({"architectures": None}, "architecture none is not supported"),
        ({"hidden_act": "relu2"}, "activation relu2 is not supported; supported are silu"),
        ({"quantization_config": {"quant_method": "exl2"}}, "exl2"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of numbers, is None"),
        ({"rope_scaling": {"type": "mrope"}}, "type mrope is not supported; supported are default"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be a number"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of 16"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of 16"),
        (
            {**GEMMA2, "use_bidirectional_attention": True},
            "use_bidirectional_attention True is not supported",
        ),
        ({**GEMMA2, "layer_types": ["chunked_attention"] * 4}, "layer_types must name"),
        ({**DEEPSEEK, "attention_bias": True}, "attention_bias True is not supported"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({**DEEPSEEK, "topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({**DEEPSEEK, "n_group": 7}, "7 groups (n_group) of 256 experts"),
        ({**DEEPSEEK, "num_experts_per_tok": 200}, "num_experts_per_tok is more than the kept groups have"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True}, "norm_topk_prob"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2, "num_experts_per_tok": 9},
            "9 of 8 experts",
        ),
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


def test_reading_a_spec_needs_no_torch(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", "qwen3")
    code = (
        "import sys, json; from engine.model_files.read_spec import load_spec; from pathlib import Path;"
        "spec = load_spec(Path(sys.argv[1])); assert 'torch' not in sys.modules;"
        "print(json.dumps([spec.architecture, spec.context_tokens, spec.vocab_size,"
        " spec.eos_token_ids, spec.dtype]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tiny")], check=True, capture_output=True, timeout=60
    )
    assert json.loads(done.stdout) == ["Qwen3ForCausalLM", 8192, 512, [1], "float32"]
