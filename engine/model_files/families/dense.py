"""Llama and its nearest relatives: Mistral, Qwen2 (and 2.5), Qwen3, Phi-3 (and 3.5, 4)."""

from msgspec.structs import replace

from engine.model_files.families.common import Family, base_spec, read_layer_types, refuse_unless
from engine.model_files.fields import Fields
from engine.model_files.spec import ModelSpec


def _llama(architecture: str, fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields)
    return replace(spec, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _mistral(architecture: str, fields: Fields) -> ModelSpec:
    spec = base_spec(architecture, fields)
    return replace(spec, windows=(fields.integer("sliding_window", 0, least=0),) * spec.layer_count)


def _qwen2(architecture: str, fields: Fields) -> ModelSpec:
    spec = base_spec(architecture, fields)
    return replace(spec, qkv_bias=True, windows=_qwen_windows(fields, spec.layer_count))


def _qwen3(architecture: str, fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields)
    windows = _qwen_windows(fields, spec.layer_count)
    return replace(spec, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=windows)


def _qwen_windows(fields: Fields, layer_count: int) -> tuple[int, ...]:
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return (0,) * layer_count
    window = fields.integer("sliding_window")
    windowed = read_layer_types(fields, layer_count)
    if windowed is None:
        first = fields.integer("max_window_layers", 28, least=0)
        windowed = tuple(layer >= first for layer in range(layer_count))
    return tuple(window if is_windowed else 0 for is_windowed in windowed)


def _phi3(architecture: str, fields: Fields) -> ModelSpec:
    refuse_unless(fields, "attention_bias", False)
    # Early folders say "su" or "yarn" where longrope is meant.
    spec = base_spec(architecture, fields, rope_kinds={"su": "longrope", "yarn": "longrope"})
    window = fields.integer("sliding_window", 0, least=0)
    return replace(spec, fused_projections=True, windows=(window,) * spec.layer_count)


FAMILIES = (
    Family(("LlamaForCausalLM",), _llama, {"max_position_embeddings": 2048}),
    Family(("MistralForCausalLM",), _mistral, {"max_position_embeddings": 131_072, "sliding_window": 4096}),
    Family(("Qwen2ForCausalLM",), _qwen2, {"max_position_embeddings": 32_768}),
    Family(("Qwen3ForCausalLM",), _qwen3, {"max_position_embeddings": 32_768, "head_dim": 128}),
    Family(("Phi3ForCausalLM",), _phi3, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
)
