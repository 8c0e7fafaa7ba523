"""The part of a model that each rank holds, the shapes that are refused, and the layers that make a stage."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from engine.model_files.division import Division, check_division, divide_layers
from engine.model_files.quant_scheme import QuantScheme
from engine.model_files.read_spec import parse_spec
from engine.model_files.sizes import kv_geometry
from engine.model_files.spec import ModelSpec
from tests.models import model_config

MODULES = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "mixtral": ("q_proj", "experts.3.w1", "experts.3.w3", "experts.3.w2"),
    "qwen2_moe": ("experts.0.gate_proj", "experts.0.down_proj", "shared_expert.up_proj", "mlp.down_proj"),
    "deepseek_v2": ("q_b_proj", "kv_b_proj", "o_proj", "shared_experts.gate_proj", "experts.1.down_proj"),
    "gpt_oss": ("q_proj", "sinks", "experts.2.up_proj", "experts.2.down_proj"),
}


def spec_of(kind: Any, **changes: Any) -> ModelSpec:
    return parse_spec(model_config(kind, **changes).to_dict())


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("kind", MODULES)
def test_ranks_together_hold_every_place_once(kind: str, tensor: int) -> None:
    spec = spec_of(kind, num_key_value_heads=4, vocab=531)
    for module in (*MODULES[kind], "embed_tokens", "lm_head"):
        cuts = [Division(spec, tensor, rank).cut(f"model.layers.0.{module}") for rank in range(tensor)]
        is_by_inputs = module.endswith(("o_proj", "down_proj", "w2"))
        shards = [cut.columns if is_by_inputs else cut.rows for cut in cuts]
        assert all((cut.rows is None) == is_by_inputs for cut in cuts)
        places = sorted(place for shard in shards if shard for one in shard.places for place in one)
        assert [places] == [list(range(shard.total)) for shard in shards[:1] if shard], module
    for name in ("input_layernorm", "q_norm", "mlp.gate", "mlp.shared_expert_gate", "kv_a_proj_with_mqa"):
        cut = Division(spec, tensor, 0).cut(f"model.layers.0.{name}")
        assert (cut.rows, cut.columns) == (None, None)


def test_fused_rows_are_those_of_each_part() -> None:
    """Two heads of 16 of four, one key head of two: q at 0, k behind 64 rows, v behind 96."""
    division = Division(spec_of("phi3"), 2, 1)
    cut = division.cut("model.layers.0.self_attn.qkv_proj")
    assert cut.rows is not None
    assert cut.rows.places == (range(32, 64), range(80, 96), range(112, 128))


def test_key_heads_that_are_fewer_than_ranks_are_held_by_several() -> None:
    spec = spec_of("llama")
    ranks = [Division(spec, 4, rank) for rank in range(4)]
    keys = [rank.cut("model.layers.0.self_attn.k_proj").rows for rank in ranks]
    assert [key.places for key in keys if key] == [
        (range(16),), (range(16),), (range(16, 32),), (range(16, 32),)
    ]  # fmt: skip
    assert {(r.rank_spec().head_count, r.rank_spec().kv_head_count) for r in ranks} == {(1, 1)}


def test_kv_of_a_rank_follows_from_its_spec() -> None:
    model, engine = ModelConfig(), EngineConfig()
    llama = spec_of("llama")
    whole, part = (kv_geometry(spec, model, engine) for spec in (llama, Division(llama, 2, 1).rank_spec()))
    assert part.block_bytes * 2 == whole.block_bytes
    latent = spec_of("deepseek_v3")
    assert kv_geometry(latent, model, engine) == kv_geometry(Division(latent, 2).rank_spec(), model, engine)


def test_a_stage_has_the_layers_windows_and_experts_of_its_place() -> None:
    spec = spec_of("gemma3", num_hidden_layers=3)
    stage = Division(spec, layers=range(1, 3)).rank_spec()
    assert (stage.layer_count, stage.windows, stage.layer_ropes) == (
        2,
        spec.windows[1:],
        spec.layer_ropes[1:],
    )
    mixed = spec_of("deepseek_v2", num_hidden_layers=4)
    assert mixed.moe is not None
    assert mixed.moe.layers == (1, 2, 3)
    second = Division(mixed, layers=range(2, 4)).rank_spec().moe
    assert second is not None
    assert second.layers == (0, 1)


GROUPS = QuantScheme("gptq", 4, group_size=32)


@pytest.mark.parametrize(
    ("kind", "changes", "tensor", "message"),
    [
        (
            "llama",
            {},
            3,
            "tp3 is not possible: 4 attention heads do not divide by 3; possible are tp1, tp2, tp4",
        ),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96},
            4,
            "6 key-value heads neither divide by 4 nor divide it; possible are tp1, tp2",
        ),
        ("llama", {"intermediate_size": 130}, 4, "the intermediate size 130 does not divide by 4"),
        ("mixtral", {"intermediate_size": 50}, 4, "the experts' intermediate size 50 does not divide by 4"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 34},
            4,
            "the shared expert's intermediate size 34 does not divide by 4; possible are tp1, tp2",
        ),
        (
            "llama",
            {"quantization": GROUPS},
            4,
            r"the attention output's 64 inputs are 2 groups of 32 \(GPTQ int4\), which do not divide by 4; "
            "possible are tp1, tp2$",
        ),
        ("llama", {}, 0, "tp0 is not possible: it must be at least 1"),
        (
            "olmo2",
            {"is_native": False},
            2,
            "runs through transformers' modules, whose work cannot be divided",
        ),
    ],
)
def test_what_does_not_divide_is_named(kind: Any, changes: dict[str, Any], tensor: int, message: str) -> None:
    of_spec = {name: changes[name] for name in ("quantization", "is_native") if name in changes}
    of_config = {name: value for name, value in changes.items() if name not in of_spec}
    spec = replace(spec_of("llama" if kind == "olmo2" else kind, **of_config), **of_spec)
    with pytest.raises(SetupError, match=message):
        check_division(spec, tensor=tensor)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        SetupError, match="pp3 has more stages than the model has layers: at most pp2 is possible"
    ):
        check_division(spec_of("llama"), pipeline=3)
    check_division(spec_of("llama"), tensor=2, pipeline=2)


def test_gpt_oss_blocks_need_not_divide() -> None:
    """gpt-oss has 90 blocks of 32 per expert, which eight ranks cannot divide evenly."""
    spec = spec_of("gpt_oss", intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8)
    assert spec.moe is not None
    spec = replace(spec, moe=replace(spec.moe, is_mxfp4=True))
    check_division(spec, tensor=8)
    moes = [Division(spec, 8, rank).rank_spec().moe for rank in range(8)]
    assert [moe.intermediate_size // 32 for moe in moes if moe] == [12, 12, 11, 11, 11, 11, 11, 11]


@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    stages=st.integers(1, 7),
    first=st.integers(0, 20),
    last=st.integers(0, 20),
)
def test_stages_are_as_even_as_layers_allow(costs: list[int], stages: int, first: int, last: int) -> None:
    count = len(costs)
    if stages > count:
        with pytest.raises(SetupError, match=f"pp{stages} is not possible: the model has {count} layers"):
            divide_layers(costs, stages)
        return

    def costliest(ranges: tuple[range, ...]) -> int:
        sums = [sum(costs[layer] for layer in one) for one in ranges]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    found = divide_layers(costs, stages, first_cost=first, last_cost=last)
    assert [layer for one in found for layer in one] == list(range(count))
    assert all(found)
    assert costliest(found) == min(costliest(ranges) for ranges in _all_ways(count, stages))


def _all_ways(count: int, stages: int, start: int = 0) -> list[tuple[range, ...]]:
    if stages == 1:
        return [(range(start, count),)]
    ends = range(start + 1, count - stages + 2)
    return [(range(start, end), *rest) for end in ends for rest in _all_ways(count, stages - 1, end)]


def test_equal_layers_with_a_costly_head_leave_the_last_stage_fewer() -> None:
    assert divide_layers([1.0] * 8, 2) == (range(4), range(4, 8))
    assert divide_layers([1.0] * 8, 2, last_cost=4.0) == (range(6), range(6, 8))
