"""A model as its config.json describes it. No torch here: the router reads model folders too.

Supported: dense decoders of the Llama family. Whatever would make the result differ from what the
model's authors meant (another architecture, activation, rope variant, a quantised checkpoint) is
refused with a SetupError, never approximated.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from baton.core.errors import SetupError
from baton.core.geometry import DTYPE_BYTES, DTypeName
from baton.engine.quant.scheme import QuantScheme, parse_scheme

Architecture = Literal["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

ARCHITECTURES: tuple[Architecture, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")

# What transformers assumes when an (old or hand-written) config.json leaves a field out.
_CONTEXT_DEFAULT: dict[Architecture, int] = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131_072,
    "Qwen2ForCausalLM": 32_768,
    "Qwen3ForCausalLM": 32_768,
}


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary position embedding: RoFormer (arXiv 2104.09864), and the ways to stretch it.

    linear: position interpolation (arXiv 2306.15595). dynamic: NTK-aware base. yarn: arXiv 2309.00071.
    llama3: the smoothed interpolation of Llama 3.1.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context_tokens: int = 0
    """Context of the pretraining; llama3, dynamic and yarn only."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn: what cos and sin are multiplied with; None: from factor, mscale and mscale_all_dim."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


class ModelSpec(msgspec.Struct, frozen=True):
    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    norm_eps: float
    context_tokens: int
    """Prompt plus generated tokens the model is declared for."""
    context_tokens_limit: int
    """The most an operator may ask for: `context_tokens`, or more where rope scaling stretches it."""
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each query and key head, before the rotation."""
    windows: tuple[int, ...]
    """Per layer: how many positions a token attends to, its own included; 0: all before it."""
    rope: RopeSpec
    dtype: DTypeName
    eos_token_ids: tuple[int, ...]
    quantization: QuantScheme | None = None
    """Of the checkpoint."""


class _Fields:
    """Typed reads from a JSON object, with errors that name file and field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.data.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SetupError(f"{self.where}: {name} must be a whole number of at least {least}, is {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.data.get(name)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise SetupError(f"{self.where}: {name} must be a number, is {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SetupError(f"{self.where}: {name} must be true or false, is {value!r}")
        return value


def parse_spec(
    config: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelSpec:
    """`config` and `generation` are the contents of config.json and generation_config.json.

    Raises SetupError: not a supported model, or a field that is missing or makes no sense.
    """
    fields = _Fields(config, where)
    architecture = _architecture(config, where)
    _refuse_unsupported(config, where)
    head_count = fields.integer("num_attention_heads")
    kv_head_count = fields.integer("num_key_value_heads", head_count)
    layer_count = fields.integer("num_hidden_layers")
    if head_count % kv_head_count:
        raise SetupError(f"{where}: {head_count} heads cannot share {kv_head_count} key-value heads")
    context_tokens = fields.integer("max_position_embeddings", _CONTEXT_DEFAULT[architecture])
    rope = _rope(fields, context_tokens)
    own_attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = own_attention_bias and fields.flag("attention_bias", False)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=_head_dim(fields, architecture, head_count),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        context_tokens=context_tokens,
        context_tokens_limit=_context_limit(rope, context_tokens),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(fields, architecture, layer_count),
        rope=rope,
        dtype=_dtype(config, where),
        eos_token_ids=_eos_token_ids(config, generation or {}, where),
        quantization=parse_scheme(config, where),
    )


def load_spec(folder: Path) -> ModelSpec:
    """Raises SetupError: no such folder, no config.json, broken JSON, or see `parse_spec`."""
    if not folder.is_dir():
        raise SetupError(f"model folder {folder} does not exist")
    config = _read_json(folder / "config.json")
    if config is None:
        raise SetupError(f"{folder} has no config.json: not a Hugging Face model folder")
    generation = _read_json(folder / "generation_config.json")
    return parse_spec(config, generation=generation, where=str(folder / "config.json"))


def _read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise SetupError(f"{path} must hold a JSON object")
    return cast(dict[str, Any], value)


def _architecture(config: Mapping[str, Any], where: str) -> Architecture:
    names: object = config.get("architectures")
    listed = cast(list[object], names) if isinstance(names, list) else []
    for architecture in ARCHITECTURES:
        if architecture in listed:
            return architecture
    found = ", ".join(map(str, listed)) or "none"
    raise SetupError(
        f"{where}: architecture {found} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    activation: object = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise SetupError(f"{where}: activation {activation} is not supported; supported is silu")


def _head_dim(fields: _Fields, architecture: Architecture, head_count: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if not fields.has("head_dim") and architecture != "Qwen3ForCausalLM" and hidden_size % head_count:
        raise SetupError(f"{fields.where}: hidden_size {hidden_size} is no multiple of {head_count} heads")
    default = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // head_count
    head_dim = fields.integer("head_dim", default)
    if head_dim % 2:
        raise SetupError(f"{fields.where}: head_dim must be even, is {head_dim}")
    return head_dim


def _dtype(config: Mapping[str, Any], where: str) -> DTypeName:
    value: object = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    for known in DTYPE_BYTES:
        if name == known:
            return known
    raise SetupError(f"{where}: dtype {name} is not supported; supported are {', '.join(DTYPE_BYTES)}")


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> tuple[int, ...]:
    found: list[int] = []
    for source in (config, generation):
        value: object = source.get("eos_token_id")
        for token in cast(list[object], value) if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int):
                raise SetupError(f"{where}: eos_token_id must be whole numbers, has {token!r}")
            if token not in found:
                found.append(token)
    return tuple(found)


def _windows(fields: _Fields, architecture: Architecture, layer_count: int) -> tuple[int, ...]:
    if architecture == "LlamaForCausalLM":
        return (0,) * layer_count
    if architecture == "MistralForCausalLM":
        # transformers' default for a config.json without the key (Mistral 7B v0.1) is 4096, but an
        # explicit null means none.
        window = fields.integer("sliding_window", 0, least=0) if "sliding_window" in fields.data else 4096
        return (window,) * layer_count
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return (0,) * layer_count
    window = fields.integer("sliding_window")
    kinds: object = fields.data.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else 0 for layer in range(layer_count))
    listed = cast(list[object], kinds) if isinstance(kinds, list) else []
    if len(listed) != layer_count or not set(listed) <= {"full_attention", "sliding_attention"}:
        raise SetupError(
            f"{fields.where}: layer_types must name full_attention or sliding_attention "
            f"for each of {layer_count} layers"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in listed)


def _rope(fields: _Fields, context_tokens: int) -> RopeSpec:
    """transformers 5 writes `rope_parameters`; older folders have `rope_theta` and `rope_scaling`."""
    raw: object = fields.data.get("rope_parameters") or fields.data.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise SetupError(f"{fields.where}: rope parameters must be an object, are {raw!r}")
    params = _Fields(cast(dict[str, Any], raw), f"{fields.where}: rope parameters")
    kind = _rope_kind(params)
    for partial in (fields, params):
        if partial.number("partial_rotary_factor", 1.0) != 1.0:
            raise SetupError(f"{partial.where}: partial_rotary_factor is not supported")
    theta = params.number("rope_theta", fields.number("rope_theta", 10_000.0))
    original = context_tokens
    if kind in ("llama3", "yarn"):
        outer = fields.integer("original_max_position_embeddings", context_tokens)
        original = params.integer("original_max_position_embeddings", outer)
    factor_default = context_tokens / original if kind == "yarn" else None
    attention_factor = params.number("attention_factor") if params.has("attention_factor") else None
    if kind == "default":
        return RopeSpec(kind=kind, theta=theta)
    return RopeSpec(
        kind=kind,
        theta=theta,
        factor=params.number("factor", factor_default),
        original_context_tokens=original,
        low_freq_factor=params.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=params.number("high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=params.number("beta_fast", 32.0),
        beta_slow=params.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        mscale=params.number("mscale", 0.0),
        mscale_all_dim=params.number("mscale_all_dim", 0.0),
        truncate=params.flag("truncate", True),
    )


def _rope_kind(params: _Fields) -> RopeKind:
    name: object = params.data.get("rope_type") or params.data.get("type")
    nested = [key for key, value in params.data.items() if isinstance(value, dict)]
    for kind in ROPE_KINDS:
        if name == kind or (name is None and kind == "default" and not nested):
            return kind
    what = f"per layer type ({', '.join(nested)})" if nested else f"type {name}"
    raise SetupError(f"{params.where}: {what} is not supported; supported are {', '.join(ROPE_KINDS)}")


def _context_limit(rope: RopeSpec, context_tokens: int) -> int:
    if rope.kind not in ("linear", "dynamic", "yarn"):
        return context_tokens
    return max(context_tokens, int(rope.original_context_tokens * rope.factor))
