"""Shapes of models: parameters, KV and work per token, from a known name or a Hugging Face config.json.

Norms, biases and the routers of experts are left out of all counts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from baton.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class LatentWidths:
    """Widths of multi-head latent attention (DeepSeek-V2, 2024), per head where there are heads."""

    query_rank: int
    """Width that queries are compressed to; 0: they are not."""
    kv_rank: int
    """Width that keys and values of all heads are compressed to, which is what the KV cache holds."""
    plain_dim: int
    """Part of a key without position."""
    position_dim: int
    """Part of a key with position; all heads share one."""
    value_dim: int

    @property
    def cached_dim(self) -> int:
        """Numbers per token and layer in the KV cache."""
        return self.kv_rank + self.position_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of an expert, or of the feed-forward network of a model without experts."""
    vocab: int
    experts: int = 0
    experts_used: int = 0
    """Experts that each token is sent to."""
    is_tied: bool = False
    dense_layers: int = 0
    """Layers without experts, in a model that has experts in the others."""
    dense_intermediate: int = 0
    """Width of the feed-forward network in these layers."""
    shared_intermediate: int = 0
    """Width of all shared experts of a layer together."""
    groups: int = 1
    """Groups of experts that routing is limited by; 1: it is not limited."""
    groups_used: int = 1
    """Groups that the experts of one token may be of."""
    latent: LatentWidths | None = None

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_weights(self) -> int:
        """Parameters of one layer."""
        if (latent := self.latent) is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        key_dim = latent.plain_dim + latent.position_dim
        into = latent.query_rank or self.hidden
        query = self.hidden * latent.query_rank + into * self.heads * key_dim
        keys = self.hidden * latent.cached_dim
        values = latent.kv_rank * self.heads * (latent.plain_dim + latent.value_dim)
        return query + keys + values + self.heads * latent.value_dim * self.hidden

    @property
    def expert_weights(self) -> int:
        """Parameters of one routed expert of one layer."""
        return 3 * self.hidden * self.intermediate

    @property
    def shared_weights(self) -> int:
        """Parameters of the shared experts of one layer."""
        return 3 * self.hidden * self.shared_intermediate

    @property
    def vocab_weights(self) -> int:
        """Parameters of the embedding, and as many of the output layer."""
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """Parameters of the whole model."""
        return self.weights_with(max(1, self.experts)) + self.vocab_weights * (1 - self.is_tied)

    @property
    def weights_used(self) -> int:
        """Parameters that one token is multiplied with, the embedding left out."""
        return self.weights_with(max(1, self.experts_used))

    def weights_with(self, experts: float) -> int:
        """Parameters if layers had so many routed experts, the embedding left out."""
        mlp_layers = self.expert_layers or self.layers - self.dense_layers
        mlp = mlp_layers * (self.expert_weights * experts + self.shared_weights)
        dense = self.dense_layers * 3 * self.hidden * self.dense_intermediate
        return int(self.layers * self.attention_weights + mlp + dense + self.vocab_weights)

    def kv_bytes_per_token(self, *, element_bytes: float = 2.0) -> int:
        cached = 2 * self.kv_heads * self.head_dim if self.latent is None else self.latent.cached_dim
        return int(self.layers * cached * element_bytes)

    @property
    def prompt_pair_flops(self) -> int:
        """Operations of attention per layer, and pair of a prompt token and a position before it."""
        if (latent := self.latent) is None:
            return 4 * self.heads * self.head_dim
        return 2 * self.heads * (latent.plain_dim + latent.position_dim + latent.value_dim)

    @property
    def decode_pair_flops(self) -> int:
        """The same for a token that is decoded. Latent attention compares it with what is compressed, so that
        KV is read once for all heads."""
        if (latent := self.latent) is None:
            return 4 * self.heads * self.head_dim
        return 2 * self.heads * (latent.cached_dim + latent.kv_rank)


DEEPSEEK_ATTENTION = LatentWidths(1536, 512, 128, 64, 128)

# From the config.json of each model's public repository.
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28_672, 32_000),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18_944, 152_064),
        ModelShape("qwen2.5-32b", 64, 5120, 40, 8, 128, 27_648, 152_064),
        ModelShape("qwen2.5-72b", 80, 8192, 64, 8, 128, 29_568, 152_064),
        ModelShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936, experts=128, experts_used=8),
        ModelShape("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 151_936, experts=128, experts_used=8),
        ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14_336, 32_000, experts=8, experts_used=2),
        ModelShape(
            "deepseek-v3",
            *(61, 7168, 128, 128, 128, 2048, 129_280),
            experts=256,
            experts_used=8,
            dense_layers=3,
            dense_intermediate=18_432,
            shared_intermediate=2048,
            groups=8,
            groups_used=4,
            latent=DEEPSEEK_ATTENTION,
        ),
    )
}


def find_model(name_or_folder: str) -> ModelShape:
    """Read a model by a name of `MODELS`, or from a Hugging Face folder or config.json. Raises SetupError."""
    known = MODELS.get(name_or_folder.lower())
    if known is not None:
        return known
    path = Path(name_or_folder)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        names = ", ".join(sorted(MODELS))
        raise SetupError(f"no model {name_or_folder!r}: give a folder with a config.json, or one of {names}")
    try:
        fields: object = json.loads(path.read_text())
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        return _shape_of(path.parent.name or name_or_folder, cast("dict[str, object]", fields))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise SetupError(f"{path} does not describe a decoder: {reason}") from None


def _shape_of(name: str, fields: Mapping[str, object]) -> ModelShape:
    heads = _whole(fields, "num_attention_heads")
    hidden = _whole(fields, "hidden_size")
    layers = _whole(fields, "num_hidden_layers")
    experts = _whole(fields, "num_experts", "num_local_experts", "n_routed_experts", default=0)
    mlp = ("moe_intermediate_size", "intermediate_size") if experts else ("intermediate_size",)
    intermediate = _whole(fields, *mlp)
    dense_layers = _dense_layers(fields, layers) if experts else 0
    shared = _whole(fields, "n_shared_experts", default=0) * intermediate
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(fields, "num_key_value_heads", default=heads),
        head_dim=_whole(fields, "head_dim", default=hidden // heads),
        intermediate=intermediate,
        vocab=_whole(fields, "vocab_size"),
        experts=experts,
        experts_used=_whole(fields, "num_experts_per_tok", "experts_per_token", default=2) if experts else 0,
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        dense_layers=dense_layers,
        dense_intermediate=_whole(fields, "intermediate_size") if dense_layers else 0,
        shared_intermediate=_whole(fields, "shared_expert_intermediate_size", default=shared)
        if experts
        else 0,
        groups=_whole(fields, "n_group", default=1) if experts else 1,
        groups_used=_whole(fields, "topk_group", default=1) if experts else 1,
        latent=_latent_of(fields) if fields.get("kv_lora_rank") is not None else None,
    )


def _whole(fields: Mapping[str, object], *names: str, default: int | None = None) -> int:
    """Return the first of these fields that there is. Raises KeyError and ValueError."""
    found = next((fields[n] for n in names if fields.get(n) is not None), default)
    if found is None:
        raise KeyError(names[0])
    if isinstance(found, bool) or not isinstance(found, int):
        raise ValueError(f"{names[0]} must be a whole number, is {found!r}")
    return found


def _dense_layers(fields: Mapping[str, object], layers: int) -> int:
    """Count the layers without experts, by the fields of DeepSeek's and of Qwen's configurations."""
    first = _whole(fields, "first_k_dense_replace", default=0)
    listed = cast("object", fields.get("mlp_only_layers"))
    if isinstance(listed, list):
        return len(cast("list[object]", listed))
    every = _whole(fields, "decoder_sparse_step", "moe_layer_freq", default=1)
    with_experts = sum(layer >= first and layer % max(1, every) == 0 for layer in range(layers))
    return layers - with_experts


def _latent_of(fields: Mapping[str, object]) -> LatentWidths:
    return LatentWidths(
        query_rank=_whole(fields, "q_lora_rank", default=0),
        kv_rank=_whole(fields, "kv_lora_rank"),
        plain_dim=_whole(fields, "qk_nope_head_dim"),
        position_dim=_whole(fields, "qk_rope_head_dim"),
        value_dim=_whole(fields, "v_head_dim"),
    )
