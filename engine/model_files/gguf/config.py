"""A GGUF file's metadata as a Hugging Face config.json. No torch here.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. llama.cpp leaves out what its code knows
of an architecture (activations, soft caps' defaults, window patterns): that is added here.
"""

import struct
from collections.abc import Mapping
from math import inf
from typing import Any, cast

from baton.core.errors import SetupError
from engine.model_files.fields import INTEGER_MAX, LAYERS_MAX
from engine.model_files.gguf.reader import GgufHeader

_HF_NAMES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
_FACTORS_BYTES_MAX = 1 << 20
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Fields:
    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._metadata, self._prefix = header.metadata, architecture
        self._where = header.files[0]

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Value of {architecture}.{name}. Raises SetupError if it is missing without a default, or of another
        kind."""
        value = self._metadata.get(f"{self._prefix}.{name}", default)
        if isinstance(value, list):
            items = cast(list[Any], value)
            value = items[0] if len(set(items)) == 1 else items  # per layer, all the same
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SetupError(
                f"{self._where}: {self._prefix}.{name} is {value!r:.100}, which is not supported"
            )
        return value

    def size(self, name: str, default: int | None = None, *, most: int = INTEGER_MAX) -> int:
        """A whole number above 0."""
        value: int = self.get(name, int, default)
        if not 0 < value <= most:
            raise SetupError(f"{self._where}: {self._prefix}.{name} is {value}, not one of 1 to {most}")
        return value

    def optional(self, name: str) -> Any:
        return self._metadata.get(f"{self._prefix}.{name}")


def hugging_face_config(header: GgufHeader) -> dict[str, Any]:
    """Raises SetupError: an architecture that is not supported, or metadata missing."""
    where = header.files[0]
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _HF_NAMES:
        raise SetupError(
            f"{where}: GGUF files of {architecture!s:.100} are not supported; supported are "
            f"{', '.join(_HF_NAMES)}"
        )
    fields = _Fields(header, architecture)
    name, model_type = _HF_NAMES[architecture]
    if architecture == "llama" and fields.optional("expert_count"):
        name, model_type = "MixtralForCausalLM", "mixtral"
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise SetupError(f"{where} has no token_embd.weight: not a language model")
    heads = fields.size("attention.head_count")
    hidden = fields.size("embedding_length")
    rope_size = fields.size("rope.dimension_count", max(1, hidden // heads))
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": fields.size("block_count", most=LAYERS_MAX),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", int, heads),
        "head_dim": fields.get("attention.key_length", int, rope_size),
        "max_position_embeddings": fields.get("context_length", int),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon", float),
        "rope_theta": fields.get("rope.freq_base", (float, int), 10_000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        "hidden_act": "silu",
    }
    config |= _own_fields(architecture, fields, header)
    config |= _rope_scaling(fields, header)
    return config | _special_tokens(header.metadata)


def _dtype(header: GgufHeader) -> str:
    """Dtype of activations: float32 where all weights are float32, else bfloat16 (also for float16, in which
    CPUs are slow)."""
    return "float32" if {tensor.type for tensor in header.tensors.values()} == {"F32"} else "bfloat16"


def _own_fields(architecture: str, fields: _Fields, header: GgufHeader) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if not architecture.endswith("moe"):
        own["intermediate_size"] = fields.get("feed_forward_length", int)
    if architecture == "llama":
        own["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if fields.optional("expert_count"):
        own |= _experts(architecture, fields)
    if architecture.startswith("gemma"):
        own |= _gemma(architecture, fields)
    if architecture == "phi3":
        own["sliding_window"] = fields.optional("attention.sliding_window")
        hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
        head_dim = fields.size("attention.key_length", max(1, hidden // heads))
        own["head_dim"] = head_dim
        own["partial_rotary_factor"] = fields.size("rope.dimension_count", head_dim) / head_dim
    return own


def _experts(architecture: str, fields: _Fields) -> dict[str, Any]:
    count, chosen = fields.get("expert_count", int), fields.get("expert_used_count", int)
    if architecture == "llama":
        return {"num_local_experts": count, "num_experts_per_tok": chosen}
    own: dict[str, Any] = {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": fields.get("expert_feed_forward_length", int),
        "intermediate_size": fields.get("feed_forward_length", int, 0) or 1,
        # llama.cpp normalises the chosen experts' weights for Qwen3 and does not for Qwen2.
        "norm_topk_prob": architecture == "qwen3moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if architecture == "qwen2moe":
        own["shared_expert_intermediate_size"] = fields.get("expert_shared_feed_forward_length", int)
    return own


def _gemma(architecture: str, fields: _Fields) -> dict[str, Any]:
    layers = fields.size("block_count", most=LAYERS_MAX)
    # llama.cpp's code: every second layer of Gemma 2 attends to all positions, every sixth of Gemma 3.
    period = 2 if architecture == "gemma2" else 6
    own: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields.get("attention.sliding_window", int),
        "layer_types": [
            "full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)
        ],
    }
    head_dim = fields.get("attention.key_length", int)
    own["query_pre_attn_scalar"] = _gemma_scale(layers, head_dim, fields)
    if architecture == "gemma2":
        own["attn_logit_softcapping"] = fields.get("attn_logit_softcapping", float, 50.0)
        own["final_logit_softcapping"] = fields.get("final_logit_softcapping", float, 30.0)
    else:
        own["rope_local_base_freq"] = 10_000.0
    return own


def _gemma_scale(layers: int, head_dim: int, fields: _Fields) -> int:
    """Gemma 2 and 3 of 27B, known by their layers as in llama.cpp, scale by hidden / heads."""
    if layers in (46, 62):
        return fields.size("embedding_length") // fields.size("attention.head_count")
    return head_dim


def _rope_scaling(fields: _Fields, header: GgufHeader) -> dict[str, Any]:
    if "rope_factors_long.weight" in header.tensors:
        original: int = fields.get("rope.scaling.original_context_length", int)
        long, short = (_floats(header, f"rope_factors_{name}.weight") for name in ("long", "short"))
        scaling: dict[str, Any] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    if "rope_freqs.weight" in header.tensors:
        return {"rope_scaling": _llama3_rope(fields, header)}
    kind = fields.optional("rope.scaling.type")
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn"):
        raise SetupError(f"{header.files[0]}: rope scaling {kind!s:.100} is not supported")
    scaling = {"rope_type": kind, "factor": fields.get("rope.scaling.factor", (float, int))}
    original = fields.optional("rope.scaling.original_context_length")
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = original
    if fields.optional("attention.sliding_window") and kind == "linear":
        # Gemma 3: only layers that attend to all positions are stretched.
        return {"rope_scaling": scaling}
    return {"rope_scaling": scaling}


def _llama3_rope(fields: _Fields, header: GgufHeader) -> dict[str, Any]:
    """Llama 3's scaling is stored as its effect, a divisor per frequency; it is recognised by making the
    divisors again. Raises SetupError: they are something else."""
    divisors = _floats(header, "rope_freqs.weight")
    theta = float(fields.get("rope.freq_base", (float, int), 10_000.0))
    factor = max(divisors, default=0.0)
    if not theta > 0 or not all(divisor > 0 and divisor < inf for divisor in divisors) or not factor:
        raise SetupError(f"{header.files[0]}: rope_freqs.weight or rope.freq_base is damaged")
    expected = [llama3_divisor(theta ** (-2 * i / (2 * len(divisors))), factor) for i in range(len(divisors))]
    if any(abs(a - b) > 1e-3 * b for a, b in zip(divisors, expected, strict=True)):
        raise SetupError(f"{header.files[0]}: rope_freqs.weight is not Llama 3's scaling, which is supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def llama3_divisor(frequency: float, factor: float) -> float:
    """Divisor of a rotation's frequency in Llama 3.1: 1 for short waves, `factor` for long ones."""
    tau = 6.283185307179586
    context = _LLAMA3_ROPE["original_max_position_embeddings"]
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    turns = context * frequency / tau
    if turns < low:
        return factor
    if turns > high:
        return 1.0
    smooth = (turns - low) / (high - low)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _floats(header: GgufHeader, name: str) -> list[float]:
    tensor = header.tensors[name]
    if tensor.type != "F32":
        raise SetupError(f"{tensor.file}: {name} is {tensor.type}, wanted is F32")
    size = tensor.end - tensor.start
    if size > _FACTORS_BYTES_MAX:
        raise SetupError(f"{tensor.file}: {name} has {size} bytes, which no rotation needs")
    try:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.start)
            return list(struct.unpack(f"<{size // 4}f", stream.read(size)))
    except (OSError, struct.error) as error:
        raise SetupError(f"cannot read {name} of {tensor.file}: {error}") from error


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    return {name: value for name, value in found.items() if isinstance(value, int)}
