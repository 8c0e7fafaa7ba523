"""Shapes of models with experts and with latent attention, from names and from config.json."""

import json

import pytest

from simulator.models import MODELS, LatentWidths, find_model

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}


def write(tmp_path, fields):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return find_model(str(tmp_path))


def test_deepseek_v3_has_the_parameters_that_its_report_states():
    model = MODELS["deepseek-v3"]
    assert model.weights / 1e9 == pytest.approx(671, rel=0.001)
    assert model.weights_used / 1e9 == pytest.approx(37, rel=0.02)
    assert model.expert_layers == 58
    assert model.kv_bytes_per_token() == 61 * (512 + 64) * 2


def test_a_folder_with_nothing_but_deepseeks_config_is_the_same_model(tmp_path):
    named, read = MODELS["deepseek-v3"], write(tmp_path, DEEPSEEK)
    for field in named.__dataclass_fields__:
        if field not in ("name", "head_dim"):
            assert getattr(read, field) == getattr(named, field), field


def test_queries_that_are_not_compressed_are_read(tmp_path):
    lite = {**DEEPSEEK, "q_lora_rank": None, "num_attention_heads": 16, "hidden_size": 2048}
    model = write(tmp_path, lite)
    assert model.latent == LatentWidths(0, 512, 128, 64, 128)
    assert model.attention_weights == 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048


def test_qwens_layers_without_experts_and_its_shared_expert_are_counted(tmp_path):
    qwen = {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 151936,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    model = write(tmp_path, qwen)
    assert (model.expert_layers, model.shared_intermediate, model.groups) == (24, 5632, 1)
    assert model.weights / 1e9 == pytest.approx(14.3, rel=0.01)  # Qwen1.5-MoE-A2.7B's card
    some = write(tmp_path, {**qwen, "mlp_only_layers": [0, 5]})
    assert (some.dense_layers, some.dense_intermediate) == (2, 5632)
    every_other = write(tmp_path, {**qwen, "decoder_sparse_step": 2, "mlp_only_layers": None})
    assert every_other.dense_layers == 12


def test_decoding_with_latent_attention_reads_kv_once_for_all_heads():
    model = MODELS["deepseek-v3"]
    kv_bytes = model.kv_bytes_per_token() / model.layers
    assert model.decode_pair_flops / kv_bytes > 200  # operations per byte: near the ridge of an H100
    plain = MODELS["llama-3-8b"]
    assert plain.decode_pair_flops / (plain.kv_bytes_per_token() / plain.layers) < 10
