"""What the router must know of a model: how long a sequence may be, which ids exist, which ones end it."""

import json
from pathlib import Path
from typing import Any

import msgspec

from baton.core.errors import PromptTooLong
from engine.model_files.read_spec import load_spec


class ModelCard(msgspec.Struct, frozen=True):
    context_tokens: int
    """Prompt plus generated tokens of one sequence, at most."""
    vocab_size: int
    """Ids are 0 … vocab_size-1."""
    eos_token_ids: tuple[int, ...]
    model_type: str = ""
    hidden_size: int = 0
    """Numbers in an embedding."""
    layer_count: int = 0
    matryoshka_dimensions: tuple[int, ...] | None = None
    """Lengths that embeddings may be cut to; empty: any; None: they may not."""


def prompt_too_long(prompt_tokens: int, context_tokens: int, field: str) -> PromptTooLong:
    return PromptTooLong(
        f"This model's maximum context length is {context_tokens} tokens, and the {field} has "
        f"{prompt_tokens}; at least one must be left for the answer.",
        param=field,
    )


def _matryoshka(config: dict[str, Any]) -> tuple[int, ...] | None:
    """As sentence-transformers and vLLM read it: `matryoshka_dimensions`, or `is_matryoshka` for any."""
    dimensions = config.get("matryoshka_dimensions")
    if isinstance(dimensions, list):
        return tuple(int(one) for one in dimensions)
    return () if config.get("is_matryoshka") else None


def read_model_card(folder: Path) -> ModelCard:
    """Raises SetupError: no model folder, or a model that cannot be served; see `load_spec`."""
    spec = load_spec(folder)
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return ModelCard(
        spec.context_tokens,
        spec.vocab_size,
        spec.eos_token_ids,
        model_type=str(config.get("model_type", "")),
        hidden_size=spec.hidden_size,
        layer_count=spec.layer_count,
        matryoshka_dimensions=_matryoshka(config),
    )
