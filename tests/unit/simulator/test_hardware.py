import json

import pytest

from baton.core.errors import SetupError
from baton.core.messages import Role
from simulator.fleet.setup import machine_of
from simulator.hardware import GPUS, Node, find_gpu
from simulator.models import MODELS, find_model


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-8b", 8.03), ("llama-3-70b", 70.6), ("qwen2.5-72b", 72.7), ("mixtral-8x7b", 46.7),
     ("qwen3-235b-a22b", 235.1), ("qwen3-30b-a3b", 30.5)],
)  # fmt: skip
def test_parameters_are_those_that_the_models_cards_state(name, billions):
    assert MODELS[name].weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_kv_per_token_of_grouped_query_attention():
    assert MODELS["llama-3-70b"].kv_bytes_per_token() == 2 * 80 * 8 * 128 * 2


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_a_step_obeys_the_roofline(gpu):
    node = Node(MODELS["llama-3-8b"], gpu)
    costs = node.costs(Role.AGGREGATED)
    ideal_read_s = MODELS["llama-3-8b"].weights_used * 2 / gpu.memory_bytes_s
    ideal_chunk_s = 2 * MODELS["llama-3-8b"].weights_used * 2048 / gpu.bf16_flops
    assert costs.step_s(decodes=1) > ideal_read_s
    assert costs.step_s(prompt_tokens=2048) > ideal_chunk_s
    assert costs.step_s(decodes=1) < 2 * ideal_read_s + 0.003
    assert costs.step_s(prompt_tokens=2048) < 2.5 * max(ideal_chunk_s, ideal_read_s) + 0.003


def test_the_linear_costs_meet_the_roofline_where_it_matters():
    node = Node(MODELS["llama-3-70b"], find_gpu("H100"), tensor=4)
    costs = node.costs(Role.AGGREGATED, chunk_tokens=2048)
    chunk_s = node.step_s(prompt_tokens=2048, decodes=0, context_tokens=0, pairs=0)
    assert costs.step_s(prompt_tokens=2048) == pytest.approx(chunk_s, rel=0.01)
    decode_s = node.step_s(prompt_tokens=0, decodes=64, context_tokens=100_000, pairs=0)
    assert costs.step_s(decodes=64, context_tokens=100_000) == pytest.approx(decode_s, rel=0.02)


def test_more_gpus_are_faster_and_hold_more():
    one, four = (Node(MODELS["llama-3-8b"], find_gpu("a100"), tensor=n) for n in (1, 4))
    prompt_s = [n.costs(Role.PREFILL).prompt_s(0, 8192, chunk_tokens=2048) for n in (one, four)]
    assert prompt_s[1] < prompt_s[0] < 4 * prompt_s[1]
    assert four.kv_pool_bytes() > 4 * one.kv_pool_bytes()


def test_a_pipeline_adds_throughput_and_no_speed_to_a_decode_step():
    flat, deep = (Node(MODELS["llama-3-70b"], find_gpu("h100"), tensor=4, pipeline=n) for n in (1, 2))
    assert deep.costs(Role.DECODE).base_s == flat.costs(Role.DECODE).base_s
    prompt_s = [n.costs(Role.PREFILL).prompt_s(0, 8192, chunk_tokens=2048) for n in (flat, deep)]
    assert prompt_s[1] == pytest.approx(prompt_s[0] / 2, rel=0.01)


def test_a_model_that_does_not_fit_is_refused_with_what_to_do():
    with pytest.raises(SetupError, match=r"takes 141 GB.*take more per worker"):
        Node(MODELS["llama-3-70b"], find_gpu("h100")).kv_pool_bytes()


def test_a_folders_config_is_read(tmp_path):
    config = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
              "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 8192}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = find_model(str(tmp_path))
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (12, 4, 64)
    assert shape.weights / 1e6 == pytest.approx(88, rel=0.1)


@pytest.mark.parametrize("text", ["{}", "[]", '{"hidden_size": "x"}', "no json"])
def test_a_broken_config_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SetupError, match="does not describe a decoder"):
        find_model(str(tmp_path))


def test_unknown_names_are_told_what_there_is():
    with pytest.raises(SetupError, match=r"a100.*h100"):
        find_gpu("h900")
    with pytest.raises(SetupError, match="llama-3-8b"):
        find_model("gpt-9")


@pytest.mark.parametrize(("shape", "said"), [((3, 1), "64 attention heads"), ((1, 81), "at most pp80")])
def test_a_shape_that_cannot_exist_is_not_simulated(shape, said):
    tensor, pipeline = shape
    with pytest.raises(SetupError, match=said):
        machine_of(Node(MODELS["llama-3-70b"], find_gpu("h100"), tensor=tensor, pipeline=pipeline))
