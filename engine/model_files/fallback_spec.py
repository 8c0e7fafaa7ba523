"""Specs of architectures without a forward pass of our own: decoders that transformers knows.

`fallback` runs them. transformers' configuration classes know each architecture's defaults and other
names for fields; they are imported only when such a model is met.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, cast

from baton.config import ModelConfig
from baton.core.errors import SetupError
from engine.model_files.fields import INTEGER_MAX, LAYERS_MAX, Fields, read_dtype
from engine.model_files.spec import ModelSpec

_ROPE_KINDS = frozenset({None, "default", "linear", "llama3", "yarn", "proportional"})
"""Those by which a position alone decides the rotation: keys are cached and shared."""
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def read_fallback_spec(architecture: str, fields: Fields) -> ModelSpec:
    """Raises SetupError: not a decoder-only model of transformers, or one whose state is more than keys
    and values. What only the modules can tell, `fallback` finds when it loads them."""
    config = _known_config(architecture, fields)
    _refuse_other_state(architecture, config, fields)
    head_count = _size(config, "num_attention_heads", architecture, fields)
    hidden_size = _size(config, "hidden_size", architecture, fields)
    layer_count = _size(config, "num_hidden_layers", architecture, fields)
    if getattr(config, "max_position_embeddings", None) is None:
        raise SetupError(
            f"{fields.where}: {architecture} is not supported: it has no max_position_embeddings, so "
            "positions come into it in a way that attention here does not know, such as ALiBi's biases"
        )
    context_tokens = _size(config, "max_position_embeddings", architecture, fields)
    head_dim = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    head_dim = head_dim or hidden_size // head_count
    if not isinstance(head_dim, int) or not 0 < head_dim <= hidden_size * 64:
        raise SetupError(
            f"{fields.where}: {architecture} is not supported: its head_dim is {head_dim!r:.100}"
        )
    return ModelSpec(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size", architecture, fields),
        hidden_size=hidden_size,
        intermediate_size=0,
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=_kv_heads(config, head_count, fields),
        head_dim=head_dim,
        norm_eps=0.0,
        context_tokens=context_tokens,
        context_tokens_limit=context_tokens,
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        dtype=read_dtype(fields),
        eos_token_ids=(),
        windows=(0,) * layer_count,
        ropes=(),
        layer_ropes=(),
        attention_scale=0.0,
        is_native=False,
        config_digest=_digest(fields),
    )


def check_fallback(spec: ModelSpec, model: ModelConfig) -> None:
    """Raises SetupError: asked for what only models with a forward pass of our own can do."""
    if spec.is_native:
        return
    unsupported = {
        "model.quantization": model.quantization != "none",
        "model.adapters": bool(model.adapters),
        "model.offload": model.offload != "0",
    }
    for name, is_asked in unsupported.items():
        if is_asked:
            raise SetupError(
                f"{name} is not supported for {spec.architecture}, which runs through transformers' modules"
            )


def _known_config(architecture: str, fields: Fields) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = str(fields.data.get("model_type"))
    known = cast(dict[str, str], MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if known.get(kind) != architecture or kind not in CONFIG_MAPPING:
        raise SetupError(
            f"{fields.where}: architecture {architecture} is not supported: it is no decoder that "
            f"transformers {transformers.__version__} knows by model_type {kind}"
        )
    for name, value in fields.data.items():
        # The library makes lists of so many items.
        if "layer" in name and isinstance(value, int) and value > LAYERS_MAX:
            raise SetupError(f"{fields.where}: {name} must be at most {LAYERS_MAX}, is {value!r:.100}")
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(fields.data))
    except Exception as error:  # transformers' validators raise several kinds, by several libraries
        text = str(error).strip() or type(error).__name__
        raise SetupError(f"{fields.where}: transformers refuses it: {text.splitlines()[0]}") from error


def _refuse_other_state(architecture: str, config: Any, fields: Fields) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise SetupError(f"{fields.where}: {architecture} is no decoder-only model")
    if getattr(config, "add_cross_attention", False):
        raise SetupError(f"{fields.where}: {architecture} has cross attention, which is not supported")
    types = set(getattr(config, "layer_types", None) or ())
    if not types <= _LAYER_TYPES:
        others = ", ".join(sorted(types - _LAYER_TYPES))
        raise SetupError(
            f"{fields.where}: {architecture} has layers of type {others}, which is not supported"
        )
    for kind in _rope_kinds(getattr(config, "rope_parameters", None)):
        if kind not in _ROPE_KINDS:
            raise SetupError(f"{fields.where}: {architecture} with rope type {kind} is not supported")
    if fields.has("quantization_config"):
        raise SetupError(
            f"{fields.where}: quantised checkpoints of {architecture} are not supported, it runs through "
            "transformers' modules: use an unquantised one"
        )


def _kv_heads(config: Any, head_count: int, fields: Fields) -> int:
    if getattr(config, "multi_query", False):
        return 1
    found: object = getattr(config, "num_key_value_heads", None) or head_count
    if not isinstance(found, int) or not 0 < found <= head_count:
        raise SetupError(f"{fields.where}: num_key_value_heads is {found!r:.100} of {head_count} heads")
    return found


def _rope_kinds(parameters: object) -> Iterator[object]:
    if isinstance(parameters, dict):
        found = cast(dict[str, object], parameters)
        yield found.get("rope_type")
        for value in found.values():
            yield from _rope_kinds(value)


def _size(config: Any, name: str, architecture: str, fields: Fields) -> int:
    value: object = getattr(config, name, None)
    if not isinstance(value, int) or not 0 < value <= INTEGER_MAX:
        raise SetupError(
            f"{fields.where}: {architecture} is not supported: its {name} is {value!r:.100}, not one whole "
            "number for all layers"
        )
    return value


def _digest(fields: Fields) -> str:
    """Digest of everything that may change a key or value. Nothing is known of the fields here, so all
    count."""
    facts = {key: value for key, value in fields.data.items() if key != "eos_token_id"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
