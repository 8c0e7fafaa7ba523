"""Gemma, Gemma 2, and the text part of Gemma 3."""

from msgspec.structs import replace

from baton.core.errors import SetupError
from engine.model_files.families.common import (
    FULL,
    SLIDING,
    Family,
    base_spec,
    read_activation,
    read_layer_types,
    refuse_unless,
)
from engine.model_files.fields import LAYERS_MAX, Fields
from engine.model_files.rope_spec import RopeSpec, rope_from
from engine.model_files.spec import ModelSpec

_DEFAULTS = {
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _gemma(architecture: str, fields: Fields) -> ModelSpec:
    """The spec that all Gemma models have in common. Gemma 1 has no more."""
    refuse_unless(fields, "use_bidirectional_attention", False)
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields)
    return replace(
        spec,
        norm_offset=1.0,
        embedding_scale=spec.hidden_size**0.5,
        # The first folders say "gelu" in hidden_act and mean the approximation.
        activation=read_activation(fields, "hidden_activation"),
        qkv_bias=bias,
        o_bias=bias,
    )


def _gemma2(architecture: str, fields: Fields) -> ModelSpec:
    spec = _gemma(architecture, fields)
    windowed = read_layer_types(fields, spec.layer_count)
    if windowed is None:
        windowed = tuple(layer % 2 == 0 for layer in range(spec.layer_count))
    window = fields.integer("sliding_window")
    return replace(
        spec,
        post_norms=True,
        attention_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.number("attn_logit_softcapping", 0.0),
        logit_softcap=fields.number("final_logit_softcapping", 0.0),
        windows=tuple(window if is_windowed else 0 for is_windowed in windowed),
    )


def _gemma3(architecture: str, fields: Fields) -> ModelSpec:
    # transformers reads attn_logit_softcapping of a Gemma 3 and does not apply it.
    refuse_unless(fields, "attn_logit_softcapping", 0.0)
    full, sliding = _gemma3_ropes(fields)
    flat = Fields({**fields.data, "rope_parameters": None, "rope_scaling": None}, fields.where)
    layer_count = fields.integer("num_hidden_layers", most=LAYERS_MAX)
    if not fields.has("layer_types"):
        every = fields.integer("sliding_window_pattern", 6)
        kinds = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layer_count)]
        flat = flat.with_defaults({"layer_types": kinds})
    spec = _gemma2(architecture, flat)
    return replace(
        spec,
        qk_norm=True,
        ropes=(full, sliding),
        layer_ropes=tuple(int(window > 0) for window in spec.windows),
    )


def _gemma3_ropes(fields: Fields) -> tuple[RopeSpec, RopeSpec]:
    """(of layers that see everything, of windowed layers)"""
    nested = fields.nested("rope_parameters")
    if nested.data and not set(nested.data) <= {FULL, SLIDING}:
        raise SetupError(f"{nested.where} must be given per layer type ({FULL}, {SLIDING})")
    full = nested.nested(FULL) if nested.has(FULL) else fields.nested("rope_scaling")
    sliding = nested.nested(SLIDING)
    head_dim = fields.integer("head_dim")
    local = Fields(
        {**fields.data, "rope_theta": fields.number("rope_local_base_freq", 10_000.0)}, fields.where
    )
    return rope_from(full, fields, head_dim), rope_from(sliding, local, head_dim)


FAMILIES = (
    Family(
        ("GemmaForCausalLM",), _gemma, {**_DEFAULTS, "num_attention_heads": 16, "num_key_value_heads": 16}
    ),
    Family(
        ("Gemma2ForCausalLM",),
        _gemma2,
        {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    Family(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        _gemma3,
        {
            **_DEFAULTS,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
        },
    ),
)
