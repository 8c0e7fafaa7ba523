"""Mixtures of experts with ordinary attention: Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss."""

from msgspec.structs import replace

from baton.core.errors import SetupError
from engine.model_files.families.common import Family, base_spec, read_layer_types, refuse_unless
from engine.model_files.fields import Fields
from engine.model_files.spec import ModelSpec, MoeSpec


def _mixtral(architecture: str, fields: Fields) -> ModelSpec:
    spec = base_spec(architecture, fields)
    moe = MoeSpec(
        layers=tuple(range(spec.layer_count)),
        expert_count=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=spec.intermediate_size,
        is_normalized=True,
        expert_names="block_sparse_moe",
    )
    window = fields.integer("sliding_window", 0, least=0)
    return replace(spec, moe=_checked(moe, fields), windows=(window,) * spec.layer_count)


def _qwen2_moe(architecture: str, fields: Fields) -> ModelSpec:
    spec = base_spec(architecture, fields)
    shared = fields.integer("shared_expert_intermediate_size")
    moe = replace(_qwen_experts(fields, spec), shared_intermediate_size=shared, shared_gate=True)
    windows = spec.windows
    if fields.flag("use_sliding_window") and fields.has("sliding_window"):
        windowed = read_layer_types(fields, spec.layer_count)
        if windowed is None:
            # Which layers have one when config.json does not say differs between versions of transformers.
            raise SetupError(f"{fields.where}: use_sliding_window needs layer_types")
        window = fields.integer("sliding_window")
        windows = tuple(window if is_windowed else 0 for is_windowed in windowed)
    return replace(spec, moe=moe, qkv_bias=fields.flag("qkv_bias", True), windows=windows)


def _qwen3_moe(architecture: str, fields: Fields) -> ModelSpec:
    spec = base_spec(architecture, fields)
    window = 0
    if fields.flag("use_sliding_window"):
        window = fields.integer("sliding_window", 0, least=0)
    bias = fields.flag("attention_bias")
    return replace(
        spec,
        moe=_qwen_experts(fields, spec),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        windows=(window,) * spec.layer_count,
    )


def _qwen_experts(fields: Fields, spec: ModelSpec) -> MoeSpec:
    dense = frozenset(fields.integers("mlp_only_layers") if fields.has("mlp_only_layers") else ())
    step = fields.integer("decoder_sparse_step", 1)
    moe = MoeSpec(
        layers=tuple(n for n in range(spec.layer_count) if n not in dense and (n + 1) % step == 0),
        expert_count=fields.integer("num_experts", fields.integer("num_local_experts", 128)),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        is_normalized=fields.flag("norm_topk_prob"),
    )
    return _checked(moe, fields)


def _gpt_oss(architecture: str, fields: Fields) -> ModelSpec:
    refuse_unless(fields, "swiglu_alpha", 1.702)
    refuse_unless(fields, "swiglu_limit", 7.0)
    spec = base_spec(architecture, fields)
    moe = MoeSpec(
        layers=tuple(range(spec.layer_count)),
        expert_count=fields.integer("num_local_experts", fields.integer("num_experts", 128)),
        experts_per_token=fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4)),
        intermediate_size=spec.intermediate_size,
        scoring="softmax_of_chosen",
        router_bias=True,
        expert_bias=True,
        expert_names="gpt_oss",
        is_mxfp4=fields.nested("quantization_config").data.get("quant_method") == "mxfp4",
    )
    windowed = read_layer_types(fields, spec.layer_count)
    if windowed is None:
        windowed = tuple(layer % 2 == 0 for layer in range(spec.layer_count))
    window = fields.integer("sliding_window")
    bias = fields.flag("attention_bias", True)
    return replace(
        spec,
        moe=_checked(moe, fields),
        activation="swiglu_oai",
        sinks=True,
        qkv_bias=bias,
        o_bias=bias,
        windows=tuple(window if is_windowed else 0 for is_windowed in windowed),
    )


def _checked(moe: MoeSpec, fields: Fields) -> MoeSpec:
    if moe.experts_per_token > moe.expert_count:
        raise SetupError(
            f"{fields.where}: {moe.experts_per_token} of {moe.expert_count} experts per token are asked for"
        )
    return moe


FAMILIES = (
    Family(
        ("MixtralForCausalLM",),
        _mixtral,
        {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    Family(
        ("Qwen2MoeForCausalLM",),
        _qwen2_moe,
        {
            "max_position_embeddings": 32_768,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    Family(
        ("Qwen3MoeForCausalLM",),
        _qwen3_moe,
        {
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "sliding_window": 4096,
        },
    ),
    Family(
        ("GptOssForCausalLM",),
        _gpt_oss,
        {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
)
