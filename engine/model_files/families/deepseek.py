"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437, also R1 and Kimi K2)."""

import math

from msgspec.structs import replace

from baton.core.errors import SetupError
from engine.model_files.families.common import Family, base_spec, refuse_unless
from engine.model_files.fields import Fields
from engine.model_files.rope_spec import RopeSpec
from engine.model_files.spec import MlaSpec, ModelSpec, MoeSpec


def _with_latent_attention(architecture: str, fields: Fields) -> ModelSpec:
    mla = MlaSpec(
        q_lora_rank=fields.integer("q_lora_rank", 0, least=0),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        is_interleaved=fields.flag("rope_interleave", True),
    )
    refuse_unless(fields, "attention_bias", False)
    refuse_unless(fields, "mlp_bias", False)
    spec = base_spec(architecture, fields, head_dim=mla.rope_dim)
    scale = mla.head_dim**-0.5 * _temperature(spec.ropes[0]) ** 2
    return replace(spec, mla=mla, attention_scale=scale, head_dim=mla.head_dim)


def _temperature(rope: RopeSpec) -> float:
    """DeepSeek applies YaRN's attention temperature to the scores, where `mscale_all_dim` says so."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def _experts(fields: Fields, spec: ModelSpec) -> MoeSpec:
    refuse_unless(fields, "moe_layer_freq", 1)
    size = fields.integer("moe_intermediate_size")
    groups = fields.integer("n_group", 1)
    moe = MoeSpec(
        layers=tuple(range(fields.integer("first_k_dense_replace", least=0), spec.layer_count)),
        expert_count=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=size,
        is_normalized=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        group_count=groups,
        groups_kept=fields.integer("topk_group", groups),
        shared_intermediate_size=size * fields.integer("n_shared_experts", 0, least=0),
    )
    if moe.expert_count % groups or moe.groups_kept > groups:
        raise SetupError(
            f"{fields.where}: {groups} groups (n_group) of {moe.expert_count} experts make no sense"
        )
    if moe.experts_per_token > moe.expert_count // groups * moe.groups_kept:
        raise SetupError(f"{fields.where}: num_experts_per_tok is more than the kept groups have")
    return moe


def _deepseek_v2(architecture: str, fields: Fields) -> ModelSpec:
    spec = _with_latent_attention(architecture, fields)
    refuse_unless(fields, "scoring_func", "softmax")
    refuse_unless(fields, "topk_method", "greedy", "group_limited_greedy")
    # The authors' code scales or normalises, transformers scales always; no published model has it.
    refuse_unless(fields, "norm_topk_prob", False)
    moe = _experts(fields, spec)
    if fields.text("topk_method", "greedy") == "greedy":
        moe = replace(moe, group_count=1, groups_kept=1)
    return replace(spec, moe=moe)


def _deepseek_v3(architecture: str, fields: Fields) -> ModelSpec:
    spec = _with_latent_attention(architecture, fields)
    refuse_unless(fields, "scoring_func", "sigmoid")
    refuse_unless(fields, "topk_method", "noaux_tc")
    moe = replace(
        _experts(fields, spec), scoring="sigmoid", group_score="sum_of_two", has_correction_bias=True
    )
    return replace(spec, moe=moe)


FAMILIES = (
    Family(
        ("DeepseekV2ForCausalLM",),
        _deepseek_v2,
        {
            "max_position_embeddings": 2048,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
        },
    ),
    Family(
        ("DeepseekV3ForCausalLM",),
        _deepseek_v3,
        {
            "max_position_embeddings": 4096,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
        },
    ),
)
