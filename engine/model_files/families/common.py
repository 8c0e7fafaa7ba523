"""Parts that families share: a spec with everything as in Llama, for them to change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.errors import SetupError
from engine.model_files.fields import INTEGER_MAX, LAYERS_MAX, Fields, read_dtype
from engine.model_files.rope_spec import RopeKind, RopeSpec, read_rope
from engine.model_files.spec import ActivationName, ModelSpec

_ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """Models that one function reads."""

    architectures: tuple[str, ...]
    read: Callable[[str, Fields], ModelSpec]
    """Reads the spec of one of these architectures. `eos_token_ids` is left to the caller."""
    defaults: Mapping[str, Any]
    """Values that transformers assumes for fields that an (old or hand-written) config.json leaves out."""


def base_spec(
    architecture: str, fields: Fields, *, head_dim: int = 0, rope_kinds: dict[str, RopeKind] | None = None
) -> ModelSpec:
    """head_dim: 0 for the `head_dim` field, or hidden_size / heads. rope_kinds: other names of them."""
    head_count = fields.integer("num_attention_heads")
    kv_head_count = fields.integer("num_key_value_heads", head_count)
    layer_count = fields.integer("num_hidden_layers", most=LAYERS_MAX)
    if head_count % kv_head_count:
        raise SetupError(f"{fields.where}: {head_count} heads cannot share {kv_head_count} key-value heads")
    head_dim = head_dim or _head_dim(fields, head_count)
    context_tokens = fields.integer("max_position_embeddings")
    rope = read_rope(fields, head_dim, renamed=rope_kinds)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        context_tokens=context_tokens,
        context_tokens_limit=context_limit(rope, context_tokens),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        dtype=read_dtype(fields),
        eos_token_ids=(),
        windows=(0,) * layer_count,
        ropes=(rope,),
        layer_ropes=(0,) * layer_count,
        attention_scale=head_dim**-0.5,
        activation=read_activation(fields, "hidden_act"),
    )


def read_activation(fields: Fields, name: str) -> ActivationName:
    wanted = fields.text(name, "silu")
    if wanted not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise SetupError(
            f"{fields.where}: activation {wanted:.100} is not supported; supported are {supported}"
        )
    return _ACTIVATIONS[wanted]


def read_layer_types(fields: Fields, layer_count: int) -> tuple[bool, ...] | None:
    """True for each layer whose attention is windowed; None if config.json does not say."""
    if not fields.has("layer_types"):
        return None
    kinds = fields.texts("layer_types")
    if len(kinds) != layer_count or not set(kinds) <= {FULL, SLIDING}:
        raise SetupError(
            f"{fields.where}: layer_types must name {FULL} or {SLIDING} for each of {layer_count} layers"
        )
    return tuple(kind == SLIDING for kind in kinds)


def refuse_unless(fields: Fields, name: str, *expected: object) -> None:
    """Raises SetupError if the field is there and is none of these: nothing here computes it."""
    if fields.has(name) and fields.data[name] not in expected:
        raise fields.refused(name, f"; supported is {' or '.join(map(repr, expected))}")


def context_limit(rope: RopeSpec, context_tokens: int) -> int:
    if rope.kind not in ("linear", "dynamic", "yarn"):
        return context_tokens
    return max(context_tokens, int(min(INTEGER_MAX, rope.original_context_tokens * rope.factor)))


def _head_dim(fields: Fields, head_count: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if not fields.has("head_dim") and hidden_size % head_count:
        raise SetupError(f"{fields.where}: hidden_size {hidden_size} is no multiple of {head_count} heads")
    head_dim = fields.integer("head_dim", hidden_size // head_count)
    if head_dim % 2:
        raise SetupError(f"{fields.where}: head_dim must be even, is {head_dim}")
    return head_dim
